"""Methods compared on the same images: which is best, and which can't be told from it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sufficit.errors import UserError
from sufficit.metrics.scores import Scores
from sufficit.perturbation.bands import EVERYTHING
from sufficit.resampling import DRAWS, RESAMPLES, Floats, bootstrap, holm, sign_flip

if TYPE_CHECKING:
    import pandas

LEVEL = 0.05
FAR, FEW = 0.1, 0.05  # rounding moves few answers for whole images so far


@dataclass(frozen=True)
class Pair:
    """Mean of first - second over the images where both have a value, and how sure it is."""

    first: str
    second: str
    difference: float
    low: float  # 95 % bootstrap interval of the difference
    high: float
    p: float  # of the sign-flip test
    p_corrected: float  # by Holm, for the number of pairs
    n: int
    n_nan: int
    exact: bool  # whether p is of all ways to flip signs, or of some drawn by chance


@dataclass(frozen=True)
class Chance:
    """What the intervals and p-values of a standing were made with."""

    seed: int = 0
    resamples: int = RESAMPLES
    draws: int = DRAWS
    correction: str = "holm"
    level: float = LEVEL


@dataclass(frozen=True)
class Standing:
    """How methods stand in one column: the best, those not told from it, and every pair."""

    column: str
    higher_is_better: bool
    n: int
    best: str  # by its mean
    ranking: tuple[str, ...]  # best first
    means: dict[str, float]  # NaN left out
    tied: tuple[str, ...]  # not distinguishable from the best
    pairs: tuple[Pair, ...]
    chance: Chance

    def frame(self) -> "pandas.DataFrame":
        """One row a pair: difference, low, high, p, p_corrected, n and the rest of `Pair`."""
        import pandas

        names = [field.name for field in fields(Pair)]
        return pandas.DataFrame([asdict(pair) for pair in self.pairs], columns=names)

    def sentence(self) -> str:
        """Who is best, and who can't be told from it, in plain words."""
        better = "higher" if self.higher_is_better else "lower"
        found = (
            f"By {self.column} ({better} is better) over {self.n} images {self.best} is best at"
            f" {self.means[self.best]:.3f}"
        )
        if not self.pairs:
            return f"{found}, with nothing to compare it with."
        test = f"level {self.chance.level:g}, Holm's correction for {_pairs(len(self.pairs))}"
        apart = [pair.second for pair in self.pairs if pair.first == self.best and not pair.n]
        unknown = f"; no image has values of it and of {', '.join(apart)}" if apart else ""
        if self.tied:
            alike = ", ".join(self.tied)
            return f"{found}; not distinguishable from it: {alike} ({test}){unknown}."
        if len(apart) == len(self.ranking) - 1:
            return f"{found}{unknown}."
        others = "the others" if apart else "every other"
        return f"{found}, and differs from {others} ({test}){unknown}."


def compare_scores(
    scores: Mapping[str, Scores],
    column: str = "msi",
    *,
    names: Mapping[str, Sequence[str]] | None = None,
    seed: int = 0,
) -> Standing:
    """Compare methods by a column of their scores on the same images.

    With `names`, the images' names for each method, the names must agree too.
    """
    for method, found in scores.items():
        if not isinstance(found, Scores):
            raise UserError(
                f"scores must be what evaluate returns, got {type(found).__name__} for {method}:"
                " compare bare values with sufficit.metrics.compare_scores.compare_values"
            )
    values = {method: found[column].numpy() for method, found in scores.items()}
    _check_same_images(values)
    if names is not None:
        _check_same_names(names, {method: len(found) for method, found in scores.items()})
    _check_same_scoring(scores)
    higher = next(iter(scores.values())).plan.higher_is_better(column)
    if higher is None:
        raise UserError(f"{column} has no better or worse to compare by: choose another column")
    return compare_values(values, column, higher_is_better=higher, seed=seed)


def compare_values(
    values: Mapping[str, npt.ArrayLike],
    column: str = "msi",
    *,
    higher_is_better: bool = True,
    seed: int = 0,
    resamples: int = RESAMPLES,
    draws: int = DRAWS,
) -> Standing:
    """Compare methods by one value an image, NaN where there is none: {method: [N]}.

    >>> standing = compare_values({"a": [0.5, 0.7, 0.6], "b": [0.1, 0.4, 0.3]})
    >>> standing.best, standing.tied, standing.pairs[0].p            # three images tell nothing
    ('a', ('b',), 0.25)
    """
    columns = {method: np.asarray(found, dtype=np.float64) for method, found in values.items()}
    _check_same_images(columns)
    higher = 1 if higher_is_better else -1
    means = {method: _mean(found) for method, found in columns.items()}
    ranking = sorted(columns, key=lambda method: np.nan_to_num(-higher * means[method], nan=np.inf))
    chance = Chance(seed, resamples, draws)
    pairs = _pairs_of({method: columns[method] for method in ranking}, chance)
    tied = (p.second for p in pairs if p.first == ranking[0] and p.n and p.p_corrected >= LEVEL)
    return Standing(
        column=column,
        higher_is_better=higher_is_better,
        n=len(columns[ranking[0]]),
        best=ranking[0],
        ranking=tuple(ranking),
        means={method: means[method] for method in ranking},
        tied=tuple(tied),
        pairs=pairs,
        chance=chance,
    )


def _mean(values: Floats) -> float:
    present = values[~np.isnan(values)]
    return float(present.mean()) if len(present) else float("nan")


def _pairs_of(columns: Mapping[str, Floats], chance: Chance) -> tuple[Pair, ...]:
    """Every pair, the better ranked method first."""
    couples = list(combinations(columns, 2))
    if not couples:
        return ()
    differences = np.stack([columns[a] - columns[b] for a, b in couples], axis=1)
    low, high = bootstrap(differences, resamples=chance.resamples, seed=chance.seed)
    tests = [sign_flip(column, draws=chance.draws, seed=chance.seed) for column in differences.T]
    corrected = holm(np.array([p for p, _ in tests]))
    missing = np.isnan(differences).sum(axis=0)
    return tuple(
        Pair(
            first=first,
            second=second,
            difference=_mean(differences[:, i]),
            low=float(low[i]),
            high=float(high[i]),
            p=tests[i][0],
            p_corrected=float(corrected[i]),
            n=len(differences) - int(missing[i]),
            n_nan=int(missing[i]),
            exact=tests[i][1],
        )
        for i, (first, second) in enumerate(couples)
    )


def _check_same_images(values: Mapping[str, Floats]) -> None:
    """Raise unless all methods have one value an image, for as many images."""
    if not values:
        raise UserError("methods to compare must be one or more, got none: {method: scores}")
    for method, found in values.items():
        if found.ndim != 1 or not len(found):
            raise UserError(
                f"values to compare must be [N], one an image, got {list(found.shape)} for {method}"
            )
        if np.isinf(found).any():
            raise UserError(f"values to compare must be finite or NaN, got inf for {method}")
    _check_equal("number of images", {method: len(found) for method, found in values.items()})


def _check_same_names(names: Mapping[str, Sequence[str]], counts: Mapping[str, int]) -> None:
    """Raise unless every image has a name, and the same one for all methods."""
    for method, n in counts.items():
        given = len(names.get(method, ()))
        if given != n:
            raise UserError(
                f"names must hold a name an image for each method: {method} has {n} images and"
                f" {given} names"
            )
    for i, alike in enumerate(zip(*(names[method] for method in counts), strict=True)):
        _check_equal(f"name of image {i}", dict(zip(counts, alike, strict=True)))


def _check_same_scoring(scores: Mapping[str, Scores]) -> None:
    """Raise unless all methods were scored for the same classes in the same way."""
    _check_equal("alpha_min", {method: found.alpha_min for method, found in scores.items()})
    for name in ("score", "value_step", "percent_step"):
        _check_equal(
            name,
            {method: getattr(found.plan.schedules[0], name) for method, found in scores.items()},
        )
    first, *others = scores
    for other in others:
        apart = (scores[first].targets != scores[other].targets).nonzero()
        if len(apart):
            i = int(apart[0])
            both = {method: int(scores[method].targets[i]) for method in (first, other)}
            _check_equal(f"target of image {i}", both)
        _check_same_answers({method: scores[method] for method in (first, other)})


def _check_same_answers(scores: Mapping[str, Scores]) -> None:
    """Raise where the model says other things of the whole images: it, or they, are others."""
    one, two = (found.answers.of([EVERYTHING], "confidence")[:, 0] for found in scores.values())
    if float(((one - two).abs() > FAR).double().mean()) > FEW:
        first, other = scores
        raise UserError(
            "methods to compare must be scored on the same images by the same model: what it says"
            f" of the whole images is not the same for {first} and {other}"
        )


def _check_equal(what: str, found: Mapping[str, object]) -> None:
    first, *others = found
    for other in others:
        if found[other] != found[first]:
            raise UserError(
                "methods to compare must be scored on the same images in the same way:"
                f" {what} is {found[first]!r} for {first} and {found[other]!r} for {other};"
                " score them alike"
            )


def _pairs(count: int) -> str:
    return "1 pair" if count == 1 else f"{count} pairs"
