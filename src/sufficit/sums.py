"""Sums of columns over images, and the intervals of means and ratios that are made of them.

Sums do not grow with the number of images. The interval of a mean is Student's t, widened on the
side of the longer tail by Hall's correction for skewness; that of a ratio is Fieller's.
benchmarks/README.md has what was measured of them, of the bootstrap's, and of the tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        self.columns = tuple(columns)
        self.seed = seed
        self.n = 0
        self._single: list[tuple[Counts, Floats]] = []  # numbers and values of groups of one
        self._sums: Floats | None = None  # [GROUPS,columns], of more images than groups
        self._counts: Counts | None = None

    def add(self, numbers: npt.ArrayLike, values: Mapping[Any, npt.ArrayLike]) -> None:
        """Add images, each with its number in the data: [n], every column [n]."""
        columns = [np.asarray(values[column], np.float64) for column in self.columns]
        places = np.asarray(numbers, np.int64)
        rows = np.stack(columns, axis=1)
        for start in range(0, len(rows), GROUPS):  # what is made of them does not grow either
            part = slice(start, start + GROUPS)
            self.n += len(rows[part])
            self._single.append((places[part], rows[part]))
            if self.n > GROUPS:
                self._many()

    def groups(self, columns: Sequence[Any] | None = None) -> tuple[Floats, Counts]:
        """Return the sums and counts of each group, of single images in order: [groups,columns]."""
        sums = self._sums
        counts = self._counts
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

    def _many(self) -> None:
        """Put all images into groups that they share."""
        shape = GROUPS, len(self.columns)
        key = _mixed(np.array([self.seed % 2**64], np.uint64))
        if self._sums is None or self._counts is None:
            self._sums = np.zeros(shape)
            self._counts = np.zeros(shape, np.int64)
        for numbers, rows in self._single:
            # The number of the image, not its place in the call, decides: any order gives the same.
            groups = (_mixed(numbers.astype(np.uint64) ^ key) % GROUPS).astype(np.int64)
            places = (groups[:, None] * shape[1] + np.arange(shape[1])).ravel()
            there = ~np.isnan(rows)
            # Not `+=` at an index: of images that share a group it would add one alone.
            np.add.at(self._sums.reshape(-1), places, np.where(there, rows, 0.0).ravel())
            np.add.at(self._counts.reshape(-1), places, there.ravel().astype(np.int64))
        self._single.clear()


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each number (splitmix64): [n] -> [n]."""
    state = numbers + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def sums_of(columns: Mapping[Any, Floats], *, seed: int = 0) -> Sums:
    """Return the sums of columns in memory: each [N]."""
    sums = Sums([*columns], seed=seed)
    sums.add(np.arange(len(next(iter(columns.values())))), columns)
    return sums


def both(own: Floats, chance: Floats) -> dict[str, Floats]:
    """Return two columns, each without the images that lack a value of the other: [N], [N]."""
    lacking = np.isnan(own) | np.isnan(chance)
    return {name: np.where(lacking, np.nan, v) for name, v in (("own", own), ("chance", chance))}


def with_pairs(columns: Mapping[str, Floats]) -> dict[Any, Floats]:
    """Return the columns of methods, and the difference of every pair, which a standing needs."""
    differences: dict[Any, Floats] = {
        (one, two): columns[one] - columns[two] for one, two in combinations(columns, 2)
    }
    return {**columns} | differences


LEVEL = 0.05  # of significance, and outside an interval
FEW = 50  # images below which a caution is due


def few_images(n: int) -> str | None:
    """Return what to know before trusting intervals and tests of n images; None for many.

    >>> few_images(49).split("what happens ")[1]
    'on one image in 17, or on fewer, may not be among them.'
    >>> few_images(1).split("what happens ")[1]
    'on one image in 2, or on fewer, may not be among them.'
    """
    if n >= FEW:
        return None
    # Rarer events are missing from more than 5 % of such samples: (1 - 1 / rarest)^n = 5 %.
    rarest = max(2, 1 / (1 - LEVEL ** (1 / n)))
    return (
        f"Only {n} image{'s' if n > 1 else ''}: with fewer than {FEW}, 95 % intervals of skewed"
        " scores hold the true mean in about 90 % of the cases, the paired tests have little"
        " power (a real difference may not be significant), and what happens on one image in"
        f" {rarest:.0f}, or on fewer, may not be among them."
    )


@dataclass(frozen=True)
class Moments:
    """Mean, standard error, skewness and number of groups of each column: [columns]."""

    means: Floats
    errors: Floats  # standard errors; NaN with fewer than two groups
    skews: Floats
    groups: Counts

    def interval(self, level: float) -> tuple[Floats, Floats]:
        """Return the ends of t intervals, the one on the side of the longer tail moved outwards."""
        with np.errstate(invalid="ignore"):
            t = _quantile(self.groups, level)
            k = self.skews / np.sqrt(self.groups)
            down = np.fmax(t, _skewed(t, k))
            up = np.fmax(t, -_skewed(-t, k))
            return self.means - down * self.errors, self.means + up * self.errors

    def p_values(self) -> Floats:
        """Return the level at which the interval of each mean ends at 0."""
        from scipy.special import stdtr

        with np.errstate(divide="ignore", invalid="ignore"):
            t = self.means / self.errors
            k = self.skews / np.sqrt(self.groups)
            straight = t + k * t**2 / 3 + k**2 * t**3 / 27 + k / 6  # Hall's, which _skewed inverts
            far = np.minimum(np.abs(t), np.sign(t) * straight)
            p = 2 * stdtr(np.maximum(self.groups - 1, 1), -np.maximum(far, 0))
        equal = np.where(self.means == 0, 1.0, 0.0)
        return np.where(self.errors == 0, equal, p)


def moments(sums: Floats, counts: Counts) -> Moments:
    """Return the moments of each column's mean: [groups,columns]."""
    groups = (counts > 0).sum(axis=0)
    total = counts.sum(axis=0)
    if not len(sums):
        none = np.full(sums.shape[1], np.nan)
        return Moments(none, none, none, groups)
    with np.errstate(divide="ignore", invalid="ignore"):
        # Equal values stay exactly equal: what is summed are the distances to the first one.
        first = np.nan_to_num((sums / counts)[(counts > 0).argmax(axis=0), range(sums.shape[1])])
        rest = sums - counts * first
        apart = rest.sum(axis=0) / total
        rest -= counts * apart
        square = (rest**2).sum(axis=0)
        cube = (rest**3).sum(axis=0)
        errors = np.sqrt(square * groups / (groups - 1)) / total
        skews = np.nan_to_num(cube / groups / (square / groups) ** 1.5)
    return Moments(first + apart, errors, skews, groups)


def ratio_interval(values: Floats, counts: Counts, level: float) -> tuple[float, float]:
    """Return the interval of the ratio of two means: [groups,2] -> low, high (Fieller 1954).

    It holds every r for which 0 is in the t interval of the mean of first - r second. It has no end
    where the second mean may be 0. Values are 0 or more; where all are 0, it is NaN.
    """
    groups = int((counts[:, 0] > 0).sum())
    n = int(counts[:, 0].sum())
    if groups < 2 or not values.any():
        return np.nan, np.nan
    first, second = values.sum(axis=0) / n
    rest = values - counts * [first, second]
    spread = rest.T @ rest * groups / (groups - 1) / n**2 * _quantile(groups, level) ** 2
    # The ends are the roots of a quadratic in r; `reach` is the numerator of the upper one.
    start = first**2 - spread[0, 0]
    end = second**2 - spread[1, 1]
    half = first * second - spread[0, 1]
    reach = half + np.sqrt(max(half**2 - end * start, 0.0))
    with np.errstate(divide="ignore"):
        low = start / reach if start > 0 else 0.0
    return float(low), float(reach / end) if end > 0 else np.inf


def _quantile(groups: Counts | int, level: float) -> Floats:
    """Return how many standard errors an interval of Student's t reaches; NaN for one group."""
    from scipy.special import stdtrit

    quantile: Floats = stdtrit(np.asarray(groups, np.float64) - 1, 1 - level / 2)
    return quantile


def _skewed(t: Floats, k: Floats) -> Floats:
    """Return the t statistic that Hall's transformation (1992) takes to t; k is skew / sqrt(n)."""
    small = np.abs(k) < 1e-5
    safe = np.where(small, 1.0, k)
    inverse: Floats = 3 / safe * (np.cbrt(1 + safe * (t - safe / 6)) - 1)
    # The first terms of its series, where the difference above would lose all digits.
    return np.where(small, t - k / 6 - k * t**2 / 3, inverse)
