"""MSI over alpha_min, on a sample of the images that were scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.metrics.plan import ask, make_plan
from sufficit.metrics.scores import AlphaSearch, read
from sufficit.perturbation.predictions import ScoreKind
from sufficit.progress import Progress

SAMPLE = 16  # images
STEP = 0.05  # of the curves


@dataclass(frozen=True)
class AlphaCurves:
    """MSI over alpha_min of every method, on some of the images that were scored."""

    rows: tuple[int, ...]  # which of the images
    step: float  # of the curves behind MSI
    searches: Mapping[str, AlphaSearch]  # by method
    calls: int  # of the model, in all

    def as_json(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the means for a JSON file, given the names of all images."""
        return {
            "images": [names[row] for row in self.rows],
            "value_step": self.step,
            "alphas": list(next(iter(self.searches.values())).alphas),
            "mean_msi": {method: one.means.tolist() for method, one in self.searches.items()},
            "model_calls": self.calls,
        }


def spread(n: int, most: int = SAMPLE) -> tuple[int, ...]:
    """Return up to `most` of n rows, evenly spaced.

    >>> spread(3), spread(10, 4)
    ((0, 1, 2), (0, 2, 5, 7))
    """
    count = min(n, most)
    return tuple(i * n // count for i in range(count))


def coarse(value_step: float) -> float:
    """Return the step of a sample's curves: STEP, or the run's step where it is larger."""
    return max(STEP, value_step)


def alpha_curves(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Mapping[str, Tensor],
    targets: Tensor,
    rows: Sequence[int],
    *,
    step: float = STEP,
    score: ScoreKind = "accuracy",
    fill: str | Tensor = "black",
    batch_size: int | None = None,
    tick: Progress | None = None,
) -> AlphaCurves:
    """Return MSI at every alpha_min of the images in these rows: [n,C,H,W], each [n,H,W], [n]."""
    plan = make_plan("search", score, step, columns=["msi"])
    maps, n = torch.cat(list(heatmaps.values())), len(images)
    found, _ = ask(classifier, images, maps, targets, plan, fill, batch_size=batch_size, tick=tick)
    searches: dict[str, AlphaSearch] = {}
    for k, method in enumerate(heatmaps):
        search = read(found.rows(slice(k * n, (k + 1) * n)), plan).search
        assert search is not None  # the plan searches
        searches[method] = search
    return AlphaCurves(tuple(rows), step, searches, int(found.calls.sum()))
