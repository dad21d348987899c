"""Tables of methods, best first, for terminals of 80 columns and for notebooks."""

import math
from collections.abc import Collection, Iterator, Sequence

from rich import box
from rich.table import Table

from sufficit.metrics.columns import ZERO_LINE
from sufficit.outside import html_table, literal
from sufficit.report.answer import verdict
from sufficit.report.content import Content
from sufficit.report.interpretation import cautions, notes, own_alphas
from sufficit.statistics import Estimate, Standing

# Marks of methods in the table; `short_legend` explains those that are there.
BEST = "*"
SAME = "="
CONTROL = "(c)"
AGNOSTIC = "(a)"
UNRANKED = "(-)"
WIDTH = 78  # letters of a row


def results_table(content: Content) -> Table:
    """Return the terminal's table: methods as drawn, fitted ones, controls; each best first.

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
    """Return the columns that a row of 80 letters has room for."""
    known = {name for found in content.summaries.values() for name in found}
    main = ["insertion_percent", "deletion_percent", "base_score", "mask_penalty", "msi"]
    if "msi_rank" in known:
        main[:2] = ["msi_rank"]
    leak = "leak_lift" if "leak_lift" in known else "leak_ratio"
    last = "msi_own_best" if searched else leak
    wanted = dict.fromkeys((*main, last, content.standing.column))
    return [column for column in wanted if column in known]


def _part(content: Content, method: str) -> str:
    """Return the part of the table that a method is in."""
    if method not in content.standing.ranking:
        return "other"
    return "fitted" if method in content.fit_fills else "drawn"


def further_tables(content: Content, *, without: Collection[str] = ()) -> Iterator[Table]:
    """Yield tables of other fills, a twin, a truth and further columns, if they were scored."""
    known = {
        name: one
        for found in content.summaries.values()
        for name, one in found.items()
        if name not in without
    }
    groups: dict[str, list[str]] = {}
    for name in known:
        group = content.heading(name).group
        if group:  # else it is a column of the first table
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
    """Return the same tables as HTML, with the answer and what to know before trusting it."""
    said = [*verdict(content).lines, *(one.text for one in cautions(content))]
    said += [*legend(content), *notes(content)]
    found = [_as_html(results_table(content), said)]
    return "".join([*found, *(_as_html(table) for table in further_tables(content))])


def _as_html(table: Table, said: Sequence[str] = ()) -> str:
    """Return a table as HTML, with sentences below it."""
    cells = [[str(cell) for cell in one.cells] for one in table.columns]
    heads = [str(one.header) for one in table.columns]
    return html_table(str(table.title or ""), heads, zip(*cells, strict=True), said)


def _fitting(content: Content, columns: Sequence[str], room: int) -> Iterator[list[str]]:
    """Yield columns in groups whose heads fit into a row."""
    found: list[str] = []
    for column in columns:
        # Heads are wider than numbers: they decide how many columns fit.
        if found and sum(len(_head(content, one)) + 1 for one in (*found, column)) > room:
            yield found
            found = []
        found.append(column)
    yield from filter(None, [found])


def _empty_table(title: str) -> Table:
    """Return a table with a column for the methods."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("method", no_wrap=True)
    return table


def _head(content: Content, column: str, found: Estimate | None = None) -> str:
    """Return the head of a column, with an arrow to where it is better."""
    better = None if found is None else found.higher_is_better
    arrow = {True: " \u2191", False: " \u2193", None: "  "}[better]
    return f"{content.heading(column).short}{arrow}"


def _cell(found: Estimate | None) -> str:
    """Return a mean as text."""
    return "-" if found is None or math.isnan(found.mean) else f"{found.mean:.3f}"


def marked(content: Content, method: str) -> str:
    """Return a method's name with the mark of a control, of one without rank or without class."""
    if method in content.standing.controls:
        return f"{method} {CONTROL}"
    if method not in content.standing.ranking:
        return f"{method} {UNRANKED}"
    return f"{method} {AGNOSTIC}" if method in content.class_agnostic else method


def gaps(content: Content) -> list[str]:
    """Return why a column of the table has no value, or an interval no end."""
    found = []
    ranks = [
        own["msi_rank"].mean
        for name, own in content.summaries.items()
        if "msi_rank" in own and name != ZERO_LINE  # which has no order
    ]
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
    """Return what the marks of the table mean."""
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
    """Return why fitted methods are ranked apart; empty if there are none."""
    if len(content.groups) < 2:
        return ""
    return (
        "Fitted methods are ranked apart: a fit asks the model before it is scored, so that the two"
        " groups answer different questions."
    )


def correction_words(standing: Standing) -> str:
    """Return for how many pairs the tests are corrected.

    >>> from sufficit.statistics import compare_values
    >>> correction_words(compare_values({"a": [0.5, 0.7], "b": [0.1, 0.4], "c": [0.1, 0.3]}))
    'Holm correction for the 3 pairs of methods'
    """
    methods = len(standing.ranking)
    pairs = methods * (methods - 1) // 2
    families = []
    if pairs:
        families.append(f"the {pairs} pair{'s' * (pairs > 1)} of methods")
    if standing.controls:
        families.append(f"each control's {methods} pair{'s' * (methods > 1)}")
    return f"Holm correction for {' and for '.join(families)}"


def legend(content: Content) -> list[str]:
    """Return what the marks mean, what the groups are, and how the intervals were computed."""
    standing = content.standing
    found = [short_legend(content), groups_words(content)]
    interval = " ".join(["Interval: Student's t, corrected for skewness.", *gaps(content)])
    if standing.pairs:
        exact = all(pair.exact for pair in standing.pairs)
        drawn = "exact" if exact else f"{standing.chance.draws:,} draws"
        found.append(
            f"Paired tests (n = {standing.n}): sign flips ({drawn}) and the interval, level"
            f" {standing.chance.level:g}, {correction_words(standing)}."
        )
    return [*filter(None, found), interval]
