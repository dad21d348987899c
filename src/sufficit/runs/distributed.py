"""Units of a run computed by Ray actors, on this machine or on a cluster.

The driver hands out unit numbers. An actor holds the model, computes a unit and writes its files; a
unit is done when its file is there, so that whoever computes it, and how often, does not matter.
"""

import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from sufficit.data.loader import Unit, check_sizes
from sufficit.errors import UserError
from sufficit.runs.config import Workers
from sufficit.runs.engine import Sample, Worker, quiet
from sufficit.runs.job import Job
from sufficit.runs.store import DONORS, KEY, UNITS, Store

TRIES = 3  # of a unit, and of starting a worker
DRAW_DONORS = -1  # the number of the task that comes before the units
WAKE = 1.0  # seconds between two looks at timeouts
GROW = 5.0  # seconds between two looks at the size of the cluster
PATIENCE = 60.0  # seconds without any worker before a warning
ANSWER = 10.0  # seconds for a cluster to accept a connection


class WorkerWarning(UserWarning):
    """A worker failed and is replaced, or a cluster is open to others."""


@dataclass(frozen=True)
class Outcome:
    """What an actor reports of a task; an error as text, because not every exception pickles."""

    error: str = ""
    is_final: bool = False  # another try cannot help
    sizes: Mapping[tuple[int, ...], str] = field(default_factory=dict)  # one image of each size
    place: str = ""  # process, machine and log
    node: str = ""


class UnitActor:
    """A worker of the engine in a process of its own."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        self.ahead: tuple[int, Future[list[Sample]]] | None = None
        self.pool = ThreadPoolExecutor(1)

    def start(self) -> Outcome:
        """Load the job; the outcome says where this worker runs."""
        import ray

        log = os.path.realpath("/proc/self/fd/2")
        place = f"process {os.getpid()} on {socket.gethostname()}, log {log}"
        node = ray.get_runtime_context().get_node_id()
        try:
            self._load()
        except UserError as error:
            return Outcome(str(error), is_final=True, place=place, node=node)
        except Exception as error:
            traceback.print_exc()
            return Outcome(_text(error), place=place, node=node)
        return Outcome(place=place, node=node)

    def _load(self) -> None:
        from ray import cloudpickle

        facts, rest = cloudpickle.loads(self.packed)
        host = socket.gethostname()
        for name, wanted in facts["versions"].items():
            if (found := _versions()[name]) != wanted:
                raise UserError(
                    f"{host} has {name} {found}, the driver {wanted}: install the same version"
                )
        with suppress(OSError):
            os.chdir(facts["cwd"])
        key = Path(facts["folder"]) / UNITS / KEY
        if not key.exists():
            raise UserError(f"{host} cannot see {key}: give --out a folder that all machines share")
        torch.set_num_threads(facts["threads"])
        torch.set_float32_matmul_precision(facts["precision"])
        torch.backends.cudnn.allow_tf32 = facts["tf32"]
        job, kind, alpha_min, self.stage = cloudpickle.loads(rest)
        self.packed = b""
        probe = job.entries[facts["probe"]].image
        try:
            probe.bytes()
        except OSError as error:
            raise UserError(
                f"{host} cannot see the image {probe.name} ({error.strerror}): give --data a folder"
                " that all machines share"
            ) from error
        job.classifier.to(facts["device"])
        self.worker: Worker = kind(job, Store(Path(facts["folder"])), alpha_min)

    def compute(self, number: int, following: int | None) -> Outcome:
        """Compute a unit and write its files; read the following one meanwhile."""
        try:
            with quiet():
                self.worker.draw_donors()
                if number != DRAW_DONORS and not self.worker.store.has(self.stage, number):
                    self._compute(self.worker.job.units[number], following)
        except UserError as error:
            return Outcome(str(error), is_final=True)
        except Exception as error:
            traceback.print_exc()
            return Outcome(_text(error))
        return Outcome(sizes=dict(self.worker.loader.sizes))

    def _compute(self, unit: Unit, following: int | None) -> None:
        items: Sequence[Sample] = ()
        if self.worker.needs_images(self.stage):
            if self.ahead is not None and self.ahead[0] == unit.number:
                items = self.ahead[1].result()
            else:
                items = self.worker.loader.items(unit.entries)
            self.ahead = None
            if following is not None:
                entries = self.worker.job.units[following].entries
                read = self.pool.submit(self.worker.loader.items, entries)
                self.ahead = following, read
        self.worker.work(self.stage, unit, items)


@dataclass
class Slot:
    """A place for one worker: the actor in it now, and what it is doing."""

    number: int
    actor: Any
    ref: Any  # of what the actor is doing; None: it waits for a unit
    outcome: Outcome | None = None  # of its start
    task: int | None = None
    following: int | None = None  # the unit that it reads ahead
    since: float = 0.0
    failed_starts: int = 0


class RayCluster:
    """The connection to Ray, made when the first unit is computed; shut down at the end."""

    def __init__(self, workers: Workers, device: torch.device) -> None:
        self.workers, self.ray = workers, _import_ray()
        most = (
            1.0 if workers.address else min(1.0, torch.cuda.device_count() / (workers.count or 1))
        )
        usual = most if device.type == "cuda" else 0.0
        self.gpus = usual if workers.gpus is None else workers.gpus
        self.device = "cuda:0" if self.gpus else "cpu" if device.type == "cuda" else str(device)
        self.started = False
        self.temp: Path | None = None

    def __enter__(self) -> "RayCluster":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.started:
            self.ray.shutdown()
        if self.temp is not None and kind is None:  # else the logs may tell why
            shutil.rmtree(self.temp, ignore_errors=True)

    def compute(
        self,
        job: Job,
        store: Store,
        stage: str,
        missing: Sequence[Unit],
        tick: Callable[[int, str], None] | None,
        alpha_min: float | None,
        kind: type[Worker],
    ) -> None:
        """Compute the missing units of a stage by actors."""
        if not self.started and not self.ray.is_initialized():
            self._connect()
        store.clear_failures()
        packed = self.ray.put(_pack(job, store, stage, alpha_min, kind, self))
        dispatch = Dispatch(self, job, store, stage, packed, tick)
        try:
            if job.pool and not store.has(DONORS, 0):
                dispatch.finish({DRAW_DONORS: Unit(DRAW_DONORS, ())})
            dispatch.finish({unit.number: unit for unit in missing})
        finally:
            dispatch.stop()

    def _connect(self) -> None:
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self.workers.address is None:
            self._start_here(common)
        else:
            self._join(self.workers.address, common)
        self.started = True

    def _start_here(self, common: Mapping[str, Any]) -> None:
        """Start Ray for this run alone: on the loopback, with a token that only we know."""
        count, found = self.workers.count or 1, torch.cuda.device_count()
        if self.gpus * count > found:
            raise UserError(
                f"{count} workers with {self.gpus:g} GPUs each need {self.gpus * count:g} GPUs,"
                f" this machine has {found}: lower --workers or --gpus-per-worker"
            )
        # Without a mode Ray turns tokens on for a cluster of its own, also in its own settings,
        # which a mode set after its import does not reach. Its file for the token is readable by
        # others, so the token goes through the environment.
        os.environ.pop("RAY_AUTH_MODE", None)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Private to the user: Ray's own default, /tmp/ray, is open to everyone on the machine.
        self.temp = Path(tempfile.mkdtemp(prefix="sufficit-ray-"))
        self.ray.init(
            **common,
            address="local",
            num_cpus=max(1, round(count * self.workers.cpus)),
            num_gpus=found if self.gpus else 0,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(self.temp),
        )

    def _join(self, address: str, common: Mapping[str, Any]) -> None:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            if host:
                socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()
            self.ray.init(**common, address=address)
        except (OSError, ValueError, RuntimeError, ImportError, self.ray.exceptions.RayError) as e:
            reason = str(e).split("\n")[0]
            raise UserError(
                f"no Ray cluster answers at --address {address} ({reason}): start one with `ray"
                " start --head`, or give --workers alone to start Ray on this machine"
            ) from e
        if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
            warnings.warn(
                f"the Ray cluster at {address} takes no token: anyone who reaches its ports can run"
                " code as its user and read your data. Start it with RAY_AUTH_MODE=token.",
                WorkerWarning,
                stacklevel=2,
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
class Dispatch:
    """Hands units to actors, replaces actors that fail, and counts."""

    cluster: RayCluster
    job: Job
    store: Store
    stage: str
    packed: Any
    tick: Callable[[int, str], None] | None
    slots: list[Slot] = field(default_factory=list)
    tries: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    sizes: dict[tuple[int, ...], str] = field(default_factory=dict)
    images: int = 0  # done by these workers
    started: float = 0.0  # when the first worker was ready
    looked: float = 0.0

    def finish(self, tasks: Mapping[int, Unit]) -> None:
        """Return when every task is done; raise when some failed three times."""
        left, count, asked = dict(tasks), len(tasks), time.monotonic()
        while left or any(slot.task is not None for slot in self.slots):
            self._grow(len(left))
            for slot in self.slots:
                if slot.ref is None and left:
                    self._assign(slot, left)
            refs = [slot.ref for slot in self.slots if slot.ref is not None]
            ready, _ = self.cluster.ray.wait(refs, timeout=WAKE)
            for slot in [slot for slot in self.slots if slot.ref in ready]:
                self._take(slot, tasks, left)
            self._stop_slow(tasks, left)
            if not self.started and time.monotonic() - asked > PATIENCE:
                asked = time.monotonic()
                self._warn_waiting()
            if len(self.failed) >= min(TRIES, count) and not self.images:
                break  # all of them would fail
        if self.failed:
            raise self._error(tasks, count)

    def stop(self) -> None:
        """Kill the actors."""
        for slot in self.slots:
            self._kill(slot)

    def _grow(self, left: int) -> None:
        """Have as many workers as are wanted and useful, also when nodes join later."""
        if self.looked and time.monotonic() - self.looked < GROW:
            return
        self.looked = time.monotonic()
        busy = sum(slot.task is not None for slot in self.slots)
        for number in range(len(self.slots), min(self.cluster.wanted(), left + busy)):
            self.slots.append(Slot(number + 1, None, None))
            self._start(self.slots[-1])

    def _start(self, slot: Slot) -> None:
        cluster = self.cluster
        actor = cluster.ray.remote(UnitActor).options(
            num_cpus=cluster.workers.cpus,
            num_gpus=cluster.gpus,
            # Not Ray's own restarts and retries: they have no limit per unit, and cannot be told
            # apart from a worker that hangs.
            max_restarts=0,
            max_task_retries=0,
        )
        slot.actor = actor.remote(self.packed)
        slot.task, slot.following, slot.outcome = None, None, None
        slot.ref, slot.since = slot.actor.start.remote(), time.monotonic()

    def _assign(self, slot: Slot, left: dict[int, Unit]) -> None:
        """Give a worker the unit that it read ahead, else one that nobody reads."""
        read = {other.following for other in self.slots}
        free = (number for number in left if number not in read)
        chosen = slot.following
        if chosen is None or chosen not in left:
            chosen = next(free, next(iter(left)))
        del left[chosen]
        following = next((number for number in left if number not in read), None)
        slot.task, slot.following, slot.since = chosen, following, time.monotonic()
        slot.ref = slot.actor.compute.remote(chosen, following)

    def _take(self, slot: Slot, tasks: Mapping[int, Unit], left: dict[int, Unit]) -> None:
        try:
            outcome: Outcome = self.cluster.ray.get(slot.ref)
        except self.cluster.ray.exceptions.RayError as error:
            self._replace(slot, _text(error), tasks, left)
            return
        if slot.task is None:
            slot.outcome = outcome
        if outcome.error and outcome.is_final:
            raise UserError(outcome.error)
        if outcome.error:
            self._replace(slot, outcome.error, tasks, left)
            return
        self.sizes |= outcome.sizes
        check_sizes(self.sizes)
        if slot.task is None:
            slot.failed_starts = 0
            self.started = self.started or time.monotonic()
        else:
            self._count(tasks[slot.task])
        slot.ref = slot.task = None

    def _count(self, unit: Unit) -> None:
        self.images += len(unit)
        if self.tick and unit.entries:
            rate = self.images / max(time.monotonic() - self.started, 1e-9)
            at_work = sum(slot.outcome is not None for slot in self.slots)
            self.tick(len(unit), f"{rate:.1f} images/s, {at_work} workers")

    def _stop_slow(self, tasks: Mapping[int, Unit], left: dict[int, Unit]) -> None:
        limit = self.cluster.workers.unit_timeout
        for slot in self.slots:
            if limit and slot.task is not None and time.monotonic() - slot.since > limit:
                self._replace(slot, f"no result after {limit:g} s (--unit-timeout)", tasks, left)

    def _replace(
        self, slot: Slot, reason: str, tasks: Mapping[int, Unit], left: dict[int, Unit]
    ) -> None:
        """Start another worker, and give its unit back unless that failed too often."""
        self._kill(slot)
        what = "could not start"
        if slot.task is None:
            slot.failed_starts += 1
        else:
            number, unit = slot.task, tasks[slot.task]
            if self._has_node(slot):  # else the unit is not to blame
                self.tries[number] = self.tries.get(number, 0) + 1
            what = f"failed on {_called(unit)}, try {self.tries.get(number, 0)} of {TRIES}"
            if self.tries.get(number, 0) < TRIES:
                left[number] = unit
            else:
                self.failed[number] = reason
                self.store.write_failure(self.stage, number, unit.names, reason)
        place = slot.outcome.place if slot.outcome else "not placed yet"
        warnings.warn(
            f"worker {slot.number} {what}: {reason} ({place})", WorkerWarning, stacklevel=2
        )
        if slot.failed_starts < TRIES:
            self._start(slot)
            return
        self.slots.remove(slot)
        if not self.slots:
            raise UserError(f"no worker could start; the last one: {reason}. Read its log: {place}")

    def _has_node(self, slot: Slot) -> bool:
        node = slot.outcome.node if slot.outcome else ""
        return any(one["NodeID"] == node and one["Alive"] for one in self.cluster.ray.nodes())

    def _kill(self, slot: Slot) -> None:
        with suppress(Exception):  # it may be dead already
            self.cluster.ray.kill(slot.actor, no_restart=True)

    def _warn_waiting(self) -> None:
        cluster = self.cluster
        has = cluster.ray.cluster_resources()
        warnings.warn(
            f"no worker could be placed yet: each needs {cluster.workers.cpus:g} CPUs and"
            f" {cluster.gpus:g} GPUs, the cluster has {has.get('CPU', 0):g} CPUs and"
            f" {has.get('GPU', 0):g} GPUs, which others may hold. Still waiting.",
            WorkerWarning,
            stacklevel=2,
        )

    def _error(self, tasks: Mapping[int, Unit], count: int) -> UserError:
        listed = "; ".join(
            f"{_called(tasks[n])}: {why}" for n, why in list(self.failed.items())[:5]
        )
        more = f"; and {len(self.failed) - 5} more" if len(self.failed) > 5 else ""
        return UserError(
            f"{len(self.failed)} of {count} units failed {TRIES} times: {listed}{more}. All others"
            " that were computed are kept: run the same command again to retry only these"
        )


def _import_ray() -> ModuleType:
    """Ray; statistics off, and no setting of GPUs for workers that have none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UserError(
            f"--workers and --address need Ray ({error}): pip install '.[ray]'"
        ) from error
    return ray


def _pack(
    job: Job, store: Store, stage: str, alpha_min: float | None, kind: type[Worker], to: RayCluster
) -> bytes:
    """All an actor needs, as bytes; tensors on the CPU, since an actor may have no other device."""
    from ray import cloudpickle

    facts = {
        "versions": _versions(),
        "cwd": str(Path.cwd()),
        "folder": str(store.folder.absolute()),
        "device": to.device,
        # One thread per reserved CPU: more would only wait for each other.
        "threads": max(1, int(to.workers.cpus)),
        "precision": torch.get_float32_matmul_precision(),
        "tf32": torch.backends.cudnn.allow_tf32,
        "probe": next((e.number for e in job.entries if _is_there(e.image)), 0),
    }
    with _on_cpu(job), _by_value(_own_modules()):
        rest = cloudpickle.dumps((job, kind, alpha_min, stage))
    found: bytes = cloudpickle.dumps((facts, rest))
    return found


@contextmanager
def _on_cpu(job: Job) -> Iterator[None]:
    adapters = [source for source in job.sources.values() if isinstance(source, nn.Module)]
    devices = {model: _device(model) for model in (job.classifier.model, *adapters)}
    for model in devices:
        model.to("cpu")
    try:
        yield
    finally:
        for model, device in devices.items():
            model.to(device)


@contextmanager
def _by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Pickle what these modules define by its code: an actor cannot import them."""
    from ray import cloudpickle

    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _own_modules() -> list[ModuleType]:
    """The user's modules of a single file, such as those of python:FILE.py:FUNCTION."""
    installed = (sys.prefix, sys.base_prefix, str(Path(os.__file__).parent))
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        single = file.endswith(".py") and "." not in name and not hasattr(module, "__path__")
        if single and name != "__main__" and not str(Path(file).resolve()).startswith(installed):
            found += [module] if "-packages" not in file else []
    return found


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _is_there(image: Any) -> bool:
    try:
        return bool(image.bytes() >= 0)
    except OSError:
        return False


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("sufficit", "torch")}


def _called(unit: Unit) -> str:
    if not unit.entries:
        return "the donors for leakage"
    return f"unit {unit.number} ({len(unit)} images, {unit.names[0]} to {unit.names[-1]})"


def _text(error: BaseException) -> str:
    """The kind of an error and the first lines of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"
