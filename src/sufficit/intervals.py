"""Intervals of means and of ratios of means, made for few images and skewed values.

The interval of a mean is Student's t, widened on the side of the longer tail by Hall's correction
for skewness; that of a ratio is Fieller's. docs/statistics.md has what was measured of them, of the
bootstrap's, and of the tests.
"""

from dataclasses import dataclass

import numpy as np

from sufficit.sums import Counts, Floats, Sums, sums_of

LEVEL = 0.05  # of significance, and outside an interval
FEW = 50  # images below which a caution is due


def few_images(n: int) -> str | None:
    """Return what to know before trusting intervals and tests of n images; None for many.

    >>> few_images(49).split("what happens ")[1]
    'on one image in 17, or on fewer, may not be among them.'
    """
    if n >= FEW:
        return None
    unseen = 1 - LEVEL ** (1 / n)  # rarer events are missing from more than 5 % of such samples
    return (
        f"Only {n} image{'s' if n > 1 else ''}: with fewer than {FEW}, 95 % intervals of skewed"
        " scores hold the true mean in about 90 % of the cases, real differences may not be"
        f" significant, and what happens on one image in {1 / unseen:.0f}, or on fewer, may not be"
        " among them."
    )


def intervals(values: Floats, level: float = LEVEL) -> tuple[Floats, Floats]:
    """Return the interval of each column's mean: [N,columns] -> low, high.

    NaN values do not count. A column with fewer than two values has the interval NaN.

    >>> low, high = intervals(np.array([[1.0, 0], [2, 0], [3, 0], [4, 4]]))
    >>> low.round(2).tolist(), high.round(2).tolist()   # symmetric; a long tail above
    ([0.45, -2.18], [4.55, 11.2])
    """
    columns = sums_of(dict(enumerate(values.T))) if values.shape[1] else Sums([])
    return moments(*columns.groups()).interval(level)


@dataclass(frozen=True)
class Moments:
    """What intervals and tests of means need to know: each [columns]."""

    means: Floats
    errors: Floats  # standard errors; NaN with fewer than two groups
    skews: Floats
    groups: Counts

    def interval(self, level: float) -> tuple[Floats, Floats]:
        """Return the ends of t intervals, the one on the side of the longer tail moved outwards."""
        with np.errstate(invalid="ignore"):
            t, k = _quantile(self.groups, level), self.skews / np.sqrt(self.groups)
            down, up = np.fmax(t, _skewed(t, k)), np.fmax(t, -_skewed(-t, k))
            return self.means - down * self.errors, self.means + up * self.errors

    def p_values(self) -> Floats:
        """Return the level at which the interval of each mean ends at 0."""
        from scipy.special import stdtr

        with np.errstate(divide="ignore", invalid="ignore"):
            t, k = self.means / self.errors, self.skews / np.sqrt(self.groups)
            straight = t + k * t**2 / 3 + k**2 * t**3 / 27 + k / 6  # Hall's, which _skewed inverts
            far = np.minimum(np.abs(t), np.sign(t) * straight)
            p = 2 * stdtr(np.maximum(self.groups - 1, 1), -np.maximum(far, 0))
        equal = np.where(self.means == 0, 1.0, 0.0)
        return np.where(self.errors == 0, equal, p)


def moments(sums: Floats, counts: Counts) -> Moments:
    """Return the moments of each column's mean: [groups,columns]."""
    groups, total = (counts > 0).sum(axis=0), counts.sum(axis=0)
    if not len(sums):
        none = np.full(sums.shape[1], np.nan)
        return Moments(none, none, none, groups)
    with np.errstate(divide="ignore", invalid="ignore"):
        # Equal values stay exactly equal: what is summed are the distances to the first one.
        first = np.nan_to_num((sums / counts)[(counts > 0).argmax(axis=0), range(sums.shape[1])])
        rest = sums - counts * first
        apart = rest.sum(axis=0) / total
        rest -= counts * apart
        square, cube = (rest**2).sum(axis=0), (rest**3).sum(axis=0)
        errors = np.sqrt(square * groups / (groups - 1)) / total
        skews = np.nan_to_num(cube / groups / (square / groups) ** 1.5)
    return Moments(first + apart, errors, skews, groups)


def ratio_interval(values: Floats, counts: Counts, level: float) -> tuple[float, float]:
    """Return the interval of the ratio of two means: [groups,2] -> low, high (Fieller 1954).

    It holds every r for which 0 is in the t interval of the mean of first - r second. It has no end
    where the second mean may be 0. Values are 0 or more; where all are 0, it is NaN.
    """
    groups, n = int((counts[:, 0] > 0).sum()), int(counts[:, 0].sum())
    if groups < 2 or not values.any():
        return np.nan, np.nan
    first, second = values.sum(axis=0) / n
    rest = values - counts * [first, second]
    spread = rest.T @ rest * groups / (groups - 1) / n**2 * _quantile(groups, level) ** 2
    start, end = (mean**2 - own for mean, own in zip((first, second), np.diag(spread), strict=True))
    half = first * second - spread[0, 1]
    reach = half + np.sqrt(max(half**2 - end * start, 0.0))
    with np.errstate(divide="ignore"):
        low = start / reach if start > 0 else 0.0
    return float(low), float(reach / end) if end > 0 else np.inf


def _quantile(groups: Counts | int, level: float) -> Floats:
    """Return how many standard errors an interval of Student's t reaches; NaN for one group."""
    from scipy.special import stdtrit

    found: Floats = stdtrit(np.asarray(groups, np.float64) - 1, 1 - level / 2)
    return found


def _skewed(t: Floats, k: Floats) -> Floats:
    """Return the t statistic that Hall's transformation (1992) takes to t; k is skew / sqrt(n)."""
    small = np.abs(k) < 1e-5
    safe = np.where(small, 1.0, k)
    found: Floats = 3 / safe * (np.cbrt(1 + safe * (t - safe / 6)) - 1)
    return np.where(small, t - k / 6 - k * t**2 / 3, found)
