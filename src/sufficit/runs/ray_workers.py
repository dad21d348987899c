"""Compute units by Ray's workers, on this machine or on a cluster. The driver writes their rows.

Ray places, starts and ends workers. What is here hands them units, and tries a unit again elsewhere
if its worker fails.
"""

import time
from collections import Counter, deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from sufficit.data.images import ImageTensor, SourceImage
from sufficit.data.loader import Unit, check_sizes
from sufficit.errors import UserError, warn_user
from sufficit.runs.config import Workers
from sufficit.runs.job import Job
from sufficit.runs.ray_actor import Place, Problem, Shipment, UnitActor, ship, short
from sufficit.runs.ray_cluster import RayCluster, WorkerWarning
from sufficit.runs.spread import Score
from sufficit.runs.store import Store
from sufficit.runs.unit_rows import Rows

TRIES = 3  # of a unit, and of starting a worker
WAKE = 1.0  # seconds between two looks at time limits
PATIENCE = 60.0  # seconds without any worker before a warning
MOST_NAMED = 5  # failed units in the error at the end


class RayWorkers:
    """Ray's workers of a run, as a context; `job` is the job on their device."""

    def __init__(self, workers: Workers, job: Job) -> None:
        self.workers = workers
        self.cluster = RayCluster(workers, job.classifier.device)
        self.job = replace(job, placed=self.cluster.device)
        self.idle: list[Any] = []  # actors that wait for more work

    def __enter__(self) -> "RayWorkers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for actor in self.idle:
            self.end(actor)
        self.cluster.close(keep_logs=kind is not None)  # which may say why

    def spread(
        self, job: Job, store: Store, score: Score, units: Collection[Unit]
    ) -> Iterator[Rows]:
        """Compute units by workers, and give their rows as they are done, in any order."""
        if not units:
            return
        self.cluster.connect()
        # One thread per reserved CPU: more would wait for each other.
        threads = max(1, int(self.workers.cpus))
        shipment = ship(
            score, job, device=self.cluster.device, threads=threads, sample=_sample(units)
        )
        yield from Dispatch(self, job, store, self.cluster.ray.put(shipment), units).rows()

    def actor(self) -> Any:
        """An actor that waits for work, or a new one, which Ray places where there is room."""
        if self.idle:
            return self.idle.pop()
        kind = self.cluster.ray.remote(UnitActor)
        return kind.options(num_cpus=self.workers.cpus, num_gpus=self.cluster.gpus).remote()

    def end(self, actor: Any) -> None:
        """End the process of an actor."""
        with suppress(Exception):  # it may be dead already
            self.cluster.ray.kill(actor)


@dataclass
class Worker:
    """An actor, and what it is doing."""

    actor: Any
    place: Place | None = None  # None while it loads the job
    unit: Unit | None = None
    following: Unit | None = None  # that it reads ahead
    since: float = field(default_factory=time.monotonic)


class Dispatch:
    """Hands units to workers until each unit has rows or has failed too often."""

    # Not by Ray's own restarts and retries: a restarted actor keeps its unit, and waits with it for
    # a machine that may never come back, while others are idle.

    def __init__(
        self,
        workers: RayWorkers,
        job: Job,
        store: Store,
        shipment: Shipment,
        units: Collection[Unit],
    ) -> None:
        self.workers, self.job, self.store, self.shipment = workers, job, store, shipment
        self.ray = workers.cluster.ray
        self.total = len(units)
        self.further = iter(units)  # read from the list of images when their turn comes
        self.again = deque[Unit]()  # whose workers failed; they come last, and so go to others
        self.next: Unit | None = None
        self.busy: dict[Any, Worker] = {}  # by the reference of their result
        self.resting: list[Worker] = []
        self.tries = Counter[int]()
        self.failed: dict[str, str] = {}  # unit, in words: reason
        self.failed_starts = 0  # one after the other
        self.has_started = False  # any worker
        self.sizes: dict[tuple[int, ...], str] = {}  # an image of each size

    def rows(self) -> Iterator[Rows]:
        """The rows of all units; raise at the end if some failed."""
        done, warned = 0, time.monotonic()
        try:
            for _ in range(min(self.workers.cluster.wanted(), self.total)):
                self.start()
            while self.busy:
                for worker, found in self.finished():
                    if isinstance(found, Rows):
                        self.check_size(found)
                    self.go_on(worker, found)
                    if isinstance(found, Rows):
                        done += 1
                        yield found
                if not self.has_started and time.monotonic() - warned > PATIENCE:
                    warned = time.monotonic()
                    room = self.workers.cluster.room()
                    _warn(f"no worker has started yet: {room}, which others may hold. Waiting.")
                if not done and len(self.failed) >= min(TRIES, self.total):
                    break  # the others would fail as well
        finally:
            for worker in self.busy.values():
                self.workers.end(worker.actor)
            self.workers.idle += [worker.actor for worker in self.resting]
        if self.failed:
            raise self.failure()

    def start(self) -> None:
        """Let a worker load the job."""
        worker = Worker(self.workers.actor())
        self.busy[worker.actor.load.remote(self.shipment)] = worker

    @property
    def is_waiting(self) -> bool:
        """Whether there is a unit that nobody has."""
        if self.next is None:
            self.next = next(self.further, None)
        if self.next is None and self.again:
            self.next = self.again.popleft()
        return self.next is not None

    def next_unit(self) -> Unit | None:
        """A unit that nobody has; None if there is none."""
        unit = self.next if self.is_waiting else None
        self.next = None
        return unit

    def hand_out(self, worker: Worker) -> None:
        """Give a worker the unit that it read ahead, else another one, else let it rest."""
        worker.unit = worker.following or self.next_unit() or self.taken()
        worker.following = None
        if worker.unit is None:
            self.resting.append(worker)
            return
        worker.following = self.next_unit()
        worker.since = time.monotonic()
        self.busy[worker.actor.compute.remote(worker.unit, worker.following)] = worker

    def taken(self) -> Unit | None:
        """A unit that a busy worker has read ahead: at the end, it would wait for that one."""
        for other in self.busy.values():
            if other.following is not None:
                unit, other.following = other.following, None
                return unit
        return None

    def finished(self) -> Iterator[tuple[Worker, Rows | Place | Problem]]:
        """Workers that are done with something, that have died or that take too long."""
        ready, running = self.ray.wait([*self.busy], timeout=WAKE)
        for reference in ready:
            try:
                found = self.ray.get(reference)
            except self.ray.exceptions.RayError as error:
                found = Problem(short(error))
            yield self.busy.pop(reference), found
        limit = self.workers.workers.unit_timeout
        if limit is None:
            return
        for reference in running:
            worker = self.busy[reference]
            if worker.unit is not None and time.monotonic() - worker.since > limit:
                self.tries[worker.unit.number] = TRIES  # another try would take as long
                yield self.busy.pop(reference), Problem(f"no result after {limit:g} s")

    def go_on(self, worker: Worker, found: Rows | Place | Problem) -> None:
        """Give a worker its next unit, or replace one that failed."""
        if isinstance(found, Problem):
            if found.is_final:
                raise UserError(found.reason)
            self.replace(worker, found.reason)
            return
        if isinstance(found, Place):
            worker.place = found
            self.has_started = True
            self.failed_starts = 0
        self.hand_out(worker)

    def replace(self, worker: Worker, reason: str) -> None:
        """End a worker that failed, and give its unit to another unless it failed too often."""
        self.workers.end(worker.actor)
        place = worker.place or Place()
        reason = f"{reason} ({place.text})"
        if worker.following is not None:
            self.again.append(worker.following)
        if worker.unit is None:
            self.failed_starts += 1
            _warn(f"a worker cannot start: {reason}")
        else:
            unit, called = worker.unit, _called(worker.unit)
            self.tries[unit.number] += 1
            if self.tries[unit.number] < TRIES:
                self.again.append(unit)
                _warn(f"a worker failed in {called}, try {self.tries[unit.number]}: {reason}")
            else:
                self.failed[called] = reason
                self.store.write_failure(unit.number, unit.names, reason)
                _warn(f"{called} failed: {reason}")
        if self.is_waiting and self.resting:
            self.hand_out(self.resting.pop())
        elif self.is_waiting and self.failed_starts < TRIES:
            self.start()
        elif self.is_waiting and not self.busy:
            raise UserError(f"no worker can start; the last error: {reason}")

    def check_size(self, rows: Rows) -> None:
        """Raise where images must have one size and those of two workers have not."""
        if len(rows) and self.job.reader.one_size:
            self.sizes.setdefault(rows.shape, rows.names[0])
            check_sizes(self.sizes)

    def failure(self) -> UserError:
        """The error that names the units that failed."""
        named = [f"{called}: {reason}" for called, reason in self.failed.items()]
        more = f"; and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        return UserError(
            f"{len(named)} of {self.total} units failed: {'; '.join(named[:MOST_NAMED])}{more}."
            " Units that are done are kept: run the same command again to retry the others"
        )


def _sample(units: Collection[Unit]) -> SourceImage | None:
    """An image that can be read here; None if the images are in memory."""
    first = next(iter(units))
    if isinstance(first.entries[0].image, ImageTensor):
        return None
    images = (entry.image for unit in units for entry in unit.entries)
    return next((image for image in images if image.is_there()), None)


def _called(unit: Unit) -> str:
    return f"unit {unit.number} ({len(unit)} images, {unit.names[0]} to {unit.names[-1]})"


def _warn(text: str) -> None:
    warn_user(text, WorkerWarning)
