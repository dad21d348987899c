"""When a run with `within` has seen enough images: a sequential interval of fixed width.

The run looks after each of many sizes and stops at the first at which the interval of every ranked
method's MSI is narrow enough. It looks at widths alone, never at means. So as the width falls, the
interval at the end holds the mean as often as an interval of a number of images fixed in advance
(Chow and Robbins 1965). Rare events break this for few images: while none is met, the mean is too
high and the interval too narrow, and the run would stop just then. So the width that decides is
that of the images and a few that nobody met, at both ends of the scale.
benchmarks/README.md has what was measured.
"""

import numpy as np

from sufficit.metrics.columns import HEADINGS
from sufficit.probes.standard import MSI
from sufficit.runs.job import Job
from sufficit.runs.unit_rows import Rows
from sufficit.sums import LEVEL, Sums, moments

UNMET = 5  # images at each end of the scale, which the deciding interval counts


class Stopping:
    """Takes the rows of units in any order; knows after which unit, in their order, to stop."""

    def __init__(self, job: Job) -> None:
        self.within = job.config.within
        self.looks = {*job.looks}  # numbers of units
        self.sums = {name: Sums([MSI], seed=job.config.seed) for name in job.ranked}
        self.units: int | None = None  # how many to stop after, once that is known
        self._next = 0
        self._waiting: dict[int, Rows] = {}

    def add(self, rows: Rows) -> bool:
        """Add a unit; return whether to stop."""
        self._waiting[rows.unit] = rows
        while self.units is None and self._next in self._waiting:
            self._count(self._waiting.pop(self._next))
        return self.units is not None

    def _count(self, rows: Rows) -> None:
        if len(rows):
            for name, own in self.sums.items():
                own.add(rows.numbers, {MSI: rows.values[name][MSI].numpy()})
        self._next += 1
        if self._next in self.looks and self._is_precise():
            self.units = self._next

    def _is_precise(self) -> bool:
        assert self.within is not None
        widths = [deciding_width(own, UNMET) for own in self.sums.values()]
        return max(widths) <= self.within


def deciding_width(sums: Sums, unmet: int) -> float:
    """Half the width of the interval of MSI's mean, infinite without any value.

    Some images that are not scored count at both ends.
    """
    values, counts = sums.groups()
    ends = np.repeat(HEADINGS[MSI].limits, unmet)[:, None]
    known = np.concatenate([values, ends])
    each = np.concatenate([counts, np.ones_like(ends, np.int64)])
    low, high = moments(known, each).interval(LEVEL)
    return float(high[0] - low[0]) / 2 if counts.sum() else np.inf
