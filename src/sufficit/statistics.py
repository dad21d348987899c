"""Means with bootstrap intervals, paired sign-flip tests, and methods ranked by them.

Bootstrap and sign-flip test are written here, not taken from scipy.stats, for three reasons: all
columns share the draws of one seed, so that published intervals and p-values stay the same; memory
does not grow with images times draws; images without a difference do not count towards the exact
test. The tests compare both with scipy.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sufficit.errors import UserError

if TYPE_CHECKING:
    import pandas

Floats = npt.NDArray[np.float64]
RESAMPLES = 2000  # of a bootstrap
EDGES = (0.025, 0.975)  # of a 95 % interval
DRAWS = 10_000  # of a sign-flip test
ENUMERATED = 20  # differences up to which the sign-flip test is exact
HELD = 1_000_000  # numbers in memory at a time
LEVEL = 0.05  # of significance


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
    """Return the mean and interval of every column [N]."""
    values = np.stack(list(columns.values()), axis=1)
    low, high = bootstrap(values, seed=seed)
    missing = np.isnan(values).sum(axis=0)
    parts = (_means(values), low, high, len(values) - missing, missing)
    found = zip(columns, *(part.tolist() for part in parts), strict=True)
    return {
        name: Estimate(mean, a, b, n, nan, directions[name]) for name, mean, a, b, n, nan in found
    }


def ratio_estimate(own: Floats, chance: Floats, *, seed: int = 0) -> Estimate:
    """Return the ratio of two means over the same images, with its interval: [N], [N].

    Images without one of the two values do not count, nor do resamples in which both means are 0.
    """
    pairs = np.stack([own, chance], axis=1)
    both = pairs[~np.isnan(pairs).any(axis=1)]
    low = high = np.nan
    if len(both) > 1:
        drawn = ratio(*_resampled_means(both, RESAMPLES, seed).T)
        if not np.isnan(drawn).all():
            # No interpolation between resamples, because some may be infinite.
            low, high = np.nanquantile(drawn, EDGES, method="nearest")
    mean = float(ratio(*_means(both)))
    return Estimate(mean, float(low), float(high), len(both), len(pairs) - len(both), False)


def ratio(own: npt.ArrayLike, chance: npt.ArrayLike) -> Floats:
    """Return own over chance; infinite where chance is 0, NaN where both are.

    >>> ratio([0.2, 0.2, 0.0], [0.1, 0.0, 0.0])
    array([ 2., inf, nan])
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(np.asarray(own, np.float64), np.asarray(chance, np.float64))


def bootstrap(
    values: Floats, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[Floats, Floats]:
    """Return the 95 % percentile interval of each column's mean: [N,columns] -> low, high.

    NaN values do not count. Columns with values in the same rows are resampled together. A column
    with fewer than two values has the interval NaN.

    >>> low, high = bootstrap(np.array([[0.0], [0.0], [0.0], [1.0]]))
    >>> low.tolist(), high.tolist()                 # of four drawn, 0 to 3 are the 1; rarely all
    ([0.0], [0.75])
    """
    edges = np.full((2, values.shape[1]), np.nan)
    present = ~np.isnan(values)
    for rows in {column.tobytes(): column for column in present.T}.values():
        if rows.sum() > 1:
            alike = (present == rows[:, None]).all(axis=0)
            means = _resampled_means(values[rows][:, alike], resamples, seed)
            edges[:, alike] = np.quantile(means, EDGES, axis=0)
    return edges[0], edges[1]


def sign_flip(differences: Floats, *, draws: int = DRAWS, seed: int = 0) -> tuple[float, bool]:
    """Return the two-sided p-value of a mean difference, and whether it is exact; NaN is ignored.

    p is the share of sign patterns that bring the mean as far from 0 as it is: of all patterns up
    to 20 differences other than 0, else (1 + hits) / (1 + draws) of random ones.

    >>> sign_flip(np.array([1.0, 2.0, 3.0]))       # of eight patterns, +++ and --- reach 6
    (0.25, True)
    """
    moved = differences[~np.isnan(differences) & (differences != 0)]
    # Sums that are equal but for rounding count as equal.
    far = abs(moved.sum()) - 1e-12 * np.abs(moved).sum()
    if len(moved) <= ENUMERATED:
        return float((np.abs(_signed_sums(moved)) >= far).mean()), True
    random, totals = np.random.default_rng(seed), np.zeros(draws)
    for eight in np.pad(moved, (0, -len(moved) % 8)).reshape(-1, 8):
        # One random byte per draw picks one of the 256 signed sums of eight values.
        totals += _signed_sums(eight)[np.frombuffer(random.bytes(draws), np.uint8)]
    return (1 + int((np.abs(totals) >= far).sum())) / (1 + draws), False


def holm(p_values: Floats) -> Floats:
    """Return p-values corrected for their number by Holm's step-down: [P] -> [P].

    >>> holm(np.array([0.04, 0.01, 0.03])).tolist()
    [0.06, 0.03, 0.06]
    """
    order = np.argsort(p_values, kind="stable")
    steps = p_values[order] * np.arange(len(p_values), 0, -1)
    corrected = np.empty_like(p_values)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return corrected


@dataclass(frozen=True)
class Pair:
    """Mean of first - second over the images where both have a value, and its significance."""

    first: str
    second: str
    difference: float
    low: float  # 95 % bootstrap interval of the difference
    high: float
    p: float  # of the sign-flip test
    p_corrected: float  # by Holm, for the number of pairs
    n: int
    n_nan: int
    exact: bool  # whether p is of all sign patterns, or of random ones


@dataclass(frozen=True)
class Chance:
    """The settings behind the intervals and p-values of a standing."""

    seed: int = 0
    resamples: int = RESAMPLES
    draws: int = DRAWS
    correction: str = "holm"
    level: float = LEVEL


@dataclass(frozen=True)
class Standing:
    """Methods ranked by one column: the best, those not significantly different, every pair."""

    column: str
    higher_is_better: bool
    n: int
    best: str  # by its mean
    ranking: tuple[str, ...]  # best first
    means: dict[str, float]  # NaN ignored
    tied: tuple[str, ...]  # not significantly different from the best
    pairs: tuple[Pair, ...]
    chance: Chance

    def frame(self) -> "pandas.DataFrame":
        """Return one row per pair, with the fields of `Pair` as columns."""
        import pandas

        names = [field.name for field in fields(Pair)]
        return pandas.DataFrame([asdict(pair) for pair in self.pairs], columns=names)

    def sentence(self) -> str:
        """Return a sentence that names the best method and those not significantly different."""
        better = "higher" if self.higher_is_better else "lower"
        found = (
            f"By {self.column} ({better} is better) over {self.n} images {self.best} is best at"
            f" {self.means[self.best]:.3f}"
        )
        if not self.pairs:
            return f"{found}, with nothing to compare it with."
        count = "1 pair" if len(self.pairs) == 1 else f"{len(self.pairs)} pairs"
        test = f"level {self.chance.level:g}, Holm's correction for {count}"
        apart = [pair.second for pair in self.pairs if pair.first == self.best and not pair.n]
        unknown = f"; it has no image in common with {', '.join(apart)}" if apart else ""
        if self.tied:
            alike = ", ".join(self.tied)
            return f"{found}; not significantly different: {alike} ({test}){unknown}."
        if len(apart) == len(self.ranking) - 1:
            return f"{found}{unknown}."
        others = "the others" if apart else "every other"
        return f"{found}, and differs significantly from {others} ({test}){unknown}."


def compare_values(
    values: Mapping[str, npt.ArrayLike],
    column: str = "msi",
    *,
    higher_is_better: bool = True,
    seed: int = 0,
    resamples: int = RESAMPLES,
    draws: int = DRAWS,
) -> Standing:
    """Rank methods by one value per image, NaN where there is none: {method: [N]}.

    >>> standing = compare_values({"a": [0.5, 0.7, 0.6], "b": [0.1, 0.4, 0.3]})
    >>> standing.best, standing.tied, standing.pairs[0].p        # three images are too few
    ('a', ('b',), 0.25)
    """
    columns = {method: np.asarray(found, dtype=np.float64) for method, found in values.items()}
    check_values(columns)
    means = {method: _mean(found) for method, found in columns.items()}
    sign = -1 if higher_is_better else 1
    ranking = sorted(columns, key=lambda method: np.nan_to_num(sign * means[method], nan=np.inf))
    chance = Chance(seed, resamples, draws)
    pairs = _pairs_of({method: columns[method] for method in ranking}, chance)
    tied = (p.second for p in pairs if p.first == ranking[0] and p.n and p.p_corrected >= LEVEL)
    n, best, means = len(columns[ranking[0]]), ranking[0], {m: means[m] for m in ranking}
    ranked = (best, tuple(ranking), means, tuple(tied), pairs, chance)
    return Standing(column, higher_is_better, n, *ranked)


def check_equal(what: str, found: Mapping[str, object]) -> None:
    """Raise unless all methods have the same value of something."""
    first, *others = found
    for other in others:
        if found[other] != found[first]:
            raise UserError(
                "methods to compare must be scored on the same images in the same way:"
                f" {what} is {found[first]!r} for {first} and {found[other]!r} for {other};"
                " score them alike"
            )


def check_values(values: Mapping[str, Floats]) -> None:
    """Raise unless all methods have one finite value or NaN per image, for as many images."""
    if not values:
        raise UserError("got no methods to compare: pass one or more as {method: scores}")
    for method, found in values.items():
        if found.ndim != 1 or not len(found):
            raise UserError(
                f"values to compare must be [N], one per image, got {list(found.shape)} for"
                f" {method}: pass a flat list"
            )
        if np.isinf(found).any():
            raise UserError(
                f"values to compare must be finite or NaN, got inf for {method}: use NaN instead"
            )
    check_equal("number of images", {method: len(found) for method, found in values.items()})


def _pairs_of(columns: Mapping[str, Floats], chance: Chance) -> tuple[Pair, ...]:
    """Return every pair, the better ranked method first."""
    couples = list(combinations(columns, 2))
    if not couples:
        return ()
    differences = np.stack([columns[a] - columns[b] for a, b in couples], axis=1)
    low, high = bootstrap(differences, resamples=chance.resamples, seed=chance.seed)
    tests = [sign_flip(column, draws=chance.draws, seed=chance.seed) for column in differences.T]
    corrected = holm(np.array([p for p, _ in tests]))
    parts = (differences.T, low.tolist(), high.tolist(), tests, corrected.tolist())
    pairs = []
    for (one, two), found, a, b, (p, exact), p_corrected in zip(couples, *parts, strict=True):
        n_nan = int(np.isnan(found).sum())
        n = len(found) - n_nan
        pairs.append(Pair(one, two, _mean(found), a, b, p, p_corrected, n, n_nan, exact))
    return tuple(pairs)


def _mean(values: Floats) -> float:
    present = values[~np.isnan(values)]
    return float(present.mean()) if len(present) else float("nan")


def _means(values: Floats) -> Floats:
    """Return the mean of each column, NaN ignored: [N,columns] -> [columns]."""
    with np.errstate(invalid="ignore"):
        means: Floats = np.nansum(values, axis=0) / np.isfinite(values).sum(axis=0)
    return means


def _resampled_means(values: Floats, resamples: int, seed: int) -> Floats:
    """Return the means of rows drawn with replacement: [N,columns] -> [resamples,columns]."""
    random, n = np.random.default_rng(seed), len(values)
    at_once = max(1, HELD // n)
    centred = values - values[0]  # equal values stay exactly equal
    means = []
    for start in range(0, resamples, at_once):
        size = min(at_once, resamples - start)
        drawn = random.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n)
        means.append(values[0] + counts @ centred / n)
    return np.concatenate(means)


def _signed_sums(values: Floats) -> Floats:
    """Return the sum under every sign pattern: [M] -> [2^M]."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums
