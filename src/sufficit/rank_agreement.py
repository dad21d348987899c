"""Does a ranking hold under other conditions: another fill, or a twin of the model?"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from sufficit.statistics import Standing


@dataclass(frozen=True)
class RankedCondition:
    """How methods rank by MSI under one condition."""

    key: str  # the end of its columns' names; empty for the first condition
    fill: str
    twin: bool
    masks: int  # asked per image and method, at most
    model_calls: int
    clean_accuracy: float  # share of whole images that get their target; NaN where unknown
    standing: Standing

    @property
    def words(self) -> str:
        """The condition in words.

        >>> from sufficit.statistics import compare_values
        >>> standing = compare_values({"a": [1.0], "b": [0.0]})
        >>> RankedCondition("twin_blur", "blur", True, 8, 80, 0.9, standing).words
        'for the twin with the fill blur'
        """
        return f"{'for the twin ' * self.twin}with the fill {self.fill}"

    def record(self) -> dict[str, Any]:
        """What run.json holds of it."""
        return asdict(self)

    @staticmethod
    def read(found: Mapping[str, Any], standing: Standing) -> "RankedCondition":
        """What run.json held."""
        known = {one.name: found[one.name] for one in fields(RankedCondition)}
        clean = float("nan") if found["clean_accuracy"] is None else found["clean_accuracy"]
        return RankedCondition(**known | {"standing": standing, "clean_accuracy": clean})


@dataclass(frozen=True)
class Correlation:
    """How far two conditions rank the methods alike: 1 the same order, -1 the reverse."""

    first: str  # keys
    second: str
    spearman: float  # NaN where either ranks all methods equally, or there is one method only
    kendall: float


@dataclass(frozen=True)
class LostLead:
    """Methods over which another's significant lead does not survive a condition."""

    method: str
    gone: tuple[str, ...]  # no longer significantly worse than it
    reversed: tuple[str, ...]  # significantly better than it


def correlations(ranked: Sequence[RankedCondition]) -> list[Correlation]:
    """Return the rank correlations of every two conditions, over the ranked methods' means."""
    found = []
    for one, two in combinations(ranked, 2):
        methods = one.standing.ranking
        means = [np.array([r.standing.means[m] for m in methods]) for r in (one, two)]
        found.append(Correlation(one.key, two.key, spearman(*means), kendall(*means)))
    return found


def spearman(one: npt.ArrayLike, two: npt.ArrayLike) -> float:
    """Return the correlation of ranks, equal values sharing their mean rank: [M], [M].

    >>> spearman([1, 2, 3, 4], [1, 3, 2, 4])
    0.8
    """
    first, second = (_ranks(np.asarray(values, np.float64)) for values in (one, two))
    first, second = first - first.mean(), second - second.mean()
    size = float(np.sqrt((first @ first) * (second @ second)))
    return round(float(first @ second) / size, 12) if size > 0 else float("nan")


def kendall(one: npt.ArrayLike, two: npt.ArrayLike) -> float:
    """Return Kendall's tau-b: pairs in the same order less pairs in the other, ties allowed.

    >>> kendall([1, 2, 3, 4], [1, 3, 2, 4])
    0.666666666667
    """
    first, second = (np.asarray(values, np.float64) for values in (one, two))
    signs = [np.sign(values[:, None] - values) for values in (first, second)]
    size = float(np.sqrt((signs[0] ** 2).sum() * (signs[1] ** 2).sum()))
    return round(float((signs[0] * signs[1]).sum()) / size, 12) if size > 0 else float("nan")


def lost_leads(first: Standing, other: Standing) -> list[LostLead]:
    """Return the leads that the paired tests find under the first condition and not under another.

    A lead of A over B is a significant difference. It survives if A is significantly better there
    too. Both tests are Holm-corrected for all pairs of their condition.
    """
    found = []
    for method in first.ranking:
        behind = [one for one in first.ranking if first.beats(method, one)]
        turned = tuple(one for one in behind if other.beats(one, method))
        gone = tuple(o for o in behind if o not in turned and not other.beats(method, o))
        if gone or turned:
            found.append(LostLead(method, gone, turned))
    return found


def best_changes(first: Standing, other: Standing) -> bool:
    """Whether another method is best there, and significantly better than the first's best."""
    return first.best in other.means and other.beats(other.best, first.best)


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return each value's rank from 0, equal values sharing their mean: [M]."""
    below = (values < values[:, None]).sum(1)
    equal = (values == values[:, None]).sum(1)
    ranks: npt.NDArray[np.float64] = below + (equal - 1) / 2
    return ranks
