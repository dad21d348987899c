"""Show each connected part of a mask alone: how many of them suffice by themselves?"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sufficit.data.batch import Batch
from sufficit.metrics.column import Heading
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.perturbation.predictions import hits
from sufficit.probes.probe import CALLS, ProbeBase, SourceRows

COLUMN = "sufficient_regions"
MOST = 4  # parts that are shown, the largest ones
HEADING = Heading(
    short="regions",
    long="Regions that suffice alone",
    meaning="Connected parts of the region at alpha_min, of the largest four, that suffice alone.",
    limits=(0.0, float(MOST)),
)


@dataclass(frozen=True)
class PartsProbe(ProbeBase):
    """The number of separate regions that suffice alone, of the largest four; corners connect."""

    asked: MaskedModel
    alpha_min: float
    key: str = "regions"
    calls: int = MOST

    @property
    def headings(self) -> Mapping[str, Heading]:  # type: ignore[override]  # computed here
        """The number."""
        return {COLUMN: HEADING}

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        """Ask about every part of every map."""
        edge = torch.tensor(self.alpha_min, dtype=torch.float32)
        rows: SourceRows = {}
        for source, heatmaps in maps.items():
            masks, owners = parts_of((heatmaps >= edge.to(heatmaps)).cpu())
            counts = torch.zeros(len(batch), dtype=torch.float64)
            if len(masks):
                targets = batch.targets.cpu()[owners]
                views = (owners, torch.arange(len(masks)))
                device = self.asked.model.device
                found = self.asked.views(batch.images, masks.to(device), views, targets=targets)
                counts.index_add_(0, owners, hits(found.named.cpu(), targets))
            calls = owners.bincount(minlength=len(batch)).double()
            rows[source] = {COLUMN: counts, CALLS + self.key: calls}
        return rows


def parts_of(marked: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest connected parts of each mask, and whose they are: bool [N,H,W] -> [T].

    >>> masks, owners = parts_of(torch.tensor([[[True, False, True]], [[False, False, False]]]))
    >>> masks.int().tolist(), owners.tolist()
    ([[[1, 0, 0]], [[0, 0, 1]]], [0, 0])
    """
    from scipy.ndimage import label

    masks, owners = [], []
    for row, one in enumerate(marked.numpy()):
        numbered, count = label(one, np.ones((3, 3)))
        sizes = np.bincount(numbered.ravel(), minlength=count + 1)[1:]
        largest = np.argsort(-sizes, kind="stable")[:MOST] + 1
        masks += [torch.from_numpy(numbered == number) for number in largest]
        owners += [row] * len(largest)
    empty = torch.zeros(0, *marked.shape[1:], dtype=torch.bool)
    return torch.stack(masks) if masks else empty, torch.tensor(owners, dtype=torch.long)
