"""Figures of a finished run, for `sufficit figure` and for notebooks."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sufficit import plots
from sufficit.errors import UserError, unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sufficit.runs.results import RunResults

KINDS = ("sheet", "curves", "alpha", "sizes")
ORDERS = ("best", "worst", "disputed")
NAMES = 1000  # of images, at most, that a message suggests


def draw(
    results: "RunResults",
    show: str = "sheet",
    methods: Sequence[str] | None = None,
    *,
    images: Sequence[str] = ("best", "disputed", "worst"),
    columns: Sequence[str] = ("msi",),
    kept: bool = False,
    rest: bool = False,
    curves: Sequence[str] | None = plots.PAPER_CURVES,
    look: plots.Look = plots.PAPER,
    data: str | Path | None = None,
) -> "Figure":
    """Draw a sheet of images, mean curves, MSI over alpha_min, or sizes; numbers are the run's."""
    if show not in KINDS:
        raise unknown("figure", show, KINDS)
    chosen = [m for m in results.methods if m not in results.unranked]
    chosen = chosen if methods is None else list(methods)
    for method in chosen:
        if method not in results.methods:
            raise unknown("method in this run", method, results.methods)
    if not chosen:
        raise UserError("a figure needs at least one method: name one with --methods")
    labels = results.labels()
    scores = {labels[method]: results.scores[method] for method in chosen}
    quiet = [labels[method] for method in results.unranked if method in chosen]
    if show == "curves":
        return plots.methods_figure(scores, quiet, curves, look)
    if show == "alpha":
        curve = results.record.get("alpha_curve")
        if curve is not None:
            curve = {**curve, "mean_msi": {labels[m]: msi for m, msi in curve["mean_msi"].items()}}
        return plots.alpha_figure(scores, curve, quiet, look)
    if show == "sizes":
        return plots.sizes_figure({labels[m]: results.summaries[m] for m in chosen}, quiet, look)
    rows = rows_named(results, images, chosen)
    heads = {method: labels[method].replace(" (", "\n(") for method in chosen}
    captions = {  # first, so that wrong names raise before anything is drawn
        heads[m]: plots.score_captions({c: _values(results, m, c, rows) for c in columns})
        for m in chosen
    }
    pixels, found = results.images(rows, data), results.heatmaps(rows, chosen)
    maps = {heads[method]: drawn for method, drawn in found.items()}
    fill, alpha_min = results.fill, results.alpha_min
    under = plots.masked_images(pixels, maps, fill, alpha_min, kept=kept, rest=rest)
    titles = results.class_names(rows)
    return plots.sheet_figure(pixels, maps, titles, captions, under=under, look=look)


def rows_named(results: "RunResults", words: Sequence[str], methods: Sequence[str]) -> list[int]:
    """Rows of images, each once: by name, a number for the first ones, best:2, disputed, ...

    The best has the highest mean MSI of the methods, the most disputed the widest spread.
    """
    found = [row for word in words for row in _rows_for(results, word, methods)]
    if not found:
        raise UserError("a sheet needs at least one image: name one with --images")
    return [*dict.fromkeys(found)]


def _rows_for(results: "RunResults", word: str, methods: Sequence[str]) -> list[int]:
    rows, first = results.rows, results.methods[0]
    alike = []
    for row, name in enumerate(rows.names(first)):
        if name == word:
            return [row]
        alike += [row] if name.endswith(f"/{word}") else []
    if word.isdecimal():
        return list(range(min(int(word), results.n)))
    order, _, count = word.partition(":")
    if order in ORDERS and (count.isdecimal() or not count):
        msi = np.stack([rows.column(method, "msi") for method in methods])
        whole = np.flatnonzero(~np.isnan(msi).any(axis=0))
        by = {"best": -msi.mean(0), "worst": msi.mean(0), "disputed": -np.ptp(msi, axis=0)}
        ranked: list[int] = whole[np.argsort(by[order][whole], kind="stable")].tolist()
        return ranked[: int(count or 1)]
    if len(alike) == 1:
        return alike
    raise unknown(
        "image in this run", word, [*ORDERS, "a number", *islice(rows.names(first), NAMES)]
    )


def _values(results: "RunResults", method: str, column: str, rows: Sequence[int]) -> list[float]:
    """A column of the run for some of the images."""
    if column not in (known := results.rows.columns(method)):
        raise unknown("column in this run", column, known)
    return [float(value) for value in results.rows.some(method, rows, [column])[column]]
