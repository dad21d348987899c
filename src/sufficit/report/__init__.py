"""The report: a comparison of methods on one classifier, as one HTML file that works offline."""

from pathlib import Path

from sufficit.metrics.scores import MethodScores
from sufficit.report.content import Content, Facts, Shown, choose, pick_shown

__all__ = ["Content", "Facts", "MethodScores", "Shown", "choose", "pick_shown", "write_report"]


def write_report(path: Path | str, content: Content) -> Path:
    """Write the report of a comparison, and return its path."""
    from sufficit.report import html  # imports jinja2, which may be absent where models are trained

    return html.write_report(path, content)
