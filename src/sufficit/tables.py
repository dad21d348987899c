"""Methods side by side in a terminal: means, an interval, and which of them is best."""

import math
from collections.abc import Mapping

from rich import box
from rich.table import Table

from sufficit.results import Estimate
from sufficit.statistics import Standing

Summaries = Mapping[str, Mapping[str, Estimate]]
"""For each method the estimate of each column."""

HEADINGS = {
    "insertion_percent": "insertion",
    "deletion_percent": "deletion",
    "base_score": "base",
    "mask_penalty": "penalty",
    "msi": "MSI",
}
SHORT = HEADINGS | {"insertion_percent": "insert", "deletion_percent": "delete"}
"""In 80 columns there is room for one more beside these."""

BEST, TIED = "*", "="


def methods_table(
    summaries: Summaries, standing: Standing, title: str, headings: Mapping[str, str] = HEADINGS
) -> Table:
    """A row a method, best first in the standing's column, which has marks and an interval.

    A method outside the standing is in the table but not in the contest: it is dimmed.
    """
    known = next(iter(summaries.values()))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("method", no_wrap=True)
    shown = [column for column in {**headings, standing.column: ""} if column in known]
    for column in shown:
        arrow = "↑" if known[column].higher_is_better else "↓"
        room = "  " if column == standing.column else ""
        heading = headings.get(column, column)
        table.add_column(f"{heading} {arrow}{room}", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    for method in ranked(summaries, standing):
        cells = [_cell(method, column, summaries, standing) for column in shown]
        cells.append(_interval(summaries[method][standing.column]))
        table.add_row(method, *cells, style=_style(method, standing))
    table.caption, table.caption_justify = legend(standing, headings), "left"
    return table


def ranked(summaries: Summaries, standing: Standing) -> list[str]:
    """All methods by the mean of the standing's column, best first, those without one last."""

    def place(method: str) -> tuple[bool, float]:
        mean = summaries[method][standing.column].mean
        return math.isnan(mean), -mean if standing.higher_is_better else mean

    return sorted(summaries, key=place)


def mark(method: str, standing: Standing) -> str:
    """What stands beside a method's mean: * the best, = not distinguishable from it."""
    if method == standing.best:
        return BEST
    return TIED if method in standing.tied else " "


def legend(standing: Standing, headings: Mapping[str, str] = HEADINGS) -> str:
    """What the marks say, and what they and the interval were made with."""
    chance, pairs = standing.chance, len(standing.pairs)
    heading = headings.get(standing.column, standing.column)
    best = f"{BEST} best {heading} of {len(standing.ranking)}"
    interval = f"Interval: bootstrap, {chance.resamples:,} resamples. Seed {chance.seed}."
    if not pairs:
        return f"{best}. {interval}"
    found = f"{TIED} not distinguishable from it" if standing.tied else "all others differ from it"
    exact = all(pair.exact for pair in standing.pairs)
    drawn = "all ways" if exact else f"{chance.draws:,} draws"
    return (
        f"{best}; {found}: sign-flip test on the same images ({drawn}), level {chance.level:g},"
        f" Holm's correction for {pairs} pair{'s' if pairs > 1 else ''}. {interval}"
    )


def _cell(method: str, column: str, summaries: Summaries, standing: Standing) -> str:
    found = summaries[method][column].mean
    mean = "-" if math.isnan(found) else f"{found:.3f}"
    return f"{mean} {mark(method, standing)}" if column == standing.column else mean


def _interval(estimate: Estimate) -> str:
    return "-" if math.isnan(estimate.low) else f"{estimate.low:.2f} .. {estimate.high:.2f}"


def _style(method: str, standing: Standing) -> str | None:
    if method not in standing.ranking:
        return "dim"
    return "bold" if method == standing.best else None
