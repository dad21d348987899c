"""Compute units by Ray's workers, on this machine or on a cluster. The driver writes their rows.

Ray places workers where there is room, starts and ends their processes, and reports one that died.
A worker holds the model and has one unit at a time; the unit of one that failed goes to another.
"""

# Why not Ray's own retries: a retried task gets any process, also one that holds its model on
# another GPU. A retried call of an actor stays with its actor: if its machine is lost, the call is
# repeated at the old address until no retry is left, or waits for a machine that may never come.

import time
from collections import Counter, deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sufficit.data.images import SourceImage
from sufficit.data.loader import Unit, check_sizes
from sufficit.errors import UserError, warn_user
from sufficit.runs.config import Workers
from sufficit.runs.job import Job
from sufficit.runs.ray_cluster import RayCluster, WorkerWarning
from sufficit.runs.ray_worker import Problem, UnitWorker, ship, short
from sufficit.runs.spread import Score
from sufficit.runs.store import Store
from sufficit.runs.unit_rows import Rows

TRIES = 3  # of a unit, and of starting a worker
WAKE = 1.0  # seconds between two looks at time limits
PATIENCE = 60.0  # seconds without any worker before a warning
MOST_NAMED = 5  # failed units in the error at the end


@dataclass
class Worker:
    """An actor, and what it was called for."""

    actor: Any
    place: str = "not placed yet; Ray's logs may say more"
    unit: Unit | None = None  # None while it loads the job
    since: float = 0.0


class RayWorkers:
    """Ray's workers of a run, as a context; `job` is the job on their device."""

    def __init__(self, workers: Workers, job: Job) -> None:
        self.workers = workers
        self.cluster = RayCluster(workers, job.classifier.device)
        self.job = replace(job, placed=self.cluster.device)
        self.busy: dict[Any, Worker] = {}  # by the reference of their result
        self.idle: list[Worker] = []
        self.count = 1  # of workers at most, once the cluster is known
        self.failed_starts: list[str] = []  # since one succeeded, with the reasons
        self.shipment: Any = None  # a reference to what they load
        self.warning = 0.0  # when to say that none has started

    def __enter__(self) -> "RayWorkers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in [*self.busy.values(), *self.idle]:
            self.end(worker)
        self.cluster.close(keep_logs=kind is not None)  # which may say why

    def spread(
        self, job: Job, store: Store, score: Score, units: Collection[Unit]
    ) -> Iterator[Rows]:
        """Compute units by workers, and give their rows as they are done, in any order."""
        if not units:
            return
        ray = self.cluster.connect()
        # One thread per reserved CPU: more would wait for each other.
        threads = max(1, int(self.workers.cpus))
        shipment = ship(
            score, job, device=self.cluster.device, threads=threads, sample=_sample(units)
        )
        self.shipment = ray.put(shipment)
        # Now: a cluster may have grown since the last spread.
        self.count = self.cluster.wanted()
        self.warning = time.monotonic() + PATIENCE
        tries = Tries(units, job, store)
        try:
            while self.idle:  # since the spread before, whose job they hold
                self.load(self.idle.pop())
            self.hand_out(tries)
            while tries.left:
                found = self.finished(tries)
                self.hand_out(tries)  # first: workers compute while the driver writes
                yield from found
        finally:
            for worker in self.busy.values():
                self.end(worker)
            self.busy.clear()
        tries.raise_if_failed()

    def hand_out(self, tries: "Tries") -> None:
        """Give idle workers a unit, and start workers while there are too few."""
        while self.idle and (unit := tries.next()) is not None:
            worker = self.idle.pop()
            worker.unit = unit
            worker.since = time.monotonic()
            self.busy[worker.actor.compute.remote(unit)] = worker
        wanted = min(self.count, tries.left)
        while len(self.busy) + len(self.idle) < wanted and len(self.failed_starts) < TRIES:
            kind = self.cluster.ray.remote(UnitWorker)
            kind = kind.options(num_cpus=self.workers.cpus, num_gpus=self.cluster.gpus)
            self.load(Worker(kind.remote()))
        if tries.left and not self.busy:
            raise UserError(f"no worker can start; the last error: {self.failed_starts[-1]}")

    def load(self, worker: Worker) -> None:
        """Have a worker load the job of this spread."""
        worker.unit = None
        self.busy[worker.actor.load.remote(self.shipment)] = worker

    def finished(self, tries: "Tries") -> list[Rows]:
        """Wait for a moment; the rows of units that are done."""
        ready, running = self.cluster.ray.wait([*self.busy], timeout=WAKE)
        received = [self.receive(reference, tries) for reference in ready]
        self.check_limit(running, tries)
        if time.monotonic() > self.warning:
            self.warning = time.monotonic() + PATIENCE
            room = self.cluster.room()
            _warn(f"no worker has started yet: {room}, which others may hold. Waiting.")
        return [rows for rows in received if rows is not None]

    def receive(self, reference: Any, tries: "Tries") -> Rows | None:
        """Return the rows that a worker computed; None if it has loaded the job, or failed."""
        worker = self.busy.pop(reference)
        try:
            found: Rows | str | Problem = self.cluster.ray.get(reference)
        except self.cluster.ray.exceptions.RayError as error:  # its process died, or its machine
            found = Problem(short(error))
        if isinstance(found, Problem):
            self.drop(worker, found, tries)
            return None
        self.idle.append(worker)
        if isinstance(found, Rows):
            tries.done(found)
            return found
        worker.place = found
        self.failed_starts.clear()
        self.warning = float("inf")
        return None

    def check_limit(self, running: Collection[Any], tries: "Tries") -> None:
        """Drop workers that compute a unit for too long."""
        limit = self.workers.unit_timeout
        if limit is None:
            return
        for reference in running:
            worker = self.busy[reference]
            late = worker.unit is not None and time.monotonic() - worker.since > limit
            # Its result may be there too: Ray names one at a time.
            if late and not self.cluster.ray.wait([reference], timeout=0)[0]:
                del self.busy[reference]
                # Another try would take as long.
                self.drop(worker, Problem(f"no result after {limit:g} s"), tries, is_last=True)

    def drop(
        self, worker: Worker, problem: Problem, tries: "Tries", *, is_last: bool = False
    ) -> None:
        """End a worker that failed; its unit is computed again, unless this was the last try."""
        if problem.is_final:
            raise UserError(problem.reason)
        self.end(worker)
        reason = f"{problem.reason} ({worker.place})"
        if worker.unit is not None:
            tries.failed(worker.unit, reason, is_last=is_last)
        else:
            self.failed_starts.append(reason)
            _warn(f"a worker cannot start: {reason}")

    def end(self, worker: Worker) -> None:
        """End the process of a worker."""
        with suppress(Exception):  # it may be dead already
            self.cluster.ray.kill(worker.actor)


class Tries:
    """Units, each to be computed until it has rows or has failed too often."""

    def __init__(self, units: Collection[Unit], job: Job, store: Store) -> None:
        self.total = self.left = len(units)
        self.job = job
        self.store = store
        self._new = iter(units)  # read from the list of images when their turn comes
        self._again = deque[Unit]()
        self._tries = Counter[int]()
        self._failed: dict[str, str] = {}  # unit, in words: reason
        self._sizes: dict[tuple[int, ...], str] = {}  # an image of each size

    def next(self) -> Unit | None:
        """Return a unit that no worker has; one that failed comes after all others."""
        unit = next(self._new, None)
        return self._again.popleft() if unit is None and self._again else unit

    def done(self, rows: Rows) -> None:
        """Count a unit; raise if images must have one size and those of two workers differ."""
        self.left -= 1
        if self.job.reader.one_size and len(rows):
            self._sizes.setdefault(rows.shape, rows.names[0])
            check_sizes(self._sizes)

    def failed(self, unit: Unit, reason: str, *, is_last: bool) -> None:
        """Have a unit computed again, unless this was the last try."""
        called = f"unit {unit.number} ({len(unit)} images, {unit.names[0]} to {unit.names[-1]})"
        self._tries[unit.number] += 1
        if not is_last and self._tries[unit.number] < TRIES:
            self._again.append(unit)
            _warn(f"a worker failed in {called}, try {self._tries[unit.number]}: {reason}")
            return
        self._failed[called] = reason
        self.left -= 1
        self.store.write_failure(unit.number, unit.names, reason)
        _warn(f"{called} failed: {reason}")
        # Whatever fails in each of the first units fails in all.
        if len(self._failed) == TRIES and self.left == self.total - TRIES:
            self.left = 0  # none had rows: the others would fail as well

    def raise_if_failed(self) -> None:
        """Raise an error that names the units that failed."""
        if not self._failed:
            return
        named = [f"{called}: {reason}" for called, reason in self._failed.items()]
        more = f"; and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        raise UserError(
            f"{len(named)} of {self.total} units failed: {'; '.join(named[:MOST_NAMED])}{more}."
            " Units that are done are kept: run the same command again to retry the others"
        )


def _sample(units: Collection[Unit]) -> SourceImage | None:
    """Return an image that can be read here."""
    images = (entry.image for unit in units for entry in unit.entries)
    return next((image for image in images if image.is_there()), None)


def _warn(text: str) -> None:
    warn_user(text, WorkerWarning)
