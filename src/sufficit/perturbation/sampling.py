"""Which bands each image is asked, where a few stand for all.

Means stay unbiased: a column is a weighted sum of scores over bands; a trapezoid area is
one over the points of its grid. Lay the bands of a curve side by side, each as wide as its weight
is large, cut the line into strata of equal width, and draw one place in each stratum, uniformly.
Each band is then drawn c times on average, and the sum of weight / c x score over the bands drawn
is on average the weighted sum over all bands (Horvitz and Thompson 1952). A band at least as wide
as a stratum is always asked; if all are, the sum is exact.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.perturbation.bands import Band, family

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

    @property
    def counts_with_whole(self) -> Tensor:
        """The same with the whole image before the bands, which every image is asked: [1+B]."""
        return F.pad(self.counts, (1, 0), value=1.0)

    def draw(self, names: Sequence[str], seed: int) -> Tensor:
        """Return the numbers of the bands to ask each image: N -> int32 [N,K].

        They depend on the seed and the image's name only.
        """
        width = self.width - len(self.always)
        places = np.stack([uniforms(seed, name, width) for name in names])  # one per stratum
        drawn = [np.broadcast_to(self.always, (len(names), len(self.always)))]
        start = 0
        for line in self.lines:
            here = places[:, start : start + line.strata]
            start += line.strata
            along = (np.arange(line.strata) + here) * (line.ends[-1] / line.strata)
            hit = np.searchsorted(line.ends, along, side="right")
            # A place at the very end may be rounded past it.
            drawn.append(line.members[np.minimum(hit, len(line.members) - 1)])
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
    assert calls >= least  # the probe refuses fewer
    widths = {curve: np.array([sizes[bands[i]] for i in ids]) for curve, ids in curves.items()}
    strata = dict.fromkeys(curves, 1)
    for _ in range(calls - least):
        gains = {c: _noise(widths[c], m) - _noise(widths[c], m + 1) for c, m in strata.items()}
        strata[max(gains, key=gains.__getitem__)] += 1
    counts = np.zeros(len(bands))
    lines = []
    for curve, ids in curves.items():
        members = np.array(ids)
        # A band as wide as a stratum would be drawn every time: it is always asked instead.
        wide = _wide(widths[curve], strata[curve])
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
    # Without the wide bands the strata are narrower, so that further bands may be wide.
    while not wide.all():
        left = widths[~wide].sum()
        free = strata - wide.sum()
        more = ~wide & (widths * free >= left * (1 - 1e-9))  # equal up to rounding
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
