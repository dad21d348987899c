"""The devices and machines a run uses, and one voice where it runs in several processes."""

import gc
import logging
import os
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from sufficit.crews import Crew, FirstGoneError, by_torchrun, is_first
from sufficit.errors import UserError

if TYPE_CHECKING:
    from lightning.fabric import Fabric

WAIT = 3.0  # seconds in which the first process can tell an error that all of them met
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed"}


def places(devices: int, nodes: int) -> tuple[int, int]:
    """Devices a machine, and machines: as asked, or, under torchrun, as many as it has started."""
    if not by_torchrun():
        return devices, nodes
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    return devices, int(os.environ["WORLD_SIZE"]) // devices


def own_rank(devices: int) -> int:
    """Which of all processes this one is, of which each machine has so many."""
    local, node = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "NODE_RANK"))
    return int(os.environ.get("RANK", node * devices + local))


@contextmanager
def crew_for(device: torch.device, devices: int = 1, nodes: int = 1) -> Iterator[Crew]:
    """The place of this process among all that share a run; starts the others.

    Under torchrun they are there already, and its numbers hold.
    """
    devices, nodes = places(devices, nodes)
    if devices * nodes == 1:
        yield Crew()
        return
    with one_voice(is_first(), own_rank(devices)):
        fabric = fabric_for(device, devices, nodes=nodes)
        launch(fabric)
        run = fabric.broadcast(uuid.uuid4().hex)
        yield Crew(fabric.global_rank, fabric.world_size, run, str(fabric.device))
        part()


def fabric_for(
    device: torch.device, devices: int = 1, precision: str = "fp32", nodes: int = 1
) -> "Fabric":
    """A Fabric over one device, or over the first so many of its kind, a process each."""
    from lightning.fabric import Fabric

    if devices * nodes > 1 and (device.index is not None or device.type == "mps"):
        raise UserError(
            f"--devices {devices} takes the first {devices} of a kind, cuda or cpu, got --device"
            f" {device}"
        )
    if device.type == "cuda" and devices > torch.cuda.device_count():
        raise UserError(f"--devices {devices}, but there are {torch.cuda.device_count()} GPUs here")
    chosen = [device.index or 0] if device.type == "cuda" and devices == 1 else devices
    words = PRECISIONS[precision]
    return Fabric(accelerator=device.type, devices=chosen, num_nodes=nodes, precision=words)  # type: ignore[arg-type]  # one of its words


def launch(fabric: "Fabric") -> None:
    """Start the processes, without Lightning's word of ranks and ports."""
    loggers = [logging.getLogger(name) for name in ("lightning.fabric", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        fabric.launch()
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def part() -> None:
    """Leave the other processes, where there are any; nothing that uses the group may be held.

    Gloo's threads drop their last tensors when they come to it. In an interpreter that is about to
    end they abort the process, so they are ended here, which happens once nothing holds the group.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        gc.collect()  # wrapped modules hold it in cycles


@contextmanager
def one_voice(first: bool, rank: int) -> Iterator[None]:
    """Only the first process speaks; another one speaks of an error if the first does not.

    What goes wrong in all processes, or in the first alone, is told by the first, which ends. So
    the others wait a little, and are silent where it is gone.
    """
    if first:
        yield
        return
    parent = os.getppid()
    warnings.simplefilter("ignore")
    try:
        yield
    except KeyboardInterrupt:
        os._exit(130)
    except FirstGoneError:
        os._exit(1)
    except Exception as error:
        time.sleep(WAIT)
        if os.getppid() != parent:
            os._exit(1)
        raise UserError(f"process {rank}: {error}") from error
