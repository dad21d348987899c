"""Tables of methods, best first, for terminals of 80 columns and for notebooks."""

import math
from collections.abc import Collection, Iterator, Sequence

from rich import box
from rich.table import Table

from sufficit.metrics.columns import ZERO_LINE
from sufficit.outside import html_table, literal
from sufficit.report.answer import verdict
from sufficit.report.content import Content
from sufficit.report.interpretation import (
    cautions,
    notes,
    own_alphas,
)
from sufficit.statistics import Estimate

BEST, SAME, CONTROL, AGNOSTIC, UNRANKED = "*", "=", "(c)", "(a)", "(-)"
WIDTH = 78  # letters of a row


def results_table(content: Content) -> Table:
    """The terminal's table: methods as they are drawn, fitted ones, controls; each best first.

    The ranked column has marks and an interval, the controls and methods that draw the same map for
    every class are marked.
    """
    standing = content.standing
    searched = bool(own_alphas(content))
    images = f"{content.n:,} image{'s' if content.n > 1 else ''}"
    title = f"Means over {images}, alpha_min {content.first.alpha_min:g}"
    title += " (best for the mean of the methods)" if searched else ""
    table = _empty_table(title)
    shown = _shown_columns(content, searched=searched)
    known = {name: one for found in content.summaries.values() for name, one in found.items()}
    for column in shown:
        room = "  " if column == standing.column else ""
        head = f"{_head(content, column, known[column])}{room}"
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    marks: dict[str, str] = {}
    for group in content.groups:
        # A group of one is compared with controls alone.
        marks |= {group.best: BEST} | dict.fromkeys(group.not_different, SAME)
    for method, following in zip(content.methods, [*content.methods[1:], ""], strict=True):
        summary = content.summaries[method]
        cells = {column: _cell(summary.get(column)) for column in shown}
        cells[standing.column] += f" {marks.get(method, ' ')}"
        found = summary[standing.column]
        interval = "-" if math.isnan(found.low) else f"{found.low:.2f} .. {found.high:.2f}"
        style = "bold" if marks.get(method) == BEST else None
        style = style if method in standing.ranking else "dim"
        ends = bool(following) and _part(content, method) != _part(content, following)
        name = literal(marked(content, method))
        table.add_row(name, *cells.values(), interval, style=style, end_section=ends)
    return table


def _shown_columns(content: Content, *, searched: bool) -> list[str]:
    """The columns that a row of 80 letters has room for."""
    known = {name for found in content.summaries.values() for name in found}
    main = ["insertion_percent", "deletion_percent", "base_score", "mask_penalty", "msi"]
    if "msi_rank" in known:
        main[:2] = ["msi_rank"]
    leak = "leak_lift" if "leak_lift" in known else "leak_ratio"
    last = "msi_own_best" if searched else leak
    wanted = dict.fromkeys((*main, last, content.standing.column))
    return [column for column in wanted if column in known]


def _part(content: Content, method: str) -> str:
    """The part of the table that a method is in."""
    if method not in content.standing.ranking:
        return "other"
    return "fitted" if method in content.fit_fills else "drawn"


def further_tables(content: Content, *, without: Collection[str] = ()) -> Iterator[Table]:
    """The means of what was asked for besides: other fills and a twin, a truth, further columns."""
    known = {
        name: one
        for found in content.summaries.values()
        for name, one in found.items()
        if name not in without
    }
    groups: dict[str, list[str]] = {}
    for name in known:
        if group := content.heading(name).group:
            groups.setdefault(group, []).append(name)
    for title, columns in groups.items():
        methods = [m for m in content.methods if {*columns} & {*content.summaries[m]}]
        names = [marked(content, method) for method in methods]
        for number, some in enumerate(_fitting(content, columns, WIDTH - max(map(len, names)))):
            table = _empty_table("" if number else title)
            for column in some:
                head = _head(content, column, known[column])
                table.add_column(head, justify="right", no_wrap=True)
            for name, method in zip(names, methods, strict=True):
                cells = [_cell(content.summaries[method].get(column)) for column in some]
                table.add_row(literal(name), *cells)
            yield table


def notebook_table(content: Content) -> str:
    """The same tables as HTML, with the answer and what to know before trusting it."""
    said = [*verdict(content).lines, *(one.text for one in cautions(content))]
    said += [*legend(content), *notes(content)]
    found = [_as_html(results_table(content), said)]
    return "".join([*found, *(_as_html(table) for table in further_tables(content))])


def _as_html(table: Table, said: Sequence[str] = ()) -> str:
    cells = [[str(cell) for cell in one.cells] for one in table.columns]
    heads = [str(one.header) for one in table.columns]
    return html_table(str(table.title or ""), heads, zip(*cells, strict=True), said)


def _fitting(content: Content, columns: Sequence[str], room: int) -> Iterator[list[str]]:
    """Columns in groups whose heads fit into a row."""
    found: list[str] = []
    for column in columns:
        if found and sum(len(_head(content, one)) + 1 for one in (*found, column)) > room:
            yield found
            found = []
        found.append(column)
    yield from filter(None, [found])


def _empty_table(title: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("method", no_wrap=True)
    return table


def _head(content: Content, column: str, found: Estimate | None = None) -> str:
    better = None if found is None else found.higher_is_better
    arrow = {True: " \u2191", False: " \u2193", None: "  "}[better]
    return f"{content.heading(column).short}{arrow}"


def _cell(found: Estimate | None) -> str:
    return "-" if found is None or math.isnan(found.mean) else f"{found.mean:.3f}"


def marked(content: Content, method: str) -> str:
    """A method's name with the mark of a control, of one without rank or without class."""
    if method in content.standing.controls:
        return f"{method} {CONTROL}"
    if method not in content.standing.ranking:
        return f"{method} {UNRANKED}"
    return f"{method} {AGNOSTIC}" if method in content.class_agnostic else method


def gaps(content: Content) -> list[str]:
    """Why a column of the table has no value, or an interval no end."""
    found = []
    ranks = [own["msi_rank"].mean for n, own in content.summaries.items()
             if "msi_rank" in own and n != ZERO_LINE]  # fmt: skip
    means = map(content.mean, content.methods)
    if any(map(math.isnan, ranks)) and not any(map(math.isnan, means)):
        found.append(
            "By rank is - because it needs images in both of two halves, which are drawn by name:"
            " score more images."
        )
    if content.n == 1:
        found.append("An interval needs two images.")
    return found


def short_legend(content: Content) -> str:
    """What the marks of the table mean."""
    standing = content.standing
    most = "highest" if standing.higher_is_better else "lowest"
    several = len(content.groups) > 1
    found = [f"{BEST} {most} {content.heading(standing.column).short}"]
    found[0] += " of its group" if several else ""
    if any(group.not_different for group in content.groups):
        found.append(f"{SAME} not significantly different from it")
    if standing.controls:
        found.append(f"{CONTROL} control")
    if any(m not in (*standing.ranking, *standing.controls) for m in content.methods):
        found.append(f"{UNRANKED} not ranked")
    if any(method in standing.ranking for method in content.class_agnostic):
        found.append(f"{AGNOSTIC} class-agnostic: the same map for every class")
    return f"{'; '.join(found)}."


def groups_words(content: Content) -> str:
    """That fitted methods are ranked apart; empty where there are none."""
    if len(content.groups) < 2:
        return ""
    return (
        "Fitted methods are ranked apart: a fit asks the model before it is scored, so that the two"
        " groups answer different questions."
    )


def legend(content: Content) -> list[str]:
    """What the marks mean, what the groups are, and how the intervals were computed."""
    standing = content.standing
    found = [short_legend(content), groups_words(content)]
    interval = " ".join(["Interval: Student's t, corrected for skewness.", *gaps(content)])
    if standing.pairs:
        pairs = len(standing.pairs)
        exact = all(pair.exact for pair in standing.pairs)
        drawn = "exact" if exact else f"{standing.chance.draws:,} draws"
        found.append(
            f"Paired tests (n = {standing.n}): sign flips ({drawn}) and the interval, level"
            f" {standing.chance.level:g}, Holm correction for {pairs} pair{'s' * (pairs > 1)}."
        )
    return [*filter(None, found), interval]
