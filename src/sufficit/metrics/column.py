"""A column of a table: a name, its heading, and a metric at one or several schedules."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from torch import Tensor

from sufficit.metrics.further_columns import rank_curve
from sufficit.metrics.metric import Metric, Schedule
from sufficit.perturbation.bands import Band
from sufficit.perturbation.predictions import Predictions

Columns = dict[str, Tensor]
"""One value per image, each [n]; a curve has one per point, [n,P]."""
FURTHER_GROUP = "Further columns"
CANDIDATE = "@"  # in the names of columns that one is chosen from at the end, or that nobody reads


@dataclass(frozen=True)
class Heading:
    """What a column or curve is called, and how its values are read."""

    short: str  # in a terminal and under a heatmap
    long: str  # in the report and over a figure
    meaning: str = ""  # one sentence
    limits: tuple[float, float] = (-inf, inf)  # the lowest and highest value it can have
    higher_is_better: bool | None = None  # None where neither is
    group: str = FURTHER_GROUP  # the table that shows it; empty: the first table, or none

    def under(self, where: str, key: str, group: str) -> "Heading":
        """The heading of the same column for another model or fill, `where` in words.

        >>> Heading("MSI", "MSI").under("fill blur", "blur", "Other fills").long
        'MSI (fill blur)'
        """
        meaning = f"{self.meaning} Scored with {where.replace('twin', 'the twin')}."
        short = f"{self.short} {key.replace('_', ' ')}"
        found = replace(self, short=short, long=f"{self.long} ({where})", group=group)
        return replace(found, meaning=meaning.strip())


def candidate(name: str, value: object) -> str:
    """The name of one candidate of a column.

    >>> candidate("msi_alpha", 0.5)
    'msi_alpha@0.5'
    """
    return (
        f"{name}{CANDIDATE}{value:g}" if isinstance(value, float) else f"{name}{CANDIDATE}{value}"
    )


def candidates_of(name: str, columns: Mapping[str, object] | list[str]) -> dict[str, float]:
    """The candidates of a column among some columns, with their value."""
    start = name + CANDIDATE
    return {one: float(one.removeprefix(start)) for one in columns if one.startswith(start)}


@dataclass(frozen=True)
class Column:
    """A metric of bands under a name. With several schedules its values are candidates."""

    name: str
    metric: Metric
    schedules: tuple[Schedule, ...]
    heading: Heading

    @property
    def bands(self) -> list[Band]:
        """The bands it needs scores of."""
        wanted = ([*self.metric.weights(s), *self.metric.asks(s)] for s in self.schedules)
        return [band for found in wanted for band in found]

    @property
    def sizes(self) -> list[Band]:
        """The bands it needs the size of."""
        return [band for schedule in self.schedules for band in self.metric.weighs(schedule)]

    @property
    def asks_model(self) -> bool:
        """Whether it needs a score at all; the size of a mask needs none."""
        return bool(self.bands)

    def values(self, answers: Predictions) -> Columns:
        """One value per image, at every schedule."""
        if len(self.schedules) == 1:
            return {self.name: self.metric.formula(answers, self.schedules[0])}
        return {
            candidate(self.name, schedule.alpha_min): self.metric.formula(answers, schedule)
            for schedule in self.schedules
        }


class RankColumn(Column):
    """MSI by rank: at every share k of the pixels a candidate, kept less left less k."""

    def values(self, answers: Predictions) -> Columns:
        """One value per image and share; shares that not all images were asked are left out."""
        (schedule,) = self.schedules
        curve = rank_curve(answers, schedule)
        return {
            candidate(self.name, float(share)): curve[:, place]
            for place, share in enumerate(schedule.shares)
        }
