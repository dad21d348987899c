"""Sanity checks of explanation methods: `sanity_check` and its report."""

from sufficit.sanity.checks import (
    FolderSanity,
    SanityOptions,
    check_folder,
    sanity_check,
    save_sanity,
)
from sufficit.sanity.randomization import LabelTraining
from sufficit.sanity.sanity_report import THRESHOLD, Likeness, SanityReport

__all__ = [
    "THRESHOLD",
    "FolderSanity",
    "LabelTraining",
    "Likeness",
    "SanityOptions",
    "SanityReport",
    "check_folder",
    "sanity_check",
    "save_sanity",
]
