"""`sufficit train-lax`."""

import shlex
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from sufficit.cli.console import (
    MODEL,
    app,
    config_options,
    load,
    out,
    print_skipped,
    resumable,
    warn,
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
from sufficit.errors import UserError
from sufficit.files import CHECKPOINT, check_output, place
from sufficit.loggers import check_log, close_logger, logger_named
from sufficit.outside import literal
from sufficit.runs.config import RunConfig

if TYPE_CHECKING:
    from sufficit.training.train_folder import TrainingOutcome

OPTIONS = (
    *(name for name in MODEL if name != "precision"),
    *("data", "targets", "image_column", "label_column", "on_error", "log", "seed"),
)
ROWS = 10  # epochs in the table
HEADINGS = {
    "loss": "loss",
    "accuracy": "accuracy, masked",
    "base_score": "base",
    "mask_penalty": "penalty",
    "msi": "MSI",
    "leak": "leak",
    "leak_chance": "chance",
}
TARGETS = {"label": "labels of their folders", "prediction": "model's own predictions"}


@app.command("train-lax")
@config_options(*OPTIONS)
def train_lax(
    config: RunConfig,
    to: Annotated[str, typer.Option("--out", help="Folder for the adapter.")],
    recipe: Annotated[
        str, typer.Option(help="robust, paper, l1, or a recipe of one of the paper's tables.")
    ] = "robust",
    target: Annotated[
        Literal["auto", "label", "prediction"] | None,
        typer.Option(help="Same as --targets.", hidden=True),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Default: those of the recipe.", min=1)] = None,
    area: Annotated[
        float | None, typer.Option(help="Wanted mean of a heatmap, such as 0.1.")
    ] = None,
    alpha_min: Annotated[
        float | None, typer.Option(help="Value above which a heatmap marks; default 0.5.")
    ] = None,
    batch_size: BatchSizeOption = 32,
    patience: PatienceOption = 5,
    validation_share: ValidationShareOption = 0.1,
    readers: ReadersOption = 0,
    cache_features: Annotated[
        bool,
        typer.Option("--cache-features", help="Compute features once; keeps all images in memory."),
    ] = False,
    devices: DevicesOption = 1,
    num_nodes: NodesOption = 1,
    precision: MixedPrecisionOption = "fp32",
    overwrite: StartAgainOption = False,
) -> None:
    """Train a LAX adapter, which draws the heatmap in the model's own forward pass.

    The model does not change. Run the same command again to resume an interrupted run.

    **Examples**

    sufficit train-lax --model saved/birds --data birds --out birds-lax

    sufficit train-lax --model torchvision:resnet50 --data photos --out lax --targets prediction

    sufficit train-lax --model saved/birds --data birds --out small --area 0.1 --epochs 20

    sufficit train-lax --model saved/birds --data birds --out lax --devices 4 --precision bf16

    sufficit train-lax --model saved/birds --data birds --out lax --num-nodes 2 --devices 8
    """
    from sufficit.training import processes

    data, out_folder = place(config.data), place(to)
    first = processes.leads(devices, num_nodes)
    if first:
        started = (out_folder / CHECKPOINT).exists()
        check_output(out_folder, [data], overwrite=overwrite or started, command="train-lax")
    check_log(config.log, out_folder)
    from sufficit.classifier.loading import device_named
    from sufficit.explainers.recipes import recipe_of
    from sufficit.training import FolderOptions, train_folder

    recipe_of(recipe, epochs, area, alpha_min)  # raises before a model is loaded
    own: dict[str, Any] = {"recipe": recipe, "epochs": epochs, "area": area, "alpha_min": alpha_min}
    own |= {"target": target or config.targets, "on_error": config.on_error, "seed": config.seed}
    own |= {"batch_size": batch_size, "patience": patience or None, "workers": readers}
    own |= {"validation_share": validation_share, "cache": cache_features, "overwrite": overwrite}
    own |= config.column_options()
    devices, num_nodes = processes.places(devices, num_nodes)
    named = {name: getattr(config, name) for name in MODEL if name != "device"}
    named |= {"precision": precision, "devices": devices, "num_nodes": num_nodes}
    owned = resumable(out_folder, _epochs_kept) if first else nullcontext()
    try:
        with owned, processes.only_first_prints(first, processes.own_rank(devices)):
            device = device_named(config.device)
            log, settings = config.log, named | own
            logger = None if log is None else logger_named(log, out_folder, settings)
            fabric = processes.fabric_for(device, devices, precision, num_nodes, logger)
            where = str(fabric.device) if devices * num_nodes == 1 else "cpu"
            classifier = load(config, device=where, precision="fp32")
            outcome = train_folder(
                classifier, data, out_folder, FolderOptions(**own), fabric=fabric, config=named
            )
            close_logger(logger)
            processes.leave()
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if outcome is not None:
        _print_outcome(outcome, out_folder, config)


def _epochs_kept(folder: Path) -> str:
    with suppress(UserError):
        if (folder / CHECKPOINT).exists():
            return "finished epochs are kept. Run the same command again to resume after them."
    return "no epoch is finished yet. Run the same command again to start."


def _print_outcome(outcome: "TrainingOutcome", folder: Path, config: RunConfig) -> None:
    """A row for each of the last epochs and for the best one, and what to do next."""
    print_skipped(outcome.skipped)
    history, best = outcome.history, outcome.best_epoch
    number = f"{len(history)} epoch{'s' if len(history) > 1 else ''}"
    title = f"{number}, scored on {len(outcome.names)} held-out images; * selected"
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("epoch", *HEADINGS.values()):
        table.add_column(heading, justify="right")
    for row in history:
        if row["epoch"] == best or row["epoch"] > len(history) - ROWS:
            mark, style = ("*", "bold") if row["epoch"] == best else (" ", None)
            cells = (f"{row[name]:.3f}" for name in HEADINGS)
            table.add_row(f"{row['epoch']} {mark}", *cells, style=style)
    out.print(table)
    weights = config.weights if config.weights != RunConfig.weights else None
    known = {"--weights": weights, "--num-classes": config.num_classes}
    known |= {"--output": config.output, "--size": config.size}
    known |= {"--prompts": ",".join(config.prompts or ())}
    words = ["sufficit", "explain", config.data, "--model", config.model]
    words += [str(part) for name, value in known.items() if value for part in (name, value)]
    words += ["--methods", str(folder)]
    for text in (
        f"Trained on {outcome.trained_on} images for the {TARGETS[outcome.target]}.",
        outcome.in_words(),
        f"Written to {folder}: config.json, model.safetensors, README.md, checkpoint.pt,"
        " history.csv, training.png, sheet.png, run.json",
        f"Next: {shlex.join(words)}",
    ):
        out.print(literal(text), highlight=False, soft_wrap=text.startswith("Next"))
    if outcome.warning:
        warn(outcome.warning)
