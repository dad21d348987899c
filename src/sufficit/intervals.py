"""Means over images with bootstrap intervals, and the ratio of two means."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
RESAMPLES = 2000
EDGES = (0.025, 0.975)


@dataclass(frozen=True)
class Estimate:
    """The mean of a column over images with its 95 % bootstrap interval; NaN values are counted."""

    mean: float
    low: float
    high: float
    n: int
    n_nan: int
    higher_is_better: bool | None  # None where neither is


def estimates(
    columns: Mapping[str, Floats], directions: Mapping[str, bool | None], *, seed: int = 0
) -> dict[str, Estimate]:
    """Mean and interval of every column [N]."""
    values = np.stack(list(columns.values()), axis=1)
    low, high = bootstrap(values, seed=seed)
    missing = np.isnan(values).sum(axis=0)
    found = zip(columns, _means(values), low, high, missing, strict=True)
    return {
        name: Estimate(
            float(mean), float(a), float(b), len(values) - int(nan), int(nan), directions[name]
        )
        for name, mean, a, b, nan in found
    }


def ratio_estimate(own: Floats, chance: Floats, *, seed: int = 0) -> Estimate:
    """Ratio of two means over the same images [N], [N], and the interval of that ratio.

    Resamples in which both means are 0 say nothing and are left out.
    """
    both = np.stack([own, chance], axis=1)
    missing = int(np.isnan(both).any(axis=1).sum())
    low = high = np.nan
    if len(both) > 1:
        drawn = ratio(*np.concatenate(list(resampled(both, RESAMPLES, seed))).T)
        if not np.isnan(drawn).all():
            # Points that were drawn and none between them: some may be infinite.
            low, high = np.nanquantile(drawn, EDGES, method="nearest")
    found = float(ratio(*_means(both)))
    return Estimate(found, float(low), float(high), len(both) - missing, missing, False)


def ratio(own: npt.ArrayLike, chance: npt.ArrayLike) -> Floats:
    """Own over chance; where chance is 0 infinite, or NaN if own is 0 as well.

    >>> ratio([0.2, 0.2, 0.0], [0.1, 0.0, 0.0])
    array([ 2., inf, nan])
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(np.asarray(own, np.float64), np.asarray(chance, np.float64))


def bootstrap(
    values: Floats, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[Floats, Floats]:
    """95 % percentile interval of the mean of each column, NaN left out: [N,columns] -> low, high.

    One image has no interval: NaN.
    """
    n, columns = values.shape
    edges = np.full((2, columns), np.nan)
    if n < 2:
        return edges[0], edges[1]
    drawn = np.concatenate(list(resampled(values, resamples, seed)))[:resamples]
    seen = np.isfinite(drawn).any(axis=0)
    edges[:, seen] = np.nanquantile(drawn[:, seen], EDGES, axis=0)
    return edges[0], edges[1]


def resampled(values: Floats, resamples: int, seed: int) -> Iterator[Floats]:
    """Means of the columns over images drawn anew, fifty at a time: [N,columns] -> [50,columns]."""
    n = len(values)
    random = np.random.default_rng(seed)
    filled, present = np.nan_to_num(values), np.isfinite(values).astype(np.float64)
    for _ in range(0, resamples, 50):
        counts = random.multinomial(n, np.full(n, 1 / n), size=50).astype(np.float64)
        with np.errstate(invalid="ignore"):
            yield (counts @ filled) / (counts @ present)


def _means(values: Floats) -> Floats:
    """Mean of each column, NaN left out, NaN where nothing else is: [N,columns] -> [columns]."""
    with np.errstate(invalid="ignore"):
        means: Floats = np.nansum(values, axis=0) / np.isfinite(values).sum(axis=0)
    return means
