"""Artefacts of heatmaps: the number of fragments that a mask falls into."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sufficit.metrics.metric import MapMetric, of_region


def fragments(heatmaps: Tensor, alpha_min: float = 0.5) -> Tensor:
    """Count the connected parts of M >= alpha_min; corners connect too: [N,H,W] -> [N].

    >>> fragments(torch.tensor([[[0.9, 0.1, 0.9]], [[0.1, 0.1, 0.1]]]))
    tensor([2., 0.], dtype=torch.float64)
    """
    from scipy.ndimage import label

    marked = (heatmaps >= alpha_min).cpu().numpy()
    corners = np.ones((3, 3))
    return torch.tensor([label(one, corners)[1] for one in marked], dtype=torch.float64)


@dataclass(frozen=True)
class Fragments:
    """`fragments` at an alpha_min, as a measure."""

    alpha_min: float

    def __call__(self, heatmaps: Tensor, truth: Tensor | None = None) -> Tensor:
        """Return the number of fragments: [N,H,W] -> [N]."""
        return fragments(heatmaps, self.alpha_min)


ARTEFACTS: Mapping[str, MapMetric] = {
    "fragments": of_region(higher_is_better=False, make=Fragments)
}
