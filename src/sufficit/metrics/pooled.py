"""Columns that are chosen by means over all images: candidates in the rows, a choice at the end.

MSI by rank has a candidate for every share k of the pixels. k is the share with the best mean of
the source, chosen on other images than those it is read at: the images are split in two halves, by
seed and name, and each half is read at the k that is best for the other. Other fills and a twin are
read at the k that the first fill chose.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sufficit.metrics.column import CANDIDATE
from sufficit.perturbation.sampling import uniforms
from sufficit.sums import Floats

RANK_STEM = "msi_rank"
Halves = npt.NDArray[np.int64]


class RankShares:
    """The share at which each half of the images is read, for one source."""

    def __init__(self) -> None:
        self.shares: tuple[str, ...] = ()  # of the candidates, as their names spell them
        self._sums = np.zeros((2, 0))
        self._counts = np.zeros((2, 0))

    def add(self, halves: Halves, columns: Mapping[str, Floats]) -> None:
        """Add images with their candidates: each [n]."""
        start = RANK_STEM + CANDIDATE
        found = [name for name in columns if name.startswith(start)]
        if not found:
            return
        if not self.shares:
            self.shares = tuple(name.removeprefix(start) for name in found)
            self._sums = np.zeros((2, len(found)))
            self._counts = np.zeros((2, len(found)))
        curves = np.stack([columns[name] for name in found], axis=1)
        for half in (0, 1):
            own = curves[halves == half]
            self._sums[half] += np.nansum(own, axis=0)
            self._counts[half] += (~np.isnan(own)).sum(axis=0)

    @property
    def best(self) -> tuple[float, float]:
        """The share that either half is read at; NaN where the other half has no image."""
        places = (self._best(half) for half in (0, 1))
        first, second = (np.nan if p is None else float(self.shares[p]) for p in places)
        return first, second

    def _best(self, half: int) -> int | None:
        """The best share of the other half, the smaller of two."""
        total, count = self._sums[1 - half], self._counts[1 - half]
        if not count.any():
            return None
        means = np.where(count > 0, total / np.maximum(count, 1), -np.inf)
        # Shares that tie in exact arithmetic differ by rounding: the first one is meant.
        return int(means.round(12).argmax())

    def settle(self, halves: Halves, columns: Mapping[str, Floats]) -> dict[str, Floats]:
        """Return the column of every fill and model that has candidates: each [n]."""
        stems = dict.fromkeys(
            name.partition(CANDIDATE)[0]
            for name in columns
            if name.startswith(RANK_STEM) and CANDIDATE in name
        )
        found: dict[str, Floats] = {}
        for stem in stems:
            values = np.full(len(halves), np.nan)
            for half in (0, 1):
                place = self._best(half)
                if place is not None:
                    rows = halves == half
                    values[rows] = columns[f"{stem}{CANDIDATE}{self.shares[place]}"][rows]
            found[stem] = values
        return found


def halves_of(names: Sequence[str], seed: int) -> Halves:
    """Return the half that each image is in, 0 or 1: [N]."""
    drawn = [uniforms(seed, f"half/{name}", 1)[0] < 0.5 for name in names]
    return np.array(drawn, dtype=np.int64)
