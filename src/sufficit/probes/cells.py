"""Hide cells of a grid over the image, the same ones for every heatmap."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sufficit.data.batch import Batch
from sufficit.metrics.column import Heading
from sufficit.metrics.metric import CellMetric
from sufficit.perturbation.bands import EVERYTHING
from sufficit.perturbation.image_masks import ImageMask, hidden_pixels, sums_over
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.probes.probe import CALLS, ProbeBase, SourceRows

_GROUP = 32  # images whose masks are in memory at once


@dataclass(frozen=True)
class CellProbe(ProbeBase):
    """Columns that compare a heatmap's sum over cells with the fall in probability without them."""

    asked: MaskedModel
    metrics: Mapping[str, CellMetric]
    headings: Mapping[str, Heading] = field(default_factory=dict)
    key: str = "cells"
    end: str = ""  # of its columns' names
    seed: int = 0

    @cached_property
    def masks(self) -> list[ImageMask]:
        """Every mask that a column needs, once."""
        return [*dict.fromkeys(mask for one in self.metrics.values() for mask in one.masks)]

    @property
    def calls_once(self) -> int:  # type: ignore[override]  # computed here
        """Forward passes per image: one per mask."""
        return len(self.masks)

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        """Ask once for all sources, then compare each source's sums with the falls."""
        falls = self._falls(batch)
        place = {mask: number for number, mask in enumerate(self.masks)}
        rows: SourceRows = {}
        for source, drawn in maps.items():
            sums = sums_over(drawn, self.masks, batch.names, self.seed)
            rows[source] = {}
            for name, metric in self.metrics.items():
                some = [place[mask] for mask in metric.masks]
                rows[source][name + self.end] = metric.formula(sums[:, some], falls[:, some])
        # The passes are shared by all sources; they count for the first one.
        first = next(iter(rows))
        passes = torch.full((len(batch),), float(len(self.masks)), device="cpu")
        rows[first][CALLS + self.key] = passes
        return rows

    def _falls(self, batch: Batch) -> Tensor:
        """The fall of the target's probability when each mask is hidden: [N,V]."""
        whole = self.asked.whole(batch).of([EVERYTHING], "confidence")
        width = len(self.masks)
        hidden = []
        for rows in torch.arange(len(batch), device="cpu").split(_GROUP):
            some = rows.tolist()
            names = [batch.names[row] for row in some]
            pixels = hidden_pixels(self.masks, batch.size, names, self.seed)
            images = (rows - rows[0]).repeat_interleave(width)
            found = self.asked.over(some).views(
                batch.images[some],
                ~pixels.flatten(0, 1).to(self.asked.model.device),
                (images, torch.arange(len(some) * width, device="cpu")),
                targets=batch.targets.cpu()[rows].repeat_interleave(width),
            )
            hidden.append(found.confidences.cpu().view(-1, width).double())
        return whole - torch.cat(hidden)
