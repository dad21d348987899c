"""Sanity checks of explanation methods: `sanity_check` and its report."""

from sufficit.sanity.checks import SanityReport, check_folder, sanity_check, save_sanity

__all__ = ["SanityReport", "check_folder", "sanity_check", "save_sanity"]
