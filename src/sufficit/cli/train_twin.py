"""`sufficit train-twin`."""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from sufficit.cli.console import (
    MODEL,
    app,
    config_options,
    err,
    load,
    out,
    print_skipped,
)
from sufficit.cli.options import (
    BatchSizeOption,
    DevicesOption,
    MixedPrecisionOption,
    NodesOption,
    PatienceOption,
    ReadersOption,
    StartAgainOption,
    ValidationShareOption,
)
from sufficit.files import CHECKPOINT, check_output, place
from sufficit.loggers import check_log, close_logger, logger_named
from sufficit.outside import literal
from sufficit.runs.config import RunConfig

OPTIONS = (
    *(name for name in MODEL if name != "precision"),
    *("data", "image_column", "label_column", "on_error", "log", "seed"),
)


@app.command("train-twin")
@config_options(*OPTIONS)
def train_twin(
    config: RunConfig,
    to: Annotated[str, typer.Option("--out", help="Folder for the twin.")],
    target: Annotated[
        Literal["model", "label"],
        typer.Option(help="What it learns: the model's probabilities for whole images, or labels."),
    ] = "model",
    epochs: Annotated[int, typer.Option(help="Number of epochs.", min=1)] = 5,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-4,
    batch_size: BatchSizeOption = 32,
    patience: PatienceOption = 5,
    validation_share: ValidationShareOption = 0.1,
    readers: ReadersOption = 0,
    devices: DevicesOption = 1,
    num_nodes: NodesOption = 1,
    precision: MixedPrecisionOption = "fp32",
    overwrite: StartAgainOption = False,
) -> None:
    """Train a twin: a copy of the model that is used to hidden pixels, to score with.

    It learns from images under random masks and never sees an explanation. The model does not
    change. Run the same command again to resume an interrupted run.

    **Examples**

    sufficit train-twin --model saved/birds --data birds --out birds-twin

    sufficit train-twin --model torchvision:resnet50 --data photos --out twin --precision bf16
    """
    from sufficit.training import processes

    data, out_folder = place(config.data), place(to)
    first = processes.leads(devices, num_nodes)
    if first:
        started = (out_folder / CHECKPOINT).exists()
        check_output(out_folder, [data], overwrite=overwrite or started, command="train-twin")
    check_log(config.log, out_folder)
    from sufficit.classifier.loading import device_named
    from sufficit.training.twin_folder import TwinOptions, train_twin_folder

    own: dict[str, Any] = {"target": target, "epochs": epochs, "lr": lr, "batch_size": batch_size}
    own |= {"patience": patience or None, "workers": readers, "overwrite": overwrite}
    own |= {"validation_share": validation_share, "on_error": config.on_error, "seed": config.seed}
    own |= config.column_options()
    devices, num_nodes = processes.places(devices, num_nodes)
    named = {name: getattr(config, name) for name in MODEL if name != "device"}
    named |= {"precision": precision, "devices": devices, "num_nodes": num_nodes}
    try:
        with processes.only_first_prints(first, processes.own_rank(devices)):
            device = device_named(config.device)
            log, settings = config.log, named | own
            logger = None if log is None else logger_named(log, out_folder, settings)
            fabric = processes.fabric_for(device, devices, precision, num_nodes, logger)
            where = str(fabric.device) if devices * num_nodes == 1 else "cpu"
            classifier = load(config, device=where, precision="fp32")
            record = train_twin_folder(
                classifier, data, out_folder, TwinOptions(**own), fabric=fabric, config=named
            )
            close_logger(logger)
            processes.leave()
    except KeyboardInterrupt:
        err.print("Stopped. Run the same command again to resume after the last finished epoch.")
        raise typer.Exit(130) from None
    if record is not None:
        _print_record(record, out_folder, config)


def _print_record(record: dict[str, Any], folder: Path, config: RunConfig) -> None:
    """The accuracy of model and twin on whole and on masked images, and what to do next."""
    print_skipped(record["skipped"])
    n, history = record["n_validated_on"], record["history"]
    title = f"{n} held-out images; accuracy against {record['accuracy_of']}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("", "whole images", "under random masks"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("original", "twin"):
        accuracies = (record[name][f"{kind}_accuracy"] for kind in ("whole", "masked"))
        table.add_row(name, *(f"{value:.1%}" for value in accuracies))
    out.print(table)
    words = ["sufficit", "compare", "--model", config.model, "--data", config.data]
    words += ["--twin", str(folder)]
    epochs = f"{len(history)} epoch{'s' if len(history) > 1 else ''}"
    for text in (
        f"Trained on {record['n_trained_on']} images for {epochs}; selected epoch"
        f" {record['best_epoch']}.",
        f"Written to {folder}: classifier.json, classifier.safetensors, checkpoint.pt, history.csv,"
        " run.json",
        f"Next: {shlex.join(words)}",
    ):
        out.print(literal(text), highlight=False, soft_wrap=text.startswith("Next"))
