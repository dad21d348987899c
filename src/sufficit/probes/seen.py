"""Look at each image through its heatmap: the model's answer for it, and the map of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sufficit.data.batch import Batch
from sufficit.errors import SkipError
from sufficit.metrics.column import Heading
from sufficit.metrics.metric import RedrawnMetric, SeenMetric
from sufficit.perturbation.bands import EVERYTHING
from sufficit.perturbation.fills import ROAD, fill_for, impute
from sufficit.perturbation.masked_model import Fill, MaskedModel
from sufficit.probes.probe import CALLS, ProbeBase, SourceRows
from sufficit.sources import Method, draw


@dataclass(frozen=True)
class SeenProbe(ProbeBase):
    """Columns of the model's answer for the image through the map: one forward pass."""

    asked: MaskedModel
    metrics: Mapping[str, SeenMetric]
    headings: Mapping[str, Heading] = field(default_factory=dict)
    key: str = "seen"
    end: str = ""  # of its columns' names
    calls: int = 1

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        """Ask for every source's maps."""
        whole = self.asked.whole(batch).of([EVERYTHING], "confidence")[:, 0]
        numbers = torch.arange(len(batch), device="cpu")
        found: SourceRows = {}
        for source, drawn in maps.items():
            answers = self.asked.views(
                batch.images,
                drawn.float().clamp(0, 1),
                (numbers, numbers),
                targets=batch.targets.cpu(),
            )
            seen = answers.confidences.cpu().double()
            found[source] = {
                name + self.end: metric.formula(whole, seen)
                for name, metric in self.metrics.items()
            }
            found[source][CALLS + self.key] = torch.ones(len(batch), dtype=torch.float64)
        return found


@dataclass(frozen=True)
class RedrawnProbe(ProbeBase):
    """Columns that compare a map with the one that its method draws for the image through it.

    Only methods draw from the image: a control, a file and a fitted region have no value.
    """

    asked: MaskedModel
    sources: Sequence[Method]
    metrics: Mapping[str, RedrawnMetric]
    headings: Mapping[str, Heading] = field(default_factory=dict)
    key: str = "redrawn"

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        """Draw each method's map again, and compare."""
        found: SourceRows = {}
        for source in maps:
            nothing = torch.full((len(batch),), torch.nan, dtype=torch.float64)
            found[source] = dict.fromkeys(self.metrics, nothing)
        for method in self.sources:
            own = maps[method.name]
            other = replace(batch, images=through(batch.images, own, self.asked.fill), known={})
            again = self._drawn(other, method)
            if again is not None:
                found[method.name] = {
                    name: metric.measure(own, again.to(own.device)).cpu()
                    for name, metric in self.metrics.items()
                }
        return found

    def _drawn(self, batch: Batch, method: Method) -> Tensor | None:
        """The maps of a method, with NaN for images that it has none for; None if for no image."""
        try:
            return draw(self.asked.model, batch, [method])[method.name].at(batch.size)
        except SkipError as error:
            left = [row for row in range(len(batch)) if row not in error.reasons]
        if not left:
            return None
        some = self._drawn(batch.rows(left), method)
        if some is None:
            return None
        whole = some.new_full((len(batch), *batch.size), torch.nan)
        whole[left] = some
        return whole


def through(images: Tensor, heatmaps: Tensor, fill: Fill) -> Tensor:
    """Return images with each pixel weighted by its value, the rest the fill: -> [N,C,H,W].

    >>> through(torch.ones(1, 1, 1, 2), torch.tensor([[[0.5, 1.0]]]), "black")
    tensor([[[[0.5000, 1.0000]]]])
    """
    hidden = fill_for(images, fill)
    weights = heatmaps.to(images).clamp(0, 1)
    if isinstance(fill, str) and fill == ROAD:
        return impute(images, weights, hidden)
    return torch.lerp(hidden.expand_as(images), images, weights[:, None])
