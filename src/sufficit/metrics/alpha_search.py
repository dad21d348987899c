"""MSI over alpha_min, on a sample of the images that were scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.metrics.scores import AlphaSearch, ask, make_plan, read
from sufficit.perturbation.types import Progress, ScoreKind

SAMPLE = 16  # images
STEP = 0.05  # of the curves


@dataclass(frozen=True)
class AlphaCurves:
    """Every method's MSI over alpha_min, on some of the images that were scored."""

    rows: tuple[int, ...]  # which of them
    step: float  # of the curves that MSI is made of
    searches: Mapping[str, AlphaSearch]  # by method
    calls: int  # of the model, for all of it

    def as_json(self, names: Sequence[str]) -> dict[str, Any]:
        """The means as JSON holds them, from the names of all images."""
        return {
            "images": [names[row] for row in self.rows],
            "value_step": self.step,
            "alphas": list(next(iter(self.searches.values())).alphas),
            "mean_msi": {method: one.means.tolist() for method, one in self.searches.items()},
            "model_calls": self.calls,
        }


def spread(n: int, most: int = SAMPLE) -> tuple[int, ...]:
    """Up to `most` of n rows, evenly over all of them.

    >>> spread(3), spread(10, 4)
    ((0, 1, 2), (0, 2, 5, 7))
    """
    count = min(n, most)
    return tuple(i * n // count for i in range(count))


def coarse(value_step: float) -> float:
    """The step of a sample's curves: that of the run where it is coarser."""
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
    """MSI of some images at every alpha_min: [n,C,H,W], each [n,H,W], [n]; `rows` says which."""
    plan = make_plan("search", score, step, columns=["msi"])
    maps, n = torch.cat(list(heatmaps.values())), len(images)
    answers, _ = ask(
        classifier, images, maps, targets, plan, fill, batch_size=batch_size, tick=tick
    )
    searches: dict[str, AlphaSearch] = {}
    for k, method in enumerate(heatmaps):
        found = read(answers.rows(slice(k * n, (k + 1) * n)), plan).search
        assert found is not None  # the plan searches
        searches[method] = found
    return AlphaCurves(tuple(rows), step, searches, int(answers.calls.sum()))
