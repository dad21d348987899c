"""MSI over alpha_min, on a sample of a run's images and by coarser curves than its scores."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.metrics.plan import ask, make_plan
from sufficit.metrics.scores import AlphaSearch, read
from sufficit.perturbation.predictions import ScoreKind


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
) -> tuple[dict[str, AlphaSearch], int]:
    """Return MSI of each method at every alpha_min, and the model calls they took.

    [n,C,H,W], each [n,H,W], [n]. `options` are those of `ask`: fill, batch_size, tick.
    """
    plan = make_plan("search", score, step, columns=["msi"])
    maps, n = torch.cat(list(heatmaps.values())), len(images)
    found = ask(classifier, images, maps, targets, plan, **options)
    searches: dict[str, AlphaSearch] = {}
    for k, method in enumerate(heatmaps):
        search = read({"": found.rows(slice(k * n, (k + 1) * n))}, plan).search
        assert search is not None  # the plan searches
        searches[method] = search
    return searches, int(found.calls.sum())
