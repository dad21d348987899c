"""Means with intervals, paired tests, and methods ranked by them.

All of them are made from `Sums`, which take images a few at a time and do not grow with their
number. A difference is significant if a sign-flip test and its interval both say so. The
sign-flip test is written here, not taken from scipy.stats, because memory must not grow with images
times draws, and images without a difference do not count towards the exact test.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sufficit.errors import UserError, unknown
from sufficit.sums import LEVEL, Floats, Sums, moments, ratio_interval, sums_of, with_pairs

if TYPE_CHECKING:
    import pandas

DRAWS = 10_000  # of a sign-flip test
ENUMERATED = 20  # differences up to which the sign-flip test is exact
Limits = Callable[[Any], tuple[float, float]]
"""From the name of a column to the lowest and highest value it can have."""


@dataclass(frozen=True)
class Estimate:
    """The mean of a column over images with its 95 % interval; NaN values are counted."""

    mean: float
    low: float
    high: float
    n: int
    n_nan: int
    higher_is_better: bool | None  # None where neither is


def estimates_of(
    sums: Sums,
    directions: Mapping[Any, bool | None],
    chance: "Chance | None" = None,
    limits: "Limits | None" = None,
) -> dict[Any, Estimate]:
    """Return the mean and interval of the columns that a direction is given for.

    `limits` are those of a column's values: no interval of a mean goes beyond them.
    """
    names = [*directions]
    values, counts = sums.groups(names)
    low, high = moments(values, counts).interval((chance or Chance(sums.seed)).level)
    means = sums.means(names)
    # A limit never cuts off the mean itself, which rounding may have put past it.
    if limits is not None and names:
        ends = np.array([limits(name) for name in names]).T
        low = np.maximum(low, np.minimum(ends[0], means))
        high = np.minimum(high, np.maximum(ends[1], means))
    n = counts.sum(axis=0)
    return {
        name: Estimate(
            mean=float(means[k]),
            low=float(low[k]),
            high=float(high[k]),
            n=int(n[k]),
            n_nan=sums.n - int(n[k]),
            higher_is_better=directions[name],
        )
        for k, name in enumerate(names)
    }


def ratio_of(sums: Sums, chance: "Chance | None" = None) -> Estimate:
    """Return the ratio of two means and its interval, from the sums of `both` columns.

    Images without one of the two values do not count.
    """
    values, counts = sums.groups(["own", "chance"])
    low, high = ratio_interval(values, counts, (chance or Chance(sums.seed)).level)
    n = int(counts[:, 0].sum())
    mean = float(ratio(*sums.means(["own", "chance"])))
    return Estimate(mean, low, high, n, sums.n - n, False)


def ratio(own: npt.ArrayLike, chance: npt.ArrayLike) -> Floats:
    """Return own over chance; infinite where chance is 0, NaN where both are.

    >>> ratio([0.2, 0.2, 0.0], [0.1, 0.0, 0.0])
    array([ 2., inf, nan])
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(np.asarray(own, np.float64), np.asarray(chance, np.float64))


def sign_flip(sums: Floats, *, draws: int = DRAWS, seed: int = 0) -> tuple[float, bool]:
    """Return the two-sided p-value of the sum of all groups, and whether it is exact: [groups].

    p is the share of sign patterns that bring the sum as far from 0 as it is: of all patterns up
    to 20 groups other than 0, else (1 + hits) / (1 + draws) of random ones.

    >>> sign_flip(np.array([1.0, 2.0, 3.0]))       # of eight patterns, +++ and --- reach 6
    (0.25, True)
    """
    return sign_flips(sums[:, None], draws=draws, seed=seed)[0]


def sign_flips(sums: Floats, *, draws: int = DRAWS, seed: int = 0) -> list[tuple[float, bool]]:
    """Return what `sign_flip` returns for every column: [groups,columns]."""
    moved = [column[(column != 0) & ~np.isnan(column)] for column in sums.T]
    many = [k for k, values in enumerate(moved) if len(values) > ENUMERATED]
    totals = dict(zip(many, _random_totals([moved[k] for k in many], draws, seed), strict=True))
    tests = []
    for k, values in enumerate(moved):
        # Sums that are equal but for rounding count as equal.
        far = abs(values.sum()) - 1e-12 * np.abs(values).sum()
        if k in totals:
            hits = int((np.abs(totals[k]) >= far).sum())
            # The pattern that was observed counts as one of the draws: p is never 0.
            tests.append(((1 + hits) / (1 + draws), False))
        else:
            tests.append((float((np.abs(_signed_sums(values)) >= far).mean()), True))
    return tests


def _random_totals(columns: Sequence[Floats], draws: int, seed: int) -> list[Floats]:
    """Return the sums of columns under random signs, the same signs for all: [draws] each."""
    if not columns:
        return []
    longest = max(map(len, columns))
    values = np.zeros((-(-longest // 8) * 8, len(columns)))
    for k, column in enumerate(columns):
        values[: len(column), k] = column
    random = np.random.default_rng(seed)
    negative = np.zeros((draws, len(columns)))
    for start in range(0, len(values), 64):
        rows = values[start : start + 64]
        # One random byte per draw has the signs of eight values.
        drawn = np.stack(
            [np.frombuffer(random.bytes(draws), np.uint8) for _ in range(len(rows) // 8)], axis=1
        )
        negative += np.unpackbits(drawn, axis=1, bitorder="little").astype(np.float64) @ rows
    # Those with a minus are subtracted twice from the sum of all.
    return [*(values.sum(axis=0) - 2 * negative).T]


def holm(p_values: Floats) -> Floats:
    """Return p-values corrected for their number by Holm's step-down: [P] -> [P].

    >>> holm(np.array([0.04, 0.01, 0.03])).tolist()
    [0.06, 0.03, 0.06]
    """
    # The smallest p times all tests, the next times one fewer, and never below one before it.
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
    low: float  # 95 % interval of the difference
    high: float
    p: float  # the larger of the sign-flip test's and that of the interval
    p_corrected: float  # by Holm, for the number of pairs of its family: see `standing_of`
    n: int
    n_nan: int
    exact: bool  # whether the sign-flip test tried all patterns, or random ones


@dataclass(frozen=True)
class Chance:
    """The settings behind the intervals and p-values of a standing."""

    seed: int = 0
    draws: int = DRAWS
    correction: str = "holm"
    level: float = LEVEL


@dataclass(frozen=True)
class Standing:
    """Methods ranked by one column and tested against each other and against the controls."""

    column: str
    higher_is_better: bool
    n: int
    best: str  # of the ranked methods, by its mean
    ranking: tuple[str, ...]  # best first
    means: dict[str, float]  # of methods and controls, NaN ignored
    not_different: tuple[str, ...]  # methods not significantly different from the best
    pairs: tuple[Pair, ...]  # of methods, then of a method and a control; the better mean first
    chance: Chance
    controls: tuple[str, ...] = ()  # which any method must beat, best first

    def pair(self, one: str, two: str) -> Pair | None:
        """Return the test of two of them; None where they have no image in common."""
        names = {one, two}
        tests = (pair for pair in self.pairs if {pair.first, pair.second} == names and pair.n)
        return next(tests, None)

    def beats(self, one: str, two: str) -> bool:
        """Return whether one is significantly better than the other."""
        pair = self.pair(one, two)
        if pair is None or pair.p_corrected >= self.chance.level:
            return False
        ahead = pair.difference if pair.first == one else -pair.difference
        return ahead > 0 if self.higher_is_better else ahead < 0

    @property
    def rivals(self) -> tuple[str, ...]:
        """All that the best method could be beaten by: the other methods and the controls."""
        return (*(method for method in self.ranking if method != self.best), *self.controls)

    @property
    def is_clear(self) -> bool:
        """Whether the best method is significantly better than all of these."""
        return bool(self.rivals) and all(self.beats(self.best, rival) for rival in self.rivals)

    @property
    def leader(self) -> str:
        """The highest mean of all, lowest where that is better: a method, or a control."""
        sign = -1 if self.higher_is_better else 1
        every = (*self.ranking, *self.controls)
        scored = [name for name in every if not np.isnan(self.means[name])]
        return min(scored, key=lambda name: sign * self.means[name], default=self.best)

    def among(self, methods: Collection[str], controls: Collection[str]) -> "Standing":
        """Return the standing of one or more of the methods, by the same tests.

        >>> values = {"a": [0.5, 0.7, 0.6], "b": [0.1, 0.4, 0.3], "c": [0.2, 0.0, 0.1]}
        >>> compare_values(values).among(["b", "c"], controls=[]).ranking
        ('b', 'c')
        """
        ranking = tuple(name for name in self.ranking if name in methods)
        kept = tuple(name for name in self.controls if name in controls)
        names = {*ranking, *kept}
        pairs = tuple(pair for pair in self.pairs if {pair.first, pair.second} <= names)
        return replace(
            self,
            best=ranking[0],
            ranking=ranking,
            means={name: mean for name, mean in self.means.items() if name in names},
            not_different=_not_different(ranking, pairs, self.chance),
            pairs=pairs,
            controls=kept,
        )

    def frame(self) -> "pandas.DataFrame":
        """Return one row per pair, with the fields of `Pair` as columns."""
        import pandas

        names = [field.name for field in fields(Pair)]
        return pandas.DataFrame([asdict(pair) for pair in self.pairs], columns=names)


def compare_values(
    values: Mapping[str, npt.ArrayLike],
    column: str = "msi",
    *,
    higher_is_better: bool = True,
    controls: Sequence[str] = (),
    seed: int = 0,
    draws: int = DRAWS,
) -> Standing:
    """Rank methods by one value per image, NaN where there is none: {method: [N]}.

    - values: one value per image of each method, NaN where there is none.
    - column: what the values are, for tables.
    - higher_is_better: whether the highest mean is the best.
    - controls: methods that are tested against the others and not ranked.
    - seed: of random sign patterns.
    - draws: random sign patterns, where there are too many to try all.

    >>> standing = compare_values({"a": [0.5, 0.7, 0.6], "b": [0.1, 0.4, 0.3]})
    >>> standing.best, standing.not_different, standing.pairs[0].p   # three images are too few
    ('a', ('b',), 0.25)
    """
    columns = {method: np.asarray(scores, dtype=np.float64) for method, scores in values.items()}
    check_values(columns)
    outside = [name for name in controls if name not in columns]
    if outside:
        raise unknown("method", outside[0], columns)
    return standing_of(
        sums_of(with_pairs(columns), seed=seed),
        [name for name in columns if name not in controls],
        column,
        Chance(seed, draws),
        controls,
        higher_is_better=higher_is_better,
    )


def standing_of(
    sums: Sums,
    methods: Sequence[str],
    column: str = "msi",
    chance: Chance | None = None,
    controls: Sequence[str] = (),
    *,
    higher_is_better: bool = True,
) -> Standing:
    """Rank methods by the sums of one column `with_pairs`; test them and the controls.

    P-values are corrected within families. The pairs of methods are one: which method is best? The
    pairs of each control with every method are another: which methods beat this control?
    """
    chance = chance or Chance(sums.seed)
    sign = -1 if higher_is_better else 1
    names = [*methods, *controls]
    mean_of = dict(zip(names, sums.means(names).tolist(), strict=True))
    # Methods without any value are last.
    order = sorted(mean_of, key=lambda name: np.nan_to_num(sign * mean_of[name], nan=np.inf))
    means = {name: mean_of[name] for name in order}
    ranking = tuple(name for name in order if name in methods)
    last = tuple(name for name in order if name not in methods)
    couples = [*combinations(ranking, 2)]
    families = [""] * len(couples)
    for pair in combinations(order, 2):
        controls_in = [name for name in pair if name in last]
        if len(controls_in) == 1:  # two controls are not tested against each other
            couples.append(pair)
            families += controls_in
    pairs = _pairs_of(sums, couples, families, chance)
    return Standing(
        column=column,
        higher_is_better=higher_is_better,
        n=sums.n,
        best=ranking[0],
        ranking=ranking,
        means=means,
        not_different=_not_different(ranking, pairs, chance),
        pairs=pairs,
        chance=chance,
        controls=last,
    )


def _not_different(
    ranking: Sequence[str], pairs: Sequence[Pair], chance: Chance
) -> tuple[str, ...]:
    """Return the methods whose difference to the first of the ranking is not significant."""
    own = [pair for pair in pairs if pair.first == ranking[0] and pair.second in ranking]
    return tuple(pair.second for pair in own if pair.n and pair.p_corrected >= chance.level)


def check_equal(what: str, values: Mapping[str, object]) -> None:
    """Raise unless all methods have the same value of something."""
    first, *others = values
    for other in others:
        if values[other] != values[first]:
            raise UserError(
                "methods to compare must be scored on the same images in the same way:"
                f" {what} is {values[first]!r} for {first} and {values[other]!r} for {other};"
                " score them alike"
            )


def check_values(values: Mapping[str, Floats]) -> None:
    """Raise unless all methods have one finite value or NaN per image, for as many images."""
    if not values:
        raise UserError("got no methods to compare: pass one or more as {method: scores}")
    for method, scores in values.items():
        if scores.ndim != 1 or not len(scores):
            raise UserError(
                f"values to compare must be [N], one per image, got {list(scores.shape)} for"
                f" {method}: pass a flat list"
            )
        if np.isinf(scores).any():
            raise UserError(
                f"values to compare must be finite or NaN, got inf for {method}: use NaN instead"
            )
    check_equal("number of images", {method: len(scores) for method, scores in values.items()})


def _pairs_of(
    sums: Sums, couples: Sequence[tuple[str, str]], families: Sequence[str], chance: Chance
) -> tuple[Pair, ...]:
    """Return the tests of some pairs, each of a family."""
    if not couples:
        return ()
    # Sums hold each difference one way round; the other way it has the other sign.
    stored = [pair if pair in sums.columns else pair[::-1] for pair in couples]
    differences, counts = sums.groups(stored)
    differences *= [1.0 if pair in sums.columns else -1.0 for pair in couples]
    moment = moments(differences, counts)
    low, high = moment.interval(chance.level)
    flips = sign_flips(differences, draws=chance.draws, seed=chance.seed)
    p_values = np.fmax([p for p, _ in flips], moment.p_values())
    corrected = np.empty_like(p_values)
    for family in {*families}:
        own = [k for k, name in enumerate(families) if name == family]
        corrected[own] = holm(p_values[own])
    n = counts.sum(axis=0)
    return tuple(
        Pair(
            first=first,
            second=second,
            difference=float(moment.means[k]),
            low=float(low[k]),
            high=float(high[k]),
            p=float(p_values[k]),
            p_corrected=float(corrected[k]),
            n=int(n[k]),
            n_nan=sums.n - int(n[k]),
            exact=flips[k][1],
        )
        for k, (first, second) in enumerate(couples)
    )


def _signed_sums(values: Floats) -> Floats:
    """Return the sum under every sign pattern: [M] -> [2^M]."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums
