"""What `train-lax` and `train-twin` share: their options, and how a command trains."""

import shlex
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from sufficit.cli.console import MODEL, load, out, resumable
from sufficit.errors import UserError
from sufficit.files import CHECKPOINT, check_output, place
from sufficit.loggers import check_log, close_logger, logger_named
from sufficit.outside import literal
from sufficit.runs.config import RunConfig

if TYPE_CHECKING:
    from sufficit.training.folder_images import ReadingOptions

Outcome = TypeVar("Outcome")
OPTIONS = (
    *(name for name in MODEL if name != "precision"),
    *("data", "image_column", "label_column", "on_error", "log", "seed"),
)
BatchSizeOption = Annotated[int, typer.Option(help="Images per step and process.", min=1)]
PatienceOption = Annotated[
    int, typer.Option(help="Epochs without improvement that end training; 0: no limit.", min=0)
]
ValidationShareOption = Annotated[
    float, typer.Option(help="Share of images held out for validation; at most 256 images.")
]
ReadersOption = Annotated[int, typer.Option("--workers", help="Workers that read images.", min=0)]
DevicesOption = Annotated[int, typer.Option(help="Number of GPUs, or of CPU processes.", min=1)]
NodesOption = Annotated[int, typer.Option(help="Number of machines.", min=1)]
MixedPrecisionOption = Annotated[
    Literal["fp32", "bf16"], typer.Option(help="bf16 is mixed precision: weights stay fp32.")
]
StartAgainOption = Annotated[bool, typer.Option(help="Start again in --out.")]


def train_on_folder(
    command: str,
    config: RunConfig,
    folder: Path,
    train: Callable[..., Outcome],
    options: "ReadingOptions",
    *,
    devices: int,
    num_nodes: int,
    precision: str,
) -> Outcome:
    """Load the model, train on the images of the config, and return what training returns."""
    from sufficit.classifier.loading import device_named
    from sufficit.training import processes

    data, first = place(config.data), processes.leads(devices, num_nodes)
    if first:
        started = (folder / CHECKPOINT).exists()
        check_output(folder, [data], overwrite=options.overwrite or started, command=command)
    check_log(config.log, folder)
    devices, num_nodes = processes.places(devices, num_nodes)
    named = {name: getattr(config, name) for name in MODEL if name != "device"}
    named |= {"precision": precision, "devices": devices, "num_nodes": num_nodes}
    owned = resumable(folder, _epochs_kept) if first else nullcontext()
    with owned, processes.only_first_prints(first, processes.own_rank(devices)):
        device, log = device_named(config.device), config.log
        logger = None if log is None else logger_named(log, folder, named | asdict(options))
        fabric = processes.fabric_for(device, devices, precision, num_nodes, logger)
        where = str(fabric.device) if devices * num_nodes == 1 else "cpu"
        classifier = load(config, device=where, precision="fp32")
        found = train(classifier, data, folder, options, fabric=fabric, config=named)
        close_logger(logger)
        processes.leave()
    return found


def reading_options(config: RunConfig) -> dict[str, Any]:
    """What every training takes of a config."""
    return {"on_error": config.on_error, "seed": config.seed} | config.column_options()


def print_written(folder: Path, files: str, *sentences: str, following: list[str]) -> None:
    """Say what was trained, what was written, and which command comes next."""
    for text in (*sentences, f"Written to {folder}: {files}"):
        out.print(literal(text), highlight=False)
    out.print(literal(f"Next: {shlex.join(following)}"), highlight=False, soft_wrap=True)


def _epochs_kept(folder: Path) -> str:
    with suppress(UserError):
        if (folder / CHECKPOINT).exists():
            return "finished epochs are kept. Run the same command again to resume after them."
    return "no epoch is finished yet. Run the same command again to start."
