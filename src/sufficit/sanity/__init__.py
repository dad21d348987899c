"""Sanity checks of explanation methods: `sanity_check` and its report."""

from sufficit.sanity.checks import (
    SanityOptions,
    SanityReport,
    check_folder,
    sanity_check,
    save_sanity,
)

__all__ = ["SanityOptions", "SanityReport", "check_folder", "sanity_check", "save_sanity"]
