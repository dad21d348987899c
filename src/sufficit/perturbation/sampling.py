"""Which bands each image is asked, where a few stand for all.

Drawn, and means stay unbiased: a column is a weighted sum of scores over bands; a trapezoid area is
one over the points of its grid. Lay the bands of a curve side by side, each as wide as its weight
is large, cut the line into strata of equal width, and draw one place in each stratum, uniformly.
Each band is then drawn c times on average, and the sum of weight / c x score over the bands drawn
is on average the weighted sum over all bands (Horvitz and Thompson 1952). A band at least as wide
as a stratum is always asked; if all are, the sum is exact.

By halving: a score along a curve is mostly flat. Every STEPth point is asked; where two neighbours
differ, so is the point between them, and so on down to the full grid. A point between ends that
agree is not asked: it gets the class of one end, and the confidence between both.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.perturbation.bands import Band, distinct_masks, family, runs
from sufficit.perturbation.fills import rows_of
from sufficit.perturbation.predict import predict
from sufficit.perturbation.predictions import Predictions, hits
from sufficit.progress import Progress, stage

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Line:
    """The bands of a curve that are not always asked, in order, and the strata of equal width."""

    members: Ints  # [P] numbers of the bands
    ends: Floats  # [P] where each ends on the line
    strata: int


@dataclass(frozen=True)
class Sampling:
    """How bands are drawn: some always, the others one per stratum."""

    always: Ints  # numbers of bands
    lines: tuple[Line, ...]
    counts: Tensor  # [B] how often each band is drawn, on average

    @property
    def width(self) -> int:
        """How many bands are drawn per image, a band drawn twice counted twice."""
        return len(self.always) + sum(line.strata for line in self.lines)

    def draw(self, names: Sequence[str], seed: int) -> Tensor:
        """Return the numbers of the bands to ask each image: N -> int32 [N,K].

        They depend on the seed and the image's name only.
        """
        width = self.width - len(self.always)
        places = np.stack([uniforms(seed, name, width) for name in names])  # one per stratum
        drawn, start = [np.broadcast_to(self.always, (len(names), len(self.always)))], 0
        for line in self.lines:
            here, start = places[:, start : start + line.strata], start + line.strata
            along = (np.arange(line.strata) + here) * (line.ends[-1] / line.strata)
            found = np.searchsorted(line.ends, along, side="right")
            drawn.append(line.members[np.minimum(found, len(line.members) - 1)])
        return torch.from_numpy(np.concatenate(drawn, axis=1).astype(np.int32))


def uniforms(seed: int, name: str, count: int) -> Floats:
    """Return uniform numbers in 0..1 that depend on seed and name only: [count].

    The generator counts: its numbers are those of the key, on every machine.

    >>> uniforms(0, "a.png", 2).round(3).tolist()
    [0.742, 0.629]
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    random = np.random.Philox(key=int.from_bytes(digest, "little"))
    return (random.random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def make_sampling(
    bands: Sequence[Band], sizes: Mapping[Band, float], always: Collection[Band], calls: int
) -> Sampling:
    """Return how to draw at most so many bands per image; bands of size 0 are never asked.

    Strata go one by one to the curve whose estimate gains most from one more.
    """
    fixed = [i for i, band in enumerate(bands) if band in always]
    curves: dict[object, list[int]] = {}  # Hide curves of several alpha_min are one
    for i in sorted(range(len(bands)), key=lambda i: (bands[i].low, bands[i].high)):
        if bands[i] not in always and sizes[bands[i]] > 0:
            curves.setdefault(family(bands[i]), []).append(i)
    least = len(fixed) + len(curves)
    if calls < least:
        raise UserError(
            f"calls must be {least} or more for these columns, got {calls}: ask more masks per"
            " image, or choose fewer columns"
        )
    widths = {curve: np.array([sizes[bands[i]] for i in found]) for curve, found in curves.items()}
    strata = dict.fromkeys(curves, 1)
    for _ in range(calls - least):
        gains = {c: _noise(widths[c], m) - _noise(widths[c], m + 1) for c, m in strata.items()}
        strata[max(gains, key=gains.__getitem__)] += 1
    counts = np.zeros(len(bands))
    lines = []
    for curve, found in curves.items():
        members, wide = np.array(found), _wide(widths[curve], strata[curve])
        fixed.extend(members[wide].tolist())
        if not wide.all():
            ends = widths[curve][~wide].cumsum()
            line = Line(members[~wide], ends, strata[curve] - int(wide.sum()))
            counts[line.members] = widths[curve][~wide] * line.strata / ends[-1]
            lines.append(line)
    counts[fixed] = 1
    return Sampling(np.array(fixed), tuple(lines), torch.from_numpy(counts))


def _wide(widths: Floats, strata: int) -> npt.NDArray[np.bool_]:
    """Return which bands are at least as wide as a stratum of the others: [P] -> [P]."""
    wide = np.zeros(len(widths), dtype=bool)
    while not wide.all():
        left, free = widths[~wide].sum(), strata - wide.sum()
        more = ~wide & (widths * free >= left * (1 - 1e-9))
        if not more.any():
            break
        wide |= more
    return wide


def _noise(widths: Floats, strata: int) -> float:
    """Return what the variance of a curve's estimate is proportional to.

    A score that jumps once is uncertain in one stratum only, by the width of the stratum.
    """
    wide = _wide(widths, strata)
    left = widths[~wide].sum()
    return float(left / (strata - wide.sum())) ** 2 if left else 0.0


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
                own = options | {"fill": rows_of(fill, rows.tolist()), "progress": tick}
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
