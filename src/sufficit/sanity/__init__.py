"""Sanity checks of explanation methods: `sanity_check` and its report."""

from sufficit.sanity.checks import SanityOptions, check_folder, sanity_check, save_sanity
from sufficit.sanity.sanity_report import SanityReport

__all__ = ["SanityOptions", "SanityReport", "check_folder", "sanity_check", "save_sanity"]
