"""Sanity checks of explanation methods: `sanity_check`, and what it reports."""

from sufficit.sanity.checking import sanity_check
from sufficit.sanity.folder import FolderSanity, SanityOptions, check_folder, save_sanity
from sufficit.sanity.randomising import LabelTraining
from sufficit.sanity.report import THRESHOLD, Likeness, SanityReport

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
