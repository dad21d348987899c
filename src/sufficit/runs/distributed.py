"""Units of a run computed by Ray actors, on this machine or on a cluster.

The driver hands out unit numbers. An actor holds the model, computes a unit and writes its files. A
unit is done when its file is there, so that it does not matter who computes it, or how often.
"""

import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from sufficit.data.loader import check_sizes
from sufficit.errors import UserError, warn_user
from sufficit.runs.actors import DRAW_DONORS, Outcome, Place, UnitActor, end_process, ship, short
from sufficit.runs.config import Workers
from sufficit.runs.engine import Worker
from sufficit.runs.store import DONORS

TRIES = 3  # of a unit, and of starting a worker
MOST_TRIES = 10  # of a unit whose machines are lost
LONGEST_PAUSE = 60.0  # seconds before a worker that cannot start is tried again
WAKE = 1.0  # seconds between two looks at timeouts
GROW = 5.0  # seconds between two looks at the size of the cluster
PATIENCE = 60.0  # seconds without any worker before a warning
ANSWER = 10.0  # seconds for a cluster to accept a connection
LONGEST_FOLDER = 20  # characters
LOOPBACK = "127.0.0.1"


class WorkerWarning(UserWarning):
    """A worker failed and is replaced, or a cluster is open to others."""


class RayCluster:
    """The connection to Ray, made when the first unit is computed and shut down at the end."""

    def __init__(self, workers: Workers, device: torch.device) -> None:
        self.workers, self.ray = workers, _import_ray(here=workers.address is None)
        share = torch.cuda.device_count() / (workers.count or 1)
        most = 1.0 if workers.address else min(1.0, share)
        usual = most if device.type == "cuda" else 0.0
        self.gpus = usual if workers.gpus is None else workers.gpus
        self.device = "cuda:0" if self.gpus else "cpu" if device.type == "cuda" else str(device)
        self.connected = False
        self.temp: Path | None = None

    def __enter__(self) -> "RayCluster":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.connected:
            self.ray.shutdown()
        if self.temp is not None and kind is None:  # else the logs may say why
            shutil.rmtree(self.temp, ignore_errors=True)

    def compute(
        self, worker: Worker, missing: Sequence[int], advance: Callable[[int, str], None]
    ) -> None:
        """Compute the missing units by actors, each with a copy of the worker."""
        self.connect()
        worker.store.clear_failures()
        # One thread per reserved CPU: more would wait for each other.
        threads = max(1, int(self.workers.cpus))
        shipment = self.ray.put(ship(worker, device=self.device, threads=threads))
        dispatch = Dispatch(self, worker, shipment, advance)
        try:
            if worker.job.pool and not worker.store.has(DONORS, 0):
                dispatch.finish([DRAW_DONORS])
            dispatch.finish(missing)
        finally:
            dispatch.stop()

    def connect(self) -> None:
        """Start Ray or join its cluster, unless this process has done so."""
        if not self.ray.is_initialized():
            self._start_here() if self.workers.address is None else self._join()
            self.connected = True

    def _start_here(self) -> None:
        """Start Ray for this run alone: on the loopback, with a token that only this run has."""
        count, found = self.workers.count or 1, torch.cuda.device_count()
        if self.gpus * count > found:
            raise UserError(
                f"{count} workers with {self.gpus:g} GPUs each need {self.gpus * count:g} GPUs,"
                f" this machine has {found}: lower --workers or --gpus-per-worker"
            )
        # Without a mode Ray turns tokens on by itself; one that is set after its import has no
        # effect. The token is in the environment, because Ray's file for it is readable by others.
        os.environ.pop("RAY_AUTH_MODE", None)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Readable by this user alone; Ray's default, /tmp/ray, is open to everyone.
        # Short, because the path of a socket below it must not exceed 107 bytes.
        folder = "/tmp" if len(tempfile.gettempdir()) > LONGEST_FOLDER else None
        self.temp = Path(tempfile.mkdtemp(prefix="sufficit-ray-", dir=folder))
        self.ray.init(
            address="local",
            num_cpus=max(1, round(count * self.workers.cpus)),
            num_gpus=found if self.gpus else 0,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(self.temp),
        )
        if (address := self.ray.nodes()[0]["NodeManagerAddress"]) != LOOPBACK:
            _warn(
                f"Ray listens at {address} instead of {LOOPBACK}, because it was imported before"
                " this run started; a token protects it. Import sufficit.runs.distributed first."
            )

    def _join(self) -> None:
        address = str(self.workers.address)
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            if host:  # Ray itself waits for minutes
                socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()
            self.ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError, ImportError, self.ray.exceptions.RayError) as e:
            raise UserError(
                f"no Ray cluster answers at --address {address} ({short(e)}): start one with `ray"
                " start --head`, or give --workers alone to start Ray on this machine"
            ) from e
        if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":  # Ray sets it for its own file
            _warn(
                f"the Ray cluster at {address} takes no token: anyone who reaches its ports can run"
                " code as its user and read its data. Start it with RAY_AUTH_MODE=token."
            )

    def wanted(self) -> int:
        """How many workers to have: as asked, or as many as the cluster has room for now."""
        if self.workers.count is not None:
            return self.workers.count
        has = self.ray.cluster_resources()
        room = [has.get("CPU", 0) / self.workers.cpus]
        room += [has.get("GPU", 0) / self.gpus] if self.gpus else []
        return max(1, int(min(room)))


@dataclass
class Slot:
    """A place for one worker: the actor in it now, and what it is doing."""

    number: int
    actor: Any = None
    ref: Any = None  # of what the actor is doing; None: it waits for a unit
    place: Any = None  # of its node and log, known once it is placed
    unit: int | None = None  # None: it loads the model
    following: int | None = None  # the unit that it reads ahead
    since: float = 0.0
    is_loaded: bool = False
    failed_starts: int = 0  # in a row
    pause_until: float = 0.0


@dataclass
class Dispatch:
    """Hands units to actors, replaces actors that fail, and counts."""

    cluster: RayCluster
    worker: Worker
    shipment: Any
    advance: Callable[[int, str], None]
    slots: list[Slot] = field(default_factory=list)
    left: dict[int, None] = field(default_factory=dict)  # units in order
    tries: dict[int, list[bool]] = field(default_factory=dict)  # True: its own fault, as it seems
    failed: dict[int, str] = field(default_factory=dict)
    sizes: dict[tuple[int, ...], str] = field(default_factory=dict)
    images: int = 0  # that these workers have done
    started: float = 0.0  # when the first worker had the model
    looked: float = 0.0

    def finish(self, units: Sequence[int]) -> None:
        """Return when every unit is done; raise at the end if some failed three times."""
        self.left = dict.fromkeys(units)
        limit, done, asked = self.cluster.workers.unit_timeout, self.images, time.monotonic()
        while self.left or any(slot.unit is not None for slot in self.slots):
            self._grow()
            for slot in self.slots:
                if slot.actor is None and time.monotonic() > slot.pause_until:
                    self._start(slot)
                if slot.is_loaded and slot.ref is None and self.left:
                    self._assign(slot)
            refs, ready = [slot.ref for slot in self.slots if slot.ref is not None], []
            if refs:
                ready = self.cluster.ray.wait(refs, timeout=WAKE)[0]
            else:
                time.sleep(WAKE)
            for slot in list(self.slots):
                if slot.ref is not None and slot.ref in ready:
                    self._take(slot)
                elif limit and slot.unit is not None and time.monotonic() - slot.since > limit:
                    reason = f"no result after {limit:g} s (--unit-timeout)"
                    self._replace(slot, reason, hangs=True)
            if not self.started and time.monotonic() - asked > PATIENCE:
                asked, has = time.monotonic(), self.cluster.ray.cluster_resources()
                _warn(
                    f"no worker has started yet: each needs {self.cluster.workers.cpus:g} CPUs and"
                    f" {self.cluster.gpus:g} GPUs, the cluster has {has.get('CPU', 0):g} CPUs and"
                    f" {has.get('GPU', 0):g} GPUs, which others may hold. Still waiting."
                )
            if len(self.failed) >= min(TRIES, len(units)) and self.images == done:
                break  # the others would fail as well
        if self.failed:
            named = [f"{self._called(unit)}: {reason}" for unit, reason in self.failed.items()]
            more = f"; and {len(named) - 5} more" if len(named) > 5 else ""
            raise UserError(
                f"{len(named)} of {len(units)} units failed {TRIES} times:"
                f" {'; '.join(named[:5])}{more}. Units that are done are kept: run the same command"
                " again to retry the others"
            )

    def stop(self) -> None:
        """Kill the actors."""
        for slot in self.slots:
            self._kill(slot)

    def _grow(self) -> None:
        """Have as many workers as are wanted and useful, also when nodes join later."""
        if not self.looked or time.monotonic() - self.looked >= GROW:
            self.looked = time.monotonic()
            useful = len(self.left) + sum(slot.unit is not None for slot in self.slots)
            most = min(self.cluster.wanted(), useful)
            self.slots += [Slot(number + 1) for number in range(len(self.slots), most)]

    def _start(self, slot: Slot) -> None:
        # Not Ray's own restarts and retries: those have no limit per unit.
        kind = self.cluster.ray.remote(UnitActor).options(
            num_cpus=self.cluster.workers.cpus,
            num_gpus=self.cluster.gpus,
            max_restarts=0,
            max_task_retries=0,
        )
        slot.actor = kind.remote(self.shipment)
        slot.place, slot.ref = slot.actor.place.remote(), slot.actor.load.remote()
        slot.unit, slot.following, slot.is_loaded = None, None, False

    def _assign(self, slot: Slot) -> None:
        """Give a worker the unit that it read ahead, else one that nobody reads."""
        read = {other.following for other in self.slots}
        free = [n for n, _ in zip(self.left, range(len(read) + 2), strict=False) if n not in read]
        number = slot.following
        if number is None or number not in self.left:
            number = next(iter([*free, *self.left]))
        del self.left[number]
        slot.unit = number
        slot.following = next((n for n in free if n != number), None)
        slot.ref, slot.since = slot.actor.compute.remote(number, slot.following), time.monotonic()

    def _take(self, slot: Slot) -> None:
        """Note what an actor has done."""
        try:
            outcome: Outcome = self.cluster.ray.get(slot.ref)
        except self.cluster.ray.exceptions.RayError as error:
            self._replace(slot, short(error))
            return
        if outcome.error and outcome.is_final:
            raise UserError(outcome.error)
        if outcome.error:
            self._replace(slot, outcome.error)
            return
        self.sizes |= outcome.sizes
        check_sizes(self.sizes)
        if slot.unit is None:
            slot.is_loaded, slot.failed_starts = True, 0
            self.started = self.started or time.monotonic()
        elif slot.unit != DRAW_DONORS:
            done = self.worker.job.units.images_in([slot.unit])
            self.images += done
            rate = self.images / max(time.monotonic() - self.started, 1e-9)
            loaded = sum(other.is_loaded for other in self.slots)
            self.advance(done, f"{rate:.1f} images/s, {loaded} workers")
        slot.ref = slot.unit = None

    def _replace(self, slot: Slot, reason: str, *, hangs: bool = False) -> None:
        """Have another worker, and give its unit back unless that failed too often."""
        ray, place = self.cluster.ray, Place()
        with suppress(Exception):  # it may have died before it could say
            place = ray.get(slot.place, timeout=WAKE)
        self._kill(slot)
        if hangs and place.node:  # one that is frozen does not hear `ray.kill`
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            there = NodeAffinitySchedulingStrategy(place.node, soft=False)
            task = ray.remote(end_process).options(num_cpus=0, scheduling_strategy=there)
            task.remote(place.process)
        unit, slot.actor, slot.ref, slot.unit, slot.is_loaded = slot.unit, None, None, None, False
        if unit is None:
            slot.failed_starts += 1
            slot.pause_until = time.monotonic() + min(2.0**slot.failed_starts, LONGEST_PAUSE)
            what = f"cannot start, try {slot.failed_starts}"
        else:
            alive = {one["NodeID"] for one in ray.nodes() if one["Alive"]}
            tries = self.tries.setdefault(unit, [])
            tries.append(place.node in alive and not reason.startswith("ActorUnavailableError"))
            what = f"failed in {self._called(unit)}, try {sum(tries)} of {TRIES}"
            if not tries[-1]:
                what = f"lost its machine in {self._called(unit)}"
            if sum(tries) < TRIES and len(tries) < MOST_TRIES:
                self.left[unit] = None
            else:
                self.failed[unit] = f"{reason} ({place.text})"
                worker, drawing = self.worker, unit == DRAW_DONORS
                names = [] if drawing else worker.job.units[unit].names
                worker.store.write_failure(worker.stage, unit, names, self.failed[unit])
        _warn(f"worker {slot.number} {what}: {reason} ({place.text})")
        if all(other.failed_starts >= TRIES for other in self.slots):
            raise UserError(
                f"no worker can start; the last error: {reason}. It ran as {place.text}"
            )

    def _kill(self, slot: Slot) -> None:
        with suppress(Exception):  # it may be dead already
            self.cluster.ray.kill(slot.actor, no_restart=True)

    def _called(self, number: int) -> str:
        if number == DRAW_DONORS:
            return "the donors for leakage"
        names = self.worker.job.units[number].names
        return f"unit {number} ({len(names)} images, {names[0]} to {names[-1]})"


def _import_ray(*, here: bool) -> ModuleType:
    """Ray without usage statistics; what it starts here listens on the loopback alone."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keep CUDA_VISIBLE_DEVICES
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # else it prints deaths to stdout
    if here:
        # Ray replaces a loopback address given to `init` by the machine's own, but for this.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UserError(
            f"--workers and --address need Ray ({error}): pip install '.[ray]'"
        ) from error
    found: ModuleType = ray
    return found


def _warn(text: str) -> None:
    warn_user(text, WorkerWarning)
