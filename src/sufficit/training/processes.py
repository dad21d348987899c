"""The devices and machines of a training run; of several processes only the first one prints."""

import gc
import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.fabric.loggers.logger import Logger

TORCHRUN = "TORCHELASTIC_RUN_ID"  # set if torchrun has started this process and its siblings
WAIT = 3.0  # seconds in which the first process can print an error that all of them meet


def own_rank(devices: int) -> int:
    """The rank of this process, with so many processes per machine."""
    env = os.environ
    if "RANK" in env:
        return int(env["RANK"])
    if "LOCAL_RANK" in env:
        node = env.get("NODE_RANK", env.get("GROUP_RANK", "0"))
        return int(node) * devices + int(env["LOCAL_RANK"])
    if "NODE_RANK" in env:
        return int(env["NODE_RANK"]) * devices
    return int(env.get("SLURM_PROCID", "0"))


def leads(devices: int, nodes: int) -> bool:
    """Whether this process is the first of the run, or the only one."""
    alone = devices * nodes == 1 and TORCHRUN not in os.environ
    return alone or own_rank(devices) == 0


def places(devices: int, nodes: int) -> tuple[int, int]:
    """Devices per machine, and machines: as asked or, under torchrun, as it has started."""
    if TORCHRUN not in os.environ:
        return devices, nodes
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    return devices, int(os.environ["WORLD_SIZE"]) // devices


def fabric_for(
    device: torch.device,
    devices: int = 1,
    precision: str = "fp32",
    nodes: int = 1,
    logger: "Logger | None" = None,
) -> "Fabric":
    """A Fabric over one device, or over the first `devices` of its kind with a process each.

    The logger gets the numbers of every epoch.
    """
    from lightning.fabric import Fabric

    if devices * nodes > 1 and (device.index is not None or device.type == "mps"):
        raise UserError(
            f"--devices {devices} takes the first {devices} devices of a kind, but --device is"
            f" {device}: use --device cuda or --device cpu"
        )
    if device.type == "cuda" and devices > (count := torch.cuda.device_count()):
        raise UserError(f"--devices is {devices}, but this machine has {count} GPUs: use fewer")
    chosen = [device.index or 0] if device.type == "cuda" and devices == 1 else devices
    words = {"fp32": "32-true", "bf16": "bf16-mixed"}[precision]
    return Fabric(
        accelerator=device.type,
        devices=chosen,
        num_nodes=nodes,
        precision=words,  # type: ignore[arg-type]  # one of its words
        loggers=logger,
    )


@contextmanager
def frozen(classifier: Classifier, fabric: "Fabric") -> Iterator[None]:
    """The classifier frozen, in eval mode and on this process's device; afterwards as before."""
    device = classifier.device
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    learning = [p for p in classifier.model.parameters() if p.requires_grad]
    try:
        if fabric.device != device:
            classifier.to(fabric.device)
        for parameter in learning:
            parameter.requires_grad_(False)
        with classifier.in_eval_mode():
            yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
        classifier.to(device)
        if current is not None:
            torch.cuda.set_device(current)


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Inside, a GPU computes the same twice, if wanted; afterwards as before."""
    if not wanted:
        yield
        return
    # cuBLAS reads this when it starts; without it its sums have no fixed order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, tuned = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        torch.backends.cudnn.benchmark = tuned


def launch(fabric: "Fabric") -> None:
    """Start the processes, without Lightning's log lines about ranks and ports."""
    names = ("lightning.fabric", "lightning.pytorch")
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    try:
        for logger in levels:
            logger.setLevel(logging.WARNING)
        fabric.launch()
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def leave() -> None:
    """Leave the process group, if there is one; nothing that uses it may be alive.

    Gloo's threads abort an interpreter that ends before they do. They end here, once nothing
    refers to the group.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        gc.collect()  # wrapped modules refer to it in cycles


@contextmanager
def only_first_prints(first: bool, rank: int) -> Iterator[None]:
    """Only the first process prints; another one reports its error if the first does not.

    An error in all processes, or in the first alone, is printed by the first, which then ends. So
    the others wait a little, and end silently if it is gone.
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
    except Exception as error:
        time.sleep(WAIT)
        if os.getppid() != parent:
            os._exit(1)
        raise UserError(f"process {rank}: {error}") from error
