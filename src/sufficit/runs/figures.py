"""Figures of a finished run, for `sufficit figure` and for notebooks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sufficit import plots
from sufficit.errors import unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sufficit.runs.results import RunResults

KINDS = ("sheet", "curves", "alpha", "sizes")


def draw(
    results: "RunResults",
    show: str = "sheet",
    methods: Sequence[str] | None = None,
    *,
    images: Sequence[str] = ("best", "disputed", "worst"),
    columns: Sequence[str] = ("msi",),
    kept: bool = False,
    rest: bool = False,
    curves: Sequence[str] = plots.PAPER_CURVES,
    look: plots.Look = plots.PAPER,
    data: str | Path | None = None,
) -> "Figure":
    """Draw a sheet of images, mean curves, MSI over alpha_min, or sizes; numbers are the run's."""
    if show not in KINDS:
        raise unknown("figure", show, KINDS)
    chosen = results.known(methods)
    scores = {method: results.scores[method] for method in chosen}
    quiet = [method for method in results.unranked if method in chosen]
    if show == "curves":
        return plots.methods_figure(scores, quiet, curves, look)
    if show == "alpha":
        return plots.alpha_figure(scores, results.record.get("alpha_curve"), quiet, look)
    if show == "sizes":
        return plots.sizes_figure({m: results.summaries[m] for m in chosen}, quiet, look)
    rows = results.chosen(images, chosen)
    captions = {
        m: plots.score_captions({c: results.values(m, c, rows) for c in columns}) for m in chosen
    }  # first, so that wrong names raise before anything is drawn
    pixels, maps = results.images(rows, data), results.heatmaps(rows, chosen)
    fill, alpha_min = results.fill, results.alpha_min
    under = plots.masked_images(pixels, maps, fill, alpha_min, kept=kept, rest=rest)
    titles = results.class_names(rows)
    return plots.sheet_figure(pixels, maps, titles, captions, under=under, look=look)
