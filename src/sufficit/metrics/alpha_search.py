"""MSI over alpha_min, on a sample of the images that were scored."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.metrics.plan import ask, make_plan
from sufficit.metrics.scores import AlphaSearch, read
from sufficit.perturbation.predictions import ScoreKind


class AlphaCurves(NamedTuple):
    """MSI over alpha_min of every method."""

    searches: Mapping[str, AlphaSearch]  # by method
    calls: int  # of the model, in all


def spread(n: int, most: int = 16) -> tuple[int, ...]:
    """Return up to `most` of n rows, evenly spaced.

    >>> spread(3), spread(10, 4)
    ((0, 1, 2), (0, 2, 5, 7))
    """
    count = min(n, most)
    return tuple(i * n // count for i in range(count))


def coarse(value_step: float) -> float:
    """Return the step of a sample's curves: 0.05, or the run's step where it is larger."""
    return max(0.05, value_step)


def alpha_curves(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Mapping[str, Tensor],
    targets: Tensor,
    *,
    step: float,
    score: ScoreKind = "accuracy",
    **options: Any,
) -> AlphaCurves:
    """Return MSI of each method at every alpha_min: [n,C,H,W], each [n,H,W], [n].

    `options` are those of `ask`: fill, batch_size, tick.
    """
    plan = make_plan("search", score, step, columns=["msi"])
    maps, n = torch.cat(list(heatmaps.values())), len(images)
    found, _ = ask(classifier, images, maps, targets, plan, **options)
    searches: dict[str, AlphaSearch] = {}
    for k, method in enumerate(heatmaps):
        search = read(found.rows(slice(k * n, (k + 1) * n)), plan).search
        assert search is not None  # the plan searches
        searches[method] = search
    return AlphaCurves(searches, int(found.calls.sum()))
