"""Read heatmaps, and where the objects are; no model is asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sufficit.data.batch import Batch
from sufficit.metrics.column import Heading
from sufficit.metrics.metric import MapMetric, Schedule
from sufficit.perturbation.predictions import Measure
from sufficit.probes.probe import ProbeBase, SourceRows

_PIXELS = 2**22  # of heatmaps measured at a time


@dataclass(frozen=True)
class MapProbe(ProbeBase):
    """Columns of the heatmap alone, or of heatmap and truth."""

    metrics: Mapping[str, MapMetric]
    schedule: Schedule
    headings: Mapping[str, Heading] = field(default_factory=dict)
    key: str = "maps"

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        """Measure every source's heatmaps."""
        measures = {name: one.measure(self.schedule) for name, one in self.metrics.items()}
        return {
            source: {n: measured(one, drawn, batch.truth) for n, one in measures.items()}
            for source, drawn in maps.items()
        }


def measured(measure: Measure, heatmaps: Tensor, truth: Tensor | None) -> Tensor:
    """Return what a measure says of heatmaps, some in memory at a time: twice [N,H,W] -> [N]."""
    step = max(1, _PIXELS // heatmaps[0].numel())
    parts: Sequence[Tensor] = heatmaps.split(step)
    truths: Sequence[Tensor | None] = [None] * len(parts) if truth is None else truth.split(step)
    found = []
    for part, own in zip(parts, truths, strict=True):
        here = part.cpu() if part.device.type == "mps" else part  # which has no float64
        there = None if own is None else own.to(here.device)
        found.append(measure(here, there).double().cpu())
    return torch.cat(found)
