"""What `train-lax` and `train-twin` share: their options, and how a command trains."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from sufficit.cli.console import resumable, say
from sufficit.declared import ReadingOptions
from sufficit.errors import UserError
from sufficit.files import CHECKPOINT, check_output, place
from sufficit.loggers import check_log, close_logger, logger_named
from sufficit.runs.config import MODEL, RunConfig

Outcome = TypeVar("Outcome")
OPTIONS = (
    *(name for name in MODEL if name != "precision"),
    *("data", "image_column", "label_column", "on_error", "log", "seed"),
)


def train_on_folder(
    command: str,
    config: RunConfig,
    folder: Path,
    train: Callable[..., Outcome],
    make: Callable[..., ReadingOptions],
    training: dict[str, Any],
    **further: Any,
) -> Outcome:
    """Load the model, train on the images of the config, and return what training returns.

    `training` are the options of `make` and of Processes, as flags give them; `further` are
    arguments of `train`.
    """
    from sufficit.classifier.loading import device_named
    from sufficit.runs.job import load_model
    from sufficit.training import processes

    names = ("devices", "num_nodes", "precision", "patience")
    devices, num_nodes, precision, patience = (training.pop(name) for name in names)
    options = make(
        **training,
        **config.column_options(),
        patience="auto" if patience is None else patience or None,
        on_error=config.on_error,
        seed=config.seed,
    )
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
        classifier = load_model(replace(config, device=where, precision="fp32"))
        found = train(classifier, data, folder, options, fabric=fabric, config=named, **further)
        close_logger(logger)
        processes.leave()
    return found


def print_written(folder: Path, files: str, *sentences: str, following: list[str]) -> None:
    """Say what was trained, what was written, and which command comes next."""
    for text in (*sentences, f"Written to {folder}: {files}"):
        say(text)
    say(f"Next: {shlex.join(following)}", soft_wrap=True)


def stopped_early(history: Sequence[Mapping[str, Any]], planned: int, batches: int, by: str) -> str:
    """Why a training had fewer epochs than planned; `by` says what makes an epoch the best."""
    if len(history) >= planned:
        return ""
    first = max(history, key=lambda row: float(row["worth"]))["epoch"]  # of equals the first
    more, steps = len(history) - first, (len(history) - first) * batches
    return (
        f" Stopped after {len(history)} of {planned} epochs, because epoch {first} was the best"
        f" {by}, and {more} more epoch{'s' if more > 1 else ''}"
        f" ({steps} step{'s' if steps > 1 else ''}) brought nothing better; --patience 0 trains to"
        " the end."
    )


def _epochs_kept(folder: Path) -> str:
    with suppress(UserError):
        if (folder / CHECKPOINT).exists():
            return "finished epochs are kept. Run the same command again to resume after them."
    return "no epoch is finished yet. Run the same command again to start."
