"""The report: how methods did on one classifier, as one HTML file that needs no network."""

from sufficit.report.content import Content, Facts, Shown, pick_shown
from sufficit.report.page import write_report

__all__ = ["Content", "Facts", "Shown", "pick_shown", "write_report"]
