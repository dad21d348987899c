"""Curves asked at a coarse grid, and halved where the ends of an interval differ.

A score along a curve is mostly flat. Every STEPth point is asked; where two neighbours differ, so
is the point between them, and so on down to the full grid. A point between ends that agree is not
asked: it gets the class of one end, and the confidence between both.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.perturbation.bands import Band, distinct_masks, family, runs
from sufficit.perturbation.fills import rows_of
from sufficit.perturbation.predict import predict
from sufficit.perturbation.predictions import Predictions, hits
from sufficit.progress import Progress, stage

STEP = 5  # points of the grid from one that is asked first to the next
CLOSE = 0.1  # confidences that differ by no more agree


def halvings(bands: Sequence[Band], step: int = STEP) -> tuple[list[int], list[Tensor]]:
    """Return the bands asked first, and per level the ends and middle of each interval: [I,3].

    >>> from sufficit.perturbation.bands import show
    >>> first, levels = halvings([show(i / 4) for i in range(5)], step=4)
    >>> first, [level.tolist() for level in levels]
    ([0, 4], [[[0, 2, 4]], [[0, 1, 2], [2, 3, 4]]])
    """
    curves: dict[object, list[int]] = {}
    for i in sorted(range(len(bands)), key=lambda i: (bands[i].low, bands[i].high)):
        kind = family(bands[i])
        curves.setdefault(kind if any(kind[1:]) else (kind, bands[i].low), []).append(i)
    first, intervals = [], []
    for curve in curves.values():
        edges = [*range(0, len(curve) - 1, step), len(curve) - 1]
        first += [curve[i] for i in edges]
        intervals += [curve[low : high + 1] for low, high in pairwise(edges)]
    levels = []
    while intervals := [some for some in intervals if len(some) > 2]:
        ends = [(some[0], some[len(some) // 2], some[-1]) for some in intervals]
        levels.append(torch.tensor(ends, device="cpu"))
        cuts = [(some, len(some) // 2) for some in intervals]
        intervals = [half for some, cut in cuts for half in (some[: cut + 1], some[cut:])]
    return first, levels


def predict_by_halving(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Tensor,
    targets: Tensor | None,
    bands: Sequence[Band],
    *,
    always: Collection[Band] = (),
    fill: str | Tensor = "black",
    progress: Progress | None = None,
    **options: Any,
) -> Predictions:
    """Return what `predict` returns, with the bands between ends that agree filled in.

    Bands in `always` are asked for every image. `options` are those of `predict`. Several methods
    are asked one after the other.
    """
    coarse, levels = halvings(bands)
    first = sorted({*coarse, *(i for i, band in enumerate(bands) if band in always)})
    parts, methods = [], heatmaps.split(len(images))
    for k, maps in enumerate(methods):
        ticks = [
            stage(stage(progress, k, len(methods)), i, 1 + len(levels))
            for i in range(1 + len(levels))
        ]
        drawn = torch.tensor(first, dtype=torch.int32, device="cpu").expand(len(images), -1)
        given = (classifier, images, maps, targets, bands)
        found = predict(*given, fill=fill, progress=ticks[0], drawn=drawn, **options)
        curves = _Curves(found, maps)
        for level, tick in zip(levels, ticks[1:], strict=True):
            rows, drawn = curves.halve(level)
            if len(rows):
                here, there = rows.to(images.device), rows.to(maps.device)
                some = (classifier, images[here], maps[there], found.targets[rows], bands)
                own = options | {"fill": rows_of(fill, rows), "progress": tick}
                curves.learn(predict(*some, drawn=drawn, **own), rows)
        parts.append(curves.predictions())
    return Predictions.join(parts)


class _Curves:
    """The predictions for one method's heatmaps, as far as they are known."""

    def __init__(self, found: Predictions, heatmaps: Tensor) -> None:
        spans = runs(heatmaps.to(torch.float32), found.bands)
        self.place = distinct_masks(spans, heatmaps[0].numel())[3].cpu()  # [N,B] of equal masks
        self.found, self.calls = found, torch.zeros_like(found.calls)
        self.named = found.named.new_zeros(self.place.shape)
        self.confidences = found.confidences.new_zeros(self.place.shape)
        self.known = torch.zeros(self.place.shape, dtype=torch.bool, device="cpu")
        self.learn(found, torch.arange(len(found.targets), device="cpu"))

    def learn(self, more: Predictions, rows: Tensor) -> None:
        """Keep the predictions for some of the images; equal masks have the same one."""
        assert more.drawn is not None
        masks = self.place[rows].gather(1, more.drawn.long())
        asked = torch.zeros(int(self.place.max()) + 1, dtype=torch.bool, device="cpu")
        named = more.named.new_zeros(len(asked)).index_put((masks,), more.named)
        confidences = more.confidences.new_zeros(len(asked)).index_put((masks,), more.confidences)
        new = asked.index_fill(0, masks.flatten(), True)[self.place]
        self.named = named[self.place].where(new, self.named)
        self.confidences = confidences[self.place].where(new, self.confidences)
        self.known |= new
        self.calls[rows] += more.calls

    def halve(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """Fill in the middles whose ends agree; return images and bands to ask: [n], [n,K]."""
        low, middle, high = level.T
        hit = hits(self.named, self.found.targets[:, None]).nan_to_num(2)
        apart = (self.confidences[:, low] - self.confidences[:, high]).abs() > CLOSE
        unknown = ~self.known[:, middle]
        asked = unknown & (apart | (hit[:, low] != hit[:, high]))
        between = (self.confidences[:, low] + self.confidences[:, high]) / 2
        filled = unknown & ~asked
        self.named[:, middle] = self.named[:, low].where(filled, self.named[:, middle])
        self.confidences[:, middle] = between.where(filled, self.confidences[:, middle])
        rows = asked.any(1).nonzero()[:, 0]
        if not len(rows):
            return rows, asked
        asked = asked[rows]
        most = int(asked.sum(1).max())
        order = asked.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
        order = order.where(asked.gather(1, order), order[:, :1])  # the first again costs nothing
        return rows, middle[order].int()

    def predictions(self) -> Predictions:
        """Return the predictions for all bands."""
        known = replace(self.found, named=self.named, confidences=self.confidences)
        return replace(known, calls=self.calls, drawn=None)
