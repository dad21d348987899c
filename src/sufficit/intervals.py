"""Means over images with bootstrap intervals, and the ratio of two means."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sufficit.resampling import EDGES, RESAMPLES, Floats, bootstrap, resampled_means


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

    Images without one of the two are left out, and so are resamples in which both means are 0.
    """
    pairs = np.stack([own, chance], axis=1)
    both = pairs[~np.isnan(pairs).any(axis=1)]
    missing = len(pairs) - len(both)
    low = high = np.nan
    if len(both) > 1:
        drawn = ratio(*resampled_means(both, RESAMPLES, seed).T)
        if not np.isnan(drawn).all():
            # Points that were drawn and none between them: some may be infinite.
            low, high = np.nanquantile(drawn, EDGES, method="nearest")
    found = float(ratio(*_means(both)))
    return Estimate(found, float(low), float(high), len(both), missing, False)


def ratio(own: npt.ArrayLike, chance: npt.ArrayLike) -> Floats:
    """Own over chance; where chance is 0 infinite, or NaN if own is 0 as well.

    >>> ratio([0.2, 0.2, 0.0], [0.1, 0.0, 0.0])
    array([ 2., inf, nan])
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(np.asarray(own, np.float64), np.asarray(chance, np.float64))


def _means(values: Floats) -> Floats:
    """Mean of each column, NaN left out, NaN where nothing else is: [N,columns] -> [columns]."""
    with np.errstate(invalid="ignore"):
        means: Floats = np.nansum(values, axis=0) / np.isfinite(values).sum(axis=0)
    return means
