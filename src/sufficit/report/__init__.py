"""The report: a comparison of methods on one classifier, as one HTML file that works offline."""

from pathlib import Path

from sufficit.files import make_folder, place, writing
from sufficit.metrics.scores import MethodScores
from sufficit.report.content import Content, Facts, Shown

__all__ = ["Content", "Facts", "MethodScores", "Shown", "write_report"]


def write_report(path: Path | str, content: Content) -> Path:
    """Write the report of a comparison, and return its path."""
    from sufficit.report.html import render  # imports jinja2, which may be absent in training

    page = render(content)
    make_folder(place(path).parent)
    with writing(place(path)) as part:
        # A file name may hold bytes that are no text; they become character references.
        part.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    return place(path)
