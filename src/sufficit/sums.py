"""Sums of columns over images, which do not grow with their number and can be added."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
GROUPS = 10_000  # of images, whose sums are in memory
_NONE = np.empty(0, np.int64)


class Sums:
    """Sums and counts of columns with one value per image, NaN where there is none.

    Up to GROUPS images, each is a group of its own. With more, the group of an image is a hash of
    the seed and its number, and only the sums of the groups are kept. Intervals resample groups and
    tests flip the signs of whole groups. That is valid where it is for single images: whatever the
    order of the images, the hash fills groups at random, so the sums of independent images are
    independent and exchangeable, and a sum of values that are as likely negative as positive is so
    itself. 10,000 groups estimate a standard error to 0.7 %.
    """

    def __init__(self, columns: Sequence[Any], *, seed: int = 0) -> None:
        self.columns, self.seed, self.n = tuple(columns), seed, 0
        self._single: list[tuple[Counts, Floats]] = []  # numbers and values of groups of one
        self._sums: Floats | None = None  # [GROUPS,columns], of more images than groups
        self._counts: Counts | None = None

    def add(self, numbers: npt.ArrayLike, values: Mapping[Any, npt.ArrayLike]) -> None:
        """Add images, each with its number in the data: [n], every column [n]."""
        rows = [np.asarray(values[column], np.float64) for column in self.columns]
        self._add(np.asarray(numbers, np.int64), np.stack(rows, axis=1))

    def __add__(self, other: "Sums") -> "Sums":
        """Return the sums over the images of both, which must not have images in common."""
        if (self.columns, self.seed) != (other.columns, other.seed):
            raise ValueError("sums to add must have the same columns and seed")
        found = Sums(self.columns, seed=self.seed)
        for part in (self, other):
            for numbers, rows in part._single:
                found._add(numbers, rows)
            if part._sums is not None and part._counts is not None:
                sums, counts = found._many()
                sums += part._sums
                counts += part._counts
                found.n += part.n
        return found

    def groups(self, columns: Sequence[Any] | None = None) -> tuple[Floats, Counts]:
        """Return the sums and counts of each group, of single images in order: [groups,columns]."""
        sums, counts = self._sums, self._counts
        if sums is None or counts is None:
            numbers = np.concatenate([_NONE, *(numbers for numbers, _ in self._single)])
            blank = np.empty((0, len(self.columns)))
            rows = np.concatenate([blank, *(rows for _, rows in self._single)])
            rows = rows[np.argsort(numbers, kind="stable")]
            counts = (~np.isnan(rows)).astype(np.int64)
            sums = np.where(counts, rows, 0.0)
        if columns is None:
            return sums, counts
        places = [self.columns.index(column) for column in columns]
        return sums.take(places, axis=1), counts.take(places, axis=1)

    def means(self, columns: Sequence[Any] | None = None) -> Floats:
        """Return the mean of each column, NaN ignored: [columns]."""
        sums, counts = self.groups(columns)
        with np.errstate(invalid="ignore"):
            means: Floats = sums.sum(axis=0) / counts.sum(axis=0)
        return means

    def _add(self, numbers: Counts, rows: Floats) -> None:
        for start in range(0, len(rows), GROUPS):  # what is made of them does not grow either
            some = slice(start, start + GROUPS)
            self.n += len(rows[some])
            self._single.append((numbers[some], rows[some]))
            if self.n > GROUPS:
                self._many()

    def _many(self) -> tuple[Floats, Counts]:
        """Put all images into groups that they share."""
        shape = GROUPS, len(self.columns)
        key = _mixed(np.array([self.seed % 2**64], np.uint64))
        if self._sums is None or self._counts is None:
            self._sums, self._counts = np.zeros(shape), np.zeros(shape, np.int64)
        for numbers, rows in self._single:
            groups = (_mixed(numbers.astype(np.uint64) ^ key) % GROUPS).astype(np.int64)
            places = (groups[:, None] * shape[1] + np.arange(shape[1])).ravel()
            known = ~np.isnan(rows)
            np.add.at(self._sums.reshape(-1), places, np.where(known, rows, 0.0).ravel())
            np.add.at(self._counts.reshape(-1), places, known.ravel().astype(np.int64))
        self._single.clear()
        return self._sums, self._counts


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each number (splitmix64): [n] -> [n]."""
    found = numbers + np.uint64(0x9E3779B97F4A7C15)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))


def sums_of(columns: Mapping[Any, Floats], *, seed: int = 0) -> Sums:
    """Return the sums of columns in memory: each [N]."""
    found = Sums([*columns], seed=seed)
    found.add(np.arange(len(next(iter(columns.values())))), columns)
    return found


def both(own: Floats, chance: Floats) -> dict[str, Floats]:
    """Return two columns, each without the images that lack a value of the other: [N], [N]."""
    lacking = np.isnan(own) | np.isnan(chance)
    return {name: np.where(lacking, np.nan, v) for name, v in (("own", own), ("chance", chance))}


def with_pairs(columns: Mapping[str, Floats]) -> dict[Any, Floats]:
    """Return the columns of methods, and the difference of every pair, which a standing needs."""
    found: dict[Any, Floats] = {**columns}
    return found | {
        (one, two): columns[one] - columns[two] for one, two in combinations(columns, 2)
    }
