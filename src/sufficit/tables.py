"""The table of methods in a terminal: means, an interval, and which method is best."""

import math
from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from sufficit.metrics.registry import heading
from sufficit.statistics import Estimate, Standing

Summaries = Mapping[str, Mapping[str, Estimate]]
"""The estimate of each column, per method."""

MAIN = ("insertion_percent", "deletion_percent", "base_score", "mask_penalty", "msi")
"""80 columns of a terminal have room for one more."""

BEST, SAME = "*", "="


def methods_table(
    summaries: Summaries, standing: Standing, title: str, columns: Sequence[str] = MAIN
) -> Table:
    """One row per method, best first in the ranked column, which has marks and an interval.

    A method outside the ranking, such as a control, is dimmed.
    """
    known = next(iter(summaries.values()))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("method", no_wrap=True)
    shown = [column for column in dict.fromkeys((*columns, standing.column)) if column in known]
    for column in shown:
        arrow = "↑" if known[column].higher_is_better else "↓"
        room = "  " if column == standing.column else ""
        table.add_column(f"{heading(column).short} {arrow}{room}", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    for method in ranked(summaries, standing):
        cells = []
        for column in shown:
            mean = summaries[method][column].mean
            cell = "-" if math.isnan(mean) else f"{mean:.3f}"
            cells.append(f"{cell} {mark(method, standing)}" if column == standing.column else cell)
        found = summaries[method][standing.column]
        cells.append("-" if math.isnan(found.low) else f"{found.low:.2f} .. {found.high:.2f}")
        ranks = method in standing.ranking
        style = ("bold" if method == standing.best else None) if ranks else "dim"
        table.add_row(method, *cells, style=style)
    table.caption, table.caption_justify = legend(standing), "left"
    return table


def ranked(summaries: Summaries, standing: Standing) -> list[str]:
    """All methods by the mean of the ranked column, best first, those without a mean last."""

    def place(method: str) -> tuple[bool, float]:
        mean = summaries[method][standing.column].mean
        return math.isnan(mean), -mean if standing.higher_is_better else mean

    return sorted(summaries, key=place)


def mark(method: str, standing: Standing) -> str:
    """The mark after a method's mean: * the best, = not significantly different from it."""
    if method == standing.best:
        return BEST
    return SAME if method in standing.tied else " "


def legend(standing: Standing) -> str:
    """What the marks mean, and how they and the interval were computed."""
    chance, pairs = standing.chance, len(standing.pairs)
    best = f"{BEST} best {heading(standing.column).short} of {len(standing.ranking)}"
    interval = f"Interval: bootstrap, {chance.resamples:,} resamples, seed {chance.seed}."
    if not pairs:
        return f"{best}. {interval}"
    found = f"{SAME} not significantly different" if standing.tied else "all others differ"
    exact = all(pair.exact for pair in standing.pairs)
    drawn = "exact" if exact else f"{chance.draws:,} draws"
    return (
        f"{best}; {found} (n = {standing.n}): paired sign-flip test ({drawn}), level"
        f" {chance.level:g}, Holm correction for {pairs} pair{'s' if pairs > 1 else ''}. {interval}"
    )
