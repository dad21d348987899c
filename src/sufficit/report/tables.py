"""Tables of methods, best first, for terminals of 80 columns and for notebooks."""

import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from sufficit.outside import html_table, literal
from sufficit.report.answer import answer
from sufficit.report.content import Content
from sufficit.report.interpretation import cautions, notes, own_alphas
from sufficit.statistics import Estimate

BEST, SAME, CONTROL, AGNOSTIC, UNRANKED = "*", "=", "(c)", "(a)", "(-)"
WIDTH = 78  # letters of a row


def results_table(content: Content) -> Table:
    """The terminal's table: one row per method, best first in the ranked column, which has marks
    and an interval. Controls, and methods that draw the same map for every class, are marked.
    """
    searched, standing = bool(own_alphas(content)), content.standing
    images = f"{content.n} image{'s' if content.n > 1 else ''}"
    title = f"Means over {images}, alpha_min {content.first.alpha_min:g}"
    title += " (best for the mean of the methods)" if searched else ""
    known = next(iter(content.summaries.values()))
    main = ["insertion_percent", "deletion_percent", "base_score", "mask_penalty", "msi"]
    if "msi_rank" in known:  # 80 columns have no room for more
        main[:2] = ["msi_rank"]
    last = "msi_own_best" if searched else "leak_ratio"  # 80 columns have room for one more
    shown = [c for c in dict.fromkeys((*main, last, standing.column)) if c in known]
    table = _empty_table(title)
    table.caption, table.caption_justify = literal(legend(content)), "left"
    for column in shown:
        room = "  " if column == standing.column else ""
        table.add_column(
            f"{_head(content, column, known[column])}{room}", justify="right", no_wrap=True
        )
    table.add_column("95 % interval", justify="right", no_wrap=True)
    marks = {standing.best: BEST} | dict.fromkeys(standing.not_different, SAME)
    for method in content.methods:
        summary = content.summaries[method]
        cells = {column: _cell(summary[column]) for column in shown}
        cells[standing.column] += f" {marks.get(method, ' ')}"
        found = summary[standing.column]
        interval = "-" if math.isnan(found.low) else f"{found.low:.2f} .. {found.high:.2f}"
        style = "bold" if method == standing.best else None
        style = style if method in standing.ranking else "dim"
        table.add_row(literal(marked(content, method)), *cells.values(), interval, style=style)
    return table


def further_tables(content: Content) -> Iterator[Table]:
    """The means of what was asked for besides: other fills and a twin, a truth, further columns."""
    known = {name: one for found in content.summaries.values() for name, one in found.items()}
    groups: dict[str, list[str]] = {}
    for name in known:
        if group := content.heading(name).group:
            groups.setdefault(group, []).append(name)
    names = [marked(content, method) for method in content.methods]
    for title, columns in groups.items():
        for number, some in enumerate(_fitting(content, columns, WIDTH - max(map(len, names)))):
            table = _empty_table("" if number else title)
            for column in some:
                head = _head(content, column, known[column])
                table.add_column(head, justify="right", no_wrap=True)
            for name, method in zip(names, content.methods, strict=True):
                cells = [_cell(content.summaries[method].get(column)) for column in some]
                table.add_row(literal(name), *cells)
            yield table


def notebook_table(content: Content) -> str:
    """The same tables as HTML, with the answer and what to know before trusting it."""
    said = [legend(content), *map(str, answer(content)), *notes(content)]
    said += [one.text for one in cautions(content)]
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
    ranks = [own["msi_rank"].mean for own in content.summaries.values() if "msi_rank" in own]
    means = map(content.mean, content.methods)
    if any(map(math.isnan, ranks)) and not any(map(math.isnan, means)):
        found.append(
            "By rank is - because it needs images in both of two halves, which are drawn by name:"
            " score more images."
        )
    if content.n == 1:
        found.append("An interval needs two images.")
    return found


def legend(content: Content) -> str:
    """What the marks mean, and how they and the interval were computed."""
    standing = content.standing
    chance, pairs = standing.chance, len(standing.pairs)
    count = len(standing.ranking)
    most = "highest" if standing.higher_is_better else "lowest"
    most = f"{BEST} {most} {content.heading(standing.column).short}"
    most += f" of {count} method{'s' if count > 1 else ''}"
    signs = [f"{CONTROL} control"] if content.standing.controls else []
    other = [m for m in content.methods if m not in (*standing.ranking, *standing.controls)]
    signs += [f"{UNRANKED} not ranked"] if other else []
    agnostic = [m for m in content.class_agnostic if m in standing.ranking]
    signs += [f"{AGNOSTIC} class-agnostic: the same map for every class"] if agnostic else []
    interval = " ".join(["Interval: Student's t, corrected for skewness.", *gaps(content)])
    if not pairs:
        return f"{'; '.join([most, *signs])}. {interval}"
    found = f"{SAME} not significantly different from it" if standing.not_different else ""
    exact = all(pair.exact for pair in standing.pairs)
    drawn = "exact" if exact else f"{chance.draws:,} draws"
    return (
        f"{'; '.join(filter(None, [most, found, *signs]))}. Paired tests (n ="
        f" {standing.n}): sign flips ({drawn}) and the interval, level {chance.level:g}, Holm"
        f" correction for {pairs} pair{'s' if pairs > 1 else ''}. {interval}"
    )
