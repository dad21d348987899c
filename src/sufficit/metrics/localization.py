"""Columns that compare a heatmap with where the object is: they ask the model nothing.

A truth [N,H,W] is OBJECT on the object, BOX elsewhere in its box, else 0. Where it has no object,
because none is known or the model's view cuts it off, every column is NaN.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sufficit.data.truth import BOX, OBJECT, with_boxes
from sufficit.errors import UserError
from sufficit.metrics.metric import MapMetric, of_map, of_region
from sufficit.perturbation.bands import ranks
from sufficit.similarity import region_overlap


def checked_truth(truth: Tensor | None, heatmaps: Tensor) -> Tensor | None:
    """Return a user's masks as a truth, or raise unless they fit: [N,H,W], [N,H,W] -> [N,H,W]."""
    if truth is None:
        return None
    if not isinstance(truth, Tensor) or truth.shape != heatmaps.shape:
        came = list(truth.shape) if isinstance(truth, Tensor) else type(truth).__name__
        raise UserError(
            f"truth must be [N,H,W] = {list(heatmaps.shape)}, as the heatmaps, got {came}: above 0"
            " on the object"
        )
    return with_boxes(truth > 0)


def _known(values: Tensor, truth: Tensor) -> Tensor:
    """Values with NaN where there is no object: [N], [N,H,W] -> [N]."""
    return values.double().masked_fill(~(truth == OBJECT).flatten(1).any(1), torch.nan)


def pointing(heatmaps: Tensor, truth: Tensor | None) -> Tensor:
    """Share of a map's highest pixels that are on the object: [N,H,W] twice -> [N].

    >>> pointing(torch.tensor([[[0.9, 0.9, 0.1]]]), torch.tensor([[[2, 0, 0]]]))
    tensor([0.5000], dtype=torch.float64)
    """
    assert truth is not None
    flat = heatmaps.flatten(1)
    highest = flat == flat.amax(1, keepdim=True)
    hits = (highest & (truth == OBJECT).flatten(1)).sum(1).double()
    return _known(hits / highest.sum(1), truth)


def _share(heatmaps: Tensor, inside: Tensor) -> Tensor:
    """Share of a map's sum inside a region, 0 of an empty map: [N,H,W] twice -> [N]."""
    maps = heatmaps.double()
    total = maps.sum((1, 2))
    return torch.where(total > 0, (maps * inside).sum((1, 2)) / total, 0.0)


def energy(heatmaps: Tensor, truth: Tensor | None) -> Tensor:
    """Share of a map's sum inside the object's box: [N,H,W] twice -> [N].

    >>> energy(torch.tensor([[[0.2, 0.6, 0.2]]]), torch.tensor([[[2, 1, 0]]]))
    tensor([0.8000], dtype=torch.float64)
    """
    assert truth is not None
    return _known(_share(heatmaps, truth >= BOX), truth)


def mass_accuracy(heatmaps: Tensor, truth: Tensor | None) -> Tensor:
    """Share of a map's sum on the object's own pixels: [N,H,W] twice -> [N].

    >>> mass_accuracy(torch.tensor([[[0.2, 0.6, 0.2]]]), torch.tensor([[[2, 1, 0]]]))
    tensor([0.2000], dtype=torch.float64)
    """
    assert truth is not None
    return _known(_share(heatmaps, truth == OBJECT), truth)


def rank_accuracy(heatmaps: Tensor, truth: Tensor | None) -> Tensor:
    """Share of the object's K pixels among the K highest, ties in pixel order: twice -> [N].

    >>> rank_accuracy(torch.tensor([[[0.9, 0.1, 0.5]]]), torch.tensor([[[2, 2, 0]]]))
    tensor([0.5000], dtype=torch.float64)
    """
    assert truth is not None
    inside = truth == OBJECT
    count = inside.sum((1, 2))
    first = (
        ranks(heatmaps if heatmaps.dtype == torch.float64 else heatmaps.float())
        < count[:, None, None]
    )
    return _known((first & inside).sum((1, 2)).double() / count.clamp(min=1), truth)


@dataclass(frozen=True)
class Overlap:
    """Intersection over union of the region above alpha_min and the object: a measure."""

    alpha_min: float

    def __call__(self, heatmaps: Tensor, truth: Tensor | None) -> Tensor:
        """Return the overlap: [N,H,W] twice -> [N]."""
        assert truth is not None
        inside = (truth == OBJECT).to(heatmaps)
        found = region_overlap(heatmaps, inside, self.alpha_min, empty=0.0)
        return _known(found, truth.cpu())


LOCALIZATION: Mapping[str, MapMetric] = {
    "iou": of_region(higher_is_better=True, make=Overlap, needs_truth=True),
    "pointing": of_map(higher_is_better=True, measure=pointing, needs_truth=True),
    "energy": of_map(higher_is_better=True, measure=energy, needs_truth=True),
    "mass_accuracy": of_map(higher_is_better=True, measure=mass_accuracy, needs_truth=True),
    "rank_accuracy": of_map(higher_is_better=True, measure=rank_accuracy, needs_truth=True),
}
