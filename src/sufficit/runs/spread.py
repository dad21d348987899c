"""Units are computed one after the other in this process, or elsewhere; a bar shows how far."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from sufficit.data.loader import Unit
from sufficit.data.manifest import Units
from sufficit.progress import Progress, bar, counted
from sufficit.runs.job import Job
from sufficit.runs.stopping import Stopping
from sufficit.runs.store import Store
from sufficit.runs.unit_rows import Rows

Score = Callable[[Unit, Unit | None], Rows]
"""Computes the rows of a unit; the second one is the unit that comes next."""
Spread = Callable[[Job, Store, Score, Collection[Unit]], Iterable[Rows]]
"""Computes units anywhere, in any order."""


@dataclass(frozen=True)
class Missing:
    """Units by number, each read from the list of images when its turn comes."""

    units: Units
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Unit]:
        return (self.units[number] for number in self.numbers)

    def __contains__(self, unit: object) -> bool:
        return isinstance(unit, Unit) and unit.number in self.numbers


def score_missing(
    job: Job,
    store: Store,
    score: Score,
    units: range,
    compute: Spread,
    progress: bool | Progress | None,
    *,
    title: str = "images x methods",
    stopping: Stopping | None = None,
) -> None:
    """Score every unit that has no file yet; with `stopping`, until it has seen enough.

    The parameters are what differs between a run and the first run of a search, which come here in
    turn: the job with its store, units and title, and who computes with which progress.
    """
    # Intersected: with `within` the folder may hold units of a later look.
    done = store.done() & {*units}
    if stopping is not None and any(stopping.add(store.read(unit)) for unit in sorted(done)):
        return
    missing = Missing(job.units, [number for number in units if number not in done])
    if not missing:
        return
    width = len(job.sources)
    total = job.units.images_in(units) * width
    before = job.units.images_in(done) * width
    with bar(title, progress) as tick, store.writer() as write:
        # A job without forward passes on masked images moves the bar by units alone.
        shown = UnitProgress(tick, before, total, max(1, job.calls))
        with counted(shown.passed if tick else None):
            for rows in compute(job, store, score, missing):
                write(rows)
                shown.done(job.units.images_in([rows.unit]) * width)
                if stopping is not None and stopping.add(rows):
                    break


class UnitProgress:
    """Moves a bar by units, and within a unit by the forward passes that are done."""

    def __init__(self, tick: Progress | None, before: int, total: int, passes: int) -> None:
        self.tick = tick
        self.before = before
        self.total = total
        self.each = total / passes  # images x methods per forward pass, at least
        self.inside = 0.0

    def passed(self, images: int) -> None:
        """Move the bar within a unit: some masked images have passed the model."""
        self.inside += images * self.each
        self._show(self.before + self.inside)

    def done(self, images: int) -> None:
        """Move the bar to the end of a unit."""
        self.before += images
        self.inside = 0.0
        self._show(self.before)

    def _show(self, value: float) -> None:
        if self.tick:
            self.tick(min(value, self.total), self.total)


def in_this_process(
    job: Job, store: Store, score: Score, units: Collection[Unit]
) -> Iterator[Rows]:
    """Compute units one after the other; the next one is read meanwhile."""
    for unit, following in pairwise(chain(units, [None])):
        assert unit is not None  # None is the last
        yield score(unit, following)
