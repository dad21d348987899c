"""A worker of the engine as a Ray actor: what is shipped to it, and what it reports."""

import io
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from sufficit.classifier.source_code import is_installed
from sufficit.errors import UserError
from sufficit.runs.engine import Worker
from sufficit.runs.explanations import Sample, quiet
from sufficit.runs.job import Job
from sufficit.runs.store import KEY, LEAK, UNITS

DRAW_DONORS = -1  # the number of the task that comes before the units
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
MORE_MEMORY = "Out of memory: lower --batch-size or --unit-size, or have fewer workers per machine"


@dataclass(frozen=True)
class Outcome:
    """What an actor reports of a task; an error as text, because not every exception pickles."""

    error: str = ""
    is_final: bool = False  # another try cannot help
    sizes: Mapping[tuple[int, ...], str] = field(default_factory=dict)  # one image of each size


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("sufficit", "torch")}


@dataclass(frozen=True)
class Shipment:
    """A job on its way to an actor, and what must be the same there."""

    work: bytes  # the worker with its job
    folder: Path  # of the store
    device: str
    devices: dict[str, str]  # a device here: the same in the actor
    threads: int
    probe: int | None  # the number of an image that can be read here
    cwd: str = field(default_factory=lambda: str(Path.cwd()))
    matmul: str = field(default_factory=torch.get_float32_matmul_precision)
    tf32: bool = field(default_factory=lambda: torch.backends.cudnn.allow_tf32)
    versions: dict[str, str] = field(default_factory=_versions)


@dataclass(frozen=True)
class Place:
    """Where a worker runs, also in words that name its log."""

    node: str = ""
    process: int = 0
    text: str = "not placed yet; Ray's logs may say more"


def _reporting(work: Callable[..., None]) -> Callable[..., Outcome]:
    """A method of an actor that reports how it ended."""

    @wraps(work)  # so that it is pickled by name
    def reported(actor: "UnitActor", *given: Any) -> Outcome:
        try:
            with quiet():
                work(actor, *given)
        except Exception as error:
            if isinstance(error, UserError) and not lacks_memory(error):
                return Outcome(str(error), is_final=True)
            traceback.print_exc()
            return Outcome(short(error))
        return Outcome(sizes=dict(actor.worker.loader.sizes))

    return reported


class UnitActor:
    """A worker of the engine in a process of its own."""

    worker: Worker

    def __init__(self, shipment: Shipment) -> None:
        self.shipment = shipment
        self.ahead: tuple[int, Future[list[Sample]]] | None = None
        self.pool = ThreadPoolExecutor(1)

    def place(self) -> Place:
        """Where this worker runs."""
        import ray

        log = os.path.realpath("/proc/self/fd/2")  # Ray sends each worker's output to a file
        text = f"process {os.getpid()} on {socket.gethostname()}, log {log}"
        return Place(ray.get_runtime_context().get_node_id(), os.getpid(), text)

    @_reporting
    def load(self) -> None:
        """Load the model; what can't work on this machine is said here."""
        given, host = self.shipment, socket.gethostname()
        for name, found in _versions().items():
            if found != given.versions[name]:
                raise UserError(
                    f"{host} has {name} {found}, the driver {given.versions[name]}: install the"
                    " same version"
                )
        with suppress(OSError):
            os.chdir(given.cwd)
        if not (key := given.folder / UNITS / KEY).exists():
            raise UserError(f"{host} cannot see {key}: give --out a folder that all machines share")
        torch.set_num_threads(given.threads)
        torch.set_float32_matmul_precision(given.matmul)
        torch.backends.cudnn.allow_tf32 = given.tf32
        # The bytes come from our own driver, which the token of the cluster vouches for.
        try:
            worker: Worker = torch.load(
                io.BytesIO(given.work), map_location=given.devices, weights_only=False
            )
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"{host} cannot import what the model or a method needs ({error}): install it"
                " there, or set PYTHONPATH on all machines"
            ) from error
        job = worker.job
        if given.probe is not None and not job.entries[given.probe].image.is_there():
            raise UserError(
                f"{host} cannot see the image {job.entries[given.probe].image.name}: give --data a"
                " folder that all machines share"
            )
        for model in filter(None, (job.classifier, job.twin)):
            model.to(given.device)
        self.worker = worker

    @_reporting
    def compute(self, number: int, following: int | None) -> None:
        """Compute a unit and write its files; read the following one meanwhile."""
        worker = self.worker
        worker.draw_donors()
        if number == DRAW_DONORS or worker.store.has(worker.stage, number):
            return
        unit, items = worker.job.units[number], list[Sample]()
        if worker.stage != LEAK:
            before = self.ahead if self.ahead is not None and self.ahead[0] == number else None
            items = before[1].result() if before else worker.loader.items(unit.entries)
            self.ahead = None
            if following is not None:
                entries = worker.job.units[following].entries
                self.ahead = following, self.pool.submit(worker.loader.items, entries)
        worker.store.write_unit(number, worker.work(unit, items))


def ship(worker: Worker, *, device: str, threads: int) -> Shipment:
    """All that an actor needs to compute units as this worker does."""
    from ray import cloudpickle

    job, folder = worker.job, worker.store.folder.absolute()
    for module in _own_modules():
        cloudpickle.register_pickle_by_value(module)
    packed, here = io.BytesIO(), job.classifier.device
    store = replace(worker.store, folder=folder)
    shipped = replace(job, entries=job.entries.at(store.manifest))
    copy = type(worker)(shipped, store, worker.stage, worker.alpha_min)
    try:
        torch.save(copy, packed, pickle_module=cloudpickle)
    except Exception as error:
        raise _cannot_send(job, error) from error
    devices = {} if here.type == "cpu" else {str(here): device}
    seen = next((entry.number for entry in job.entries if entry.image.is_there()), None)
    return Shipment(packed.getvalue(), folder, device, devices, threads, seen)


def end_process(number: int) -> None:
    """End a worker of this machine that does not answer Ray."""
    with suppress(OSError):
        if Path(f"/proc/{number}/cmdline").read_bytes().startswith(b"ray::UnitActor"):
            os.kill(number, signal.SIGKILL)


def short(error: BaseException) -> str:
    """The kind of an error, the start of its message, and what helps if memory was short."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return f"{text}. {MORE_MEMORY}" if lacks_memory(error) else text


def lacks_memory(error: BaseException) -> bool:
    """Whether an error, or its cause, is a lack of memory; another try may find more."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True  # Ray's and torch's have that name
    if any(words in str(error) for words in NO_MEMORY):
        return True
    return error.__cause__ is not None and lacks_memory(error.__cause__)


def _cannot_send(job: Job, error: Exception) -> UserError:
    """What of a job cannot be pickled."""
    from ray import cloudpickle

    parts: dict[str, object] = {"the model": job.classifier, "the twin": job.twin}
    parts |= {f"the method {name}": source for name, source in job.sources.items()}
    for what, part in parts.items():
        try:
            cloudpickle.dumps(part)
        except Exception as found:
            return UserError(
                f"cannot send {what} to workers ({short(found)}): open files, locks and connections"
                " when it is called, or run without workers"
            )
    return UserError(f"cannot send the run to workers ({short(error)}): run without workers")


def _own_modules() -> list[ModuleType]:
    """The user's modules of a single file, which an actor can't import: python:FILE.py:FUNCTION."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        single = file.endswith(".py") and "." not in name and not hasattr(module, "__path__")
        if single and name != "__main__":
            found += [] if is_installed(Path(file)) else [module]
    return found
