"""A worker of Ray, in a process of its own: what is sent to it, and what it gives back."""

import io
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from sufficit.classifier.source_code import is_installed
from sufficit.data.images import SourceImage
from sufficit.data.loader import Unit
from sufficit.errors import UserError
from sufficit.runs.engine import quiet
from sufficit.runs.job import Job
from sufficit.runs.spread import Score
from sufficit.runs.unit_rows import Rows

NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
MORE_MEMORY = "Out of memory: lower --batch-size or --unit-size, or have fewer workers per machine"
Found = TypeVar("Found")


@dataclass(frozen=True)
class Problem:
    """Why there is no result, as text, because not every exception can be pickled."""

    reason: str
    is_final: bool = False  # another try cannot help


def _versions() -> dict[str, str]:
    """Return the versions that must be the same on all machines."""
    return {name: version(name) for name in ("sufficit", "torch")}


@dataclass(frozen=True)
class Shipment:
    """The work on its way to a worker, and what must be the same there."""

    work: bytes  # a Score and its Job
    device: str
    devices: dict[str, str]  # a device here: the same in the worker
    threads: int
    sample: SourceImage | None  # an image that can be read here
    folder: str = field(default_factory=lambda: str(Path.cwd()))
    matmul: str = field(default_factory=torch.get_float32_matmul_precision)
    tf32: bool = field(default_factory=lambda: torch.backends.cudnn.allow_tf32)
    versions: dict[str, str] = field(default_factory=_versions)


class UnitWorker:
    """Computes units with the job that it has loaded; Ray makes an actor of it."""

    score: Score

    def load(self, given: Shipment) -> str | Problem:
        """Load the model; where this process runs, or what cannot work on this machine."""
        return _attempt(lambda: self._load(given))

    def compute(self, unit: Unit) -> Rows | Problem:
        """Return the rows of a unit."""
        return _attempt(lambda: self._compute(unit))

    def _load(self, given: Shipment) -> str:
        host = socket.gethostname()
        for name, found in _versions().items():
            if found != given.versions[name]:
                raise UserError(
                    f"{host} has {name} {found}, the driver {given.versions[name]}: install the"
                    " same version"
                )
        # Relative paths of the user's mean the same; the folder may not be there.
        with suppress(OSError):
            os.chdir(given.folder)
        torch.set_num_threads(given.threads)
        torch.set_float32_matmul_precision(given.matmul)
        torch.backends.cudnn.allow_tf32 = given.tf32
        # The bytes come from our own driver, which the token of the cluster vouches for.
        try:
            self.score, job = torch.load(
                io.BytesIO(given.work), map_location=given.devices, weights_only=False
            )
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"{host} cannot import what the model or a method needs ({error}): install it"
                " there, or set PYTHONPATH on all machines"
            ) from error
        if given.sample is not None and not given.sample.is_there():
            raise UserError(
                f"{host} cannot see the image {given.sample.name}: give --data a folder that all"
                " machines share"
            )
        for model in filter(None, (job.classifier, job.twin)):
            model.to(given.device)
        for tensor in _held_tensors(job):  # in place: probes have the same ones
            tensor.data = tensor.data.to(given.device)
        log = os.path.realpath("/proc/self/fd/2")  # Ray sends each worker's output to a file
        return f"process {os.getpid()} on {host}, log {log}"

    def _compute(self, unit: Unit) -> Rows:
        # No unit is read ahead: which one comes next is the driver's choice.
        rows = self.score(unit, None)
        # The driver may have no GPU.
        rows.maps = {name: one.to("cpu") for name, one in rows.maps.items()}
        return rows


def ship(
    score: Score, job: Job, *, device: str, threads: int, sample: SourceImage | None
) -> Shipment:
    """Return all that a worker needs to compute units as this process does."""
    from ray import cloudpickle

    for module in _own_modules():
        cloudpickle.register_pickle_by_value(module)
    packed = io.BytesIO()
    try:
        torch.save((score, job), packed, pickle_module=cloudpickle)
    except Exception as error:
        raise _cannot_send(job, error) from error
    here = job.classifier.device
    devices = {} if here.type == "cpu" else {str(here): device}
    return Shipment(packed.getvalue(), device, devices, threads, sample)


def short(error: BaseException) -> str:
    """Return the kind of an error, the start of its message, and what helps if memory was short."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return f"{text}. {MORE_MEMORY}" if lacks_memory(error) else text


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error, or its cause, is a lack of memory; another try may find more."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True  # Ray's and torch's have that name
    if any(words in str(error) for words in NO_MEMORY):
        return True
    return error.__cause__ is not None and lacks_memory(error.__cause__)


def _attempt(work: Callable[[], Found]) -> Found | Problem:
    """Do some work; return what it gives, or why it failed. The log has the whole error."""
    try:
        with quiet():
            return work()
    except Exception as error:
        if isinstance(error, UserError) and not lacks_memory(error):
            return Problem(str(error), is_final=True)
        traceback.print_exc()
        return Problem(short(error))


def _held_tensors(job: Job) -> Iterator[Tensor]:
    """Yield the tensors of the images that were drawn before all others."""
    if job.held is None:
        return
    donors = job.held.donors
    yield donors.batch.images
    yield donors.batch.targets
    yield from donors.maps.values()
    yield from (one.maps for one in job.held.maps.values())


def _cannot_send(job: Job, error: Exception) -> UserError:
    """Return an error that names what of a job cannot be pickled."""
    from ray import cloudpickle

    parts: dict[str, object] = {"the model": job.classifier, "the twin": job.twin}
    parts |= {f"the method {source.name}": source for source in job.sources}
    parts |= {f"the probe {probe.key}": probe for probe in job.extra}
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
    """Return the user's modules of a single file (python:FILE.py:F): a worker can't import them."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        single = file.endswith(".py") and "." not in name and not hasattr(module, "__path__")
        if single and name != "__main__" and not is_installed(Path(file)):
            found.append(module)
    return found
