"""Figures for papers from the folder of a finished comparison: every number is the run's own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sufficit import plots
from sufficit.classifier.classifier import Classifier
from sufficit.comparing.finished import Finished, read_drawn, read_finished
from sufficit.metrics.curves import MeanCurve
from sufficit.metrics.method_scores import MethodScores
from sufficit.metrics.registry import Schedule
from sufficit.perturbation.types import Predictions
from sufficit.plots import PAPER, PAPER_CURVES, Look

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sheet(
    run: Path | Finished,
    images: Sequence[str] = ("best", "disputed", "worst"),
    methods: Sequence[str] | None = None,
    *,
    columns: Sequence[str] = ("msi",),
    kept: bool = False,
    rest: bool = False,
    look: Look = PAPER,
    data: Path | None = None,
    classifier: Classifier | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> "Figure":
    """One row per image, one column per method, and the run's numbers under each.

    `kept` adds the image through the mask at alpha_min, `rest` its complement, both with the run's
    fill: what the model saw. `data` is the new place of the images, if they were moved.
    """
    run = _run(run)
    chosen = run.known(methods)
    rows = run.chosen(images, chosen)
    captions = {
        m: plots.score_captions({c: run.values(m, c, rows) for c in columns}) for m in chosen
    }  # first, so that wrong names raise before anything is drawn
    drawn = read_drawn(run, rows, chosen, data=data, classifier=classifier)
    if drawn.again:
        tell("The run kept no heatmaps, so its model drew these again; the numbers are the run's.")
    further = plots.masked_images(
        drawn.images, drawn.heatmaps, drawn.fill, run.alpha_min, kept=kept, rest=rest
    )
    return plots.sheet_figure(
        drawn.images, drawn.heatmaps, drawn.class_names, captions, under=further, look=look
    )


def curves(
    run: Path | Finished,
    methods: Sequence[str] | None = None,
    *,
    names: Sequence[str] = PAPER_CURVES,
    look: Look = PAPER,
) -> "Figure":
    """Mean curves, one line per method."""
    run = _run(run)
    return plots.methods_figure(_scores(run, methods), run.outside, names, look)


def alphas(
    run: Path | Finished, methods: Sequence[str] | None = None, *, look: Look = PAPER
) -> "Figure":
    """Mean MSI over alpha_min: of all images where it was searched, or of a sample."""
    run = _run(run)
    return plots.alpha_figure(
        _scores(run, methods), run.record.get("alpha_curve"), run.outside, look
    )


def sizes(
    run: Path | Finished, methods: Sequence[str] | None = None, *, look: Look = PAPER
) -> "Figure":
    """Base score over mask penalty, one point per method, with 95 % intervals."""
    run = _run(run)
    columns = ("mask_penalty", "base_score")
    found = {m: {c: run.estimate(m, c) for c in columns} for m in run.known(methods)}
    return plots.sizes_figure(found, [m for m in run.outside if m in found], look)


def _run(run: Path | Finished) -> Finished:
    return run if isinstance(run, Finished) else read_finished(run)


def _scores(run: Finished, methods: Sequence[str] | None) -> dict[str, MethodScores]:
    """The mean curves of some methods, and MSI over alpha_min where it was searched for."""
    none, search = torch.zeros(len(run.names)), run.record.get("search")
    empty = torch.zeros(0, 0)
    schedule = Schedule(run.alpha_min, run.settings.score)
    return {
        method: MethodScores(
            columns={},
            targets=none,
            clean=none,
            calls=none,
            alpha_min=run.alpha_min,
            schedule=schedule,
            curves={
                name: MeanCurve(tuple(grid), torch.as_tensor(values))
                for name, (grid, values) in run.curves(method).items()
            },
            shown=Predictions((), empty, empty, (), empty, none, none),
            alphas=dict(zip(search["alphas"], search["mean_msi"][method], strict=True))
            if search
            else None,
        )
        for method in run.known(methods)
    }
