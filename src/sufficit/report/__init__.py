"""The report: how methods did on one classifier, as one HTML file that needs no network."""

from pathlib import Path

from sufficit.report.content import Content, Facts, Shown, pick_shown

__all__ = ["Content", "Facts", "Shown", "pick_shown", "write_report"]


def write_report(path: Path | str, content: Content) -> Path:
    """Write the report of a comparison, and return where it is."""
    from sufficit.report import page  # only now: jinja2 is not there where models are trained

    return page.write_report(path, content)
