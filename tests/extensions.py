"""What a user may add to a run without any other change: probes, a source, a column."""

from collections.abc import Mapping
from copy import deepcopy
from typing import ClassVar

import torch
from torch import Tensor

from sufficit import Classifier, explain
from sufficit.data.batch import Batch, Sample
from sufficit.metrics.column import Heading
from sufficit.metrics.metric import Metric, Schedule
from sufficit.perturbation.bands import Band, top
from sufficit.probes.probe import ProbeBase, SourceRows
from sufficit.progress import passed
from sufficit.similarity import rank_correlation
from sufficit.sources import Maps, SourceBase

HALF = 0.5


class Mirrored(ProbeBase):
    """Does the target's probability change when the marked pixels are mirrored?"""

    key = "mirror"
    headings: ClassVar[Mapping[str, Heading]] = {
        "mirror_change": Heading(
            "mirror",
            "Change when mirrored",
            "How far the target's probability moves when the image through the mask is mirrored.",
            limits=(0.0, 1.0),
            higher_is_better=False,
        )
    }
    calls = 2

    def __init__(self, model: Classifier, images: Sample = None, alpha_min: float = HALF) -> None:
        self.model, self.images, self.alpha_min = model, images, alpha_min

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        return {name: {"mirror_change": self.change(batch, one)} for name, one in maps.items()}

    def change(self, batch: Batch, heatmaps: Tensor) -> Tensor:
        """How far the probability moves: [N]."""
        seen = batch.images * (heatmaps >= self.alpha_min)[:, None]
        with torch.no_grad():
            logits = [self.model(images) for images in (seen, seen.flip(3))]
        passed(2 * len(seen))
        one, other = (found.double().softmax(1) for found in logits)
        rows = torch.arange(len(seen))
        return (one[rows, batch.targets] - other[rows, batch.targets]).abs()


class Redrawn(ProbeBase):
    """Does a method draw the mirrored map for the mirrored image? It must draw again."""

    key = "redrawn"
    headings: ClassVar[Mapping[str, Heading]] = {
        "mirror_map": Heading("mirror map", "Rank correlation with the mirrored map")
    }

    def __init__(self, model: Classifier, methods: tuple[str, ...]) -> None:
        self.model, self.methods = model, methods

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        found = {}
        for name in self.methods:
            again = explain(self.model, batch.images.flip(3), batch.targets, name, progress=False)
            found[name] = {"mirror_map": rank_correlation(maps[name], again.flip(2))}
        return found


class OtherHead(ProbeBase):
    """Does a method draw another map for a copy of the model whose last layer is turned around?"""

    key = "other head"
    headings: ClassVar[Mapping[str, Heading]] = {
        "other_head": Heading("other head", "Rank correlation with the map of another head")
    }

    def __init__(self, model: Classifier, layer: str, method: str, images: Sample = None) -> None:
        self.model, self.layer, self.method, self.images = model, layer, method, images

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        copied = self.model.over(deepcopy(self.model.model))
        with torch.no_grad():
            copied.model.get_parameter(f"{self.layer}.weight").neg_()
        again = explain(copied, batch.images, batch.targets, self.method, progress=False)
        return {self.method: {"other_head": rank_correlation(maps[self.method], again)}}


class Edges(SourceBase):
    """Heatmaps of the image alone, with a column of their own."""

    name = "edges"
    headings: ClassVar[Mapping[str, Heading]] = {
        "edge_share": Heading("edges", "Share of edges", "How much of the image is edge.", (0, 1))
    }

    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def maps(self, model: Classifier, batch: Batch) -> Maps:
        grey = batch.images.mean(1)
        steps = (grey - grey.roll(1, 2)).abs() ** self.power
        values = steps / steps.amax((1, 2), keepdim=True)
        return Maps(
            values, final=True, columns={"edge_share": (values > HALF).double().mean((1, 2))}
        )

    def digest(self) -> str:
        return f"edges {self.power}"


def quarter(schedule: Schedule) -> list[Band]:
    """The quarter of the pixels with the highest values."""
    return [top(0.25)]


TOP_QUARTER = Metric(True, quarter, lambda answers, s: answers.of(quarter(s), "confidence")[:, 0])
