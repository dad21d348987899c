"""`sufficit train-lax`."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from sufficit.cli.app import app, err, literal, out, print_skipped
from sufficit.cli.options import (
    ClassesOption,
    DataOption,
    DeviceOption,
    LayerOption,
    ModelOption,
    NodesOption,
    OnError,
    OnErrorOption,
    SeedOption,
    SizeOption,
    Targets,
    WeightsOption,
)
from sufficit.files import CHECKPOINT, check_output

if TYPE_CHECKING:
    from sufficit.training.train_folder import TrainingOutcome

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


class TrainPrecision(StrEnum):
    """The precision of training; weights are float32 in both."""

    fp32 = "fp32"
    bf16 = "bf16"


@app.command("train-lax")
def train_lax(
    model: ModelOption,
    data: DataOption,
    out_folder: Annotated[Path, typer.Option("--out", help="Folder for the adapter.")],
    recipe: Annotated[
        str, typer.Option(help="robust, paper, l1, or a recipe of one of the paper's tables.")
    ] = "robust",
    target: Annotated[
        Targets,
        typer.Option(
            "--target", "--targets", help="Classes to explain. auto: labels if there are any."
        ),
    ] = Targets.auto,
    epochs: Annotated[int | None, typer.Option(help="Default: those of the recipe.", min=1)] = None,
    area: Annotated[
        float | None, typer.Option(help="Wanted mean of a heatmap, such as 0.1.")
    ] = None,
    alpha_min: Annotated[
        float | None, typer.Option(help="Value above which a heatmap marks; default 0.5.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images per step and process.", min=1)] = 32,
    patience: Annotated[
        int, typer.Option(help="Epochs without improvement that end training; 0: no limit.", min=0)
    ] = 5,
    validation_share: Annotated[
        float, typer.Option(help="Share of images held out for validation; at most 256 images.")
    ] = 0.1,
    workers: Annotated[int, typer.Option(help="Workers that read images.", min=0)] = 0,
    cache_features: Annotated[
        bool,
        typer.Option("--cache-features", help="Compute features once; keeps all images in memory."),
    ] = False,
    devices: Annotated[int, typer.Option(help="Number of GPUs, or of CPU processes.", min=1)] = 1,
    num_nodes: NodesOption = 1,
    device: DeviceOption = "auto",
    precision: Annotated[
        TrainPrecision, typer.Option(help="bf16 is mixed precision: weights stay fp32.")
    ] = TrainPrecision.fp32,
    layer: LayerOption = None,
    weights: WeightsOption = "default",
    num_classes: ClassesOption = None,
    size: SizeOption = None,
    on_error: OnErrorOption = OnError.skip,
    seed: SeedOption = 0,
    overwrite: Annotated[bool, typer.Option(help="Start again in --out.")] = False,
) -> None:
    """Train a LAX adapter, which draws the heatmap in the model's own forward pass.

    The model does not change. Run the same command again to resume an interrupted run.

    **Examples**

    sufficit train-lax --model saved/birds --data birds --out birds-lax

    sufficit train-lax --model torchvision:resnet50 --data photos --out lax --target prediction

    sufficit train-lax --model saved/birds --data birds --out small --area 0.1 --epochs 20

    sufficit train-lax --model saved/birds --data birds --out lax --devices 4 --precision bf16

    sufficit train-lax --model saved/birds --data birds --out lax --num-nodes 2 --devices 8
    """
    from sufficit.training.processes import (
        fabric_for,
        leads,
        leave,
        only_first_prints,
        own_rank,
        places,
    )

    first = leads(devices, num_nodes)
    if first:
        started = (out_folder / CHECKPOINT).exists()
        check_output(out_folder, [data], overwrite=overwrite or started, command="train-lax")
    from sufficit.classifier.loading import device_named, load_classifier
    from sufficit.training import FolderOptions, train_folder
    from sufficit.training.recipes import recipe_of

    recipe_of(recipe, epochs, area, alpha_min)  # raises before a model is loaded
    options = FolderOptions(
        recipe=recipe,
        target=target.value,
        epochs=epochs,
        area=area,
        alpha_min=alpha_min,
        patience=patience or None,
        batch_size=batch_size,
        validation_share=validation_share,
        workers=workers,
        cache=cache_features,
        on_error=on_error.value,
        overwrite=overwrite,
        seed=seed,
    )
    devices, num_nodes = places(devices, num_nodes)
    config: dict[str, Any] = {"model": model, "weights": weights, "num_classes": num_classes}
    config |= {"size": size, "layer": layer, "precision": precision.value}
    config |= {"devices": devices, "num_nodes": num_nodes}
    with only_first_prints(first, own_rank(devices)), _resume_hint():
        fabric = fabric_for(device_named(device), devices, precision.value, num_nodes)
        place = str(fabric.device) if devices * num_nodes == 1 else "cpu"
        classifier = load_classifier(
            model,
            weights=weights,
            num_classes=num_classes,
            size=size,
            device=place,
            precision="fp32",
            layer=layer,
        )
        outcome = train_folder(classifier, data, out_folder, options, fabric=fabric, config=config)
        leave()
    if outcome is None:
        return
    print_skipped(outcome.skipped)
    _print_outcome(outcome)
    known: dict[str, Any] = {"--weights": weights if weights != "default" else None}
    known |= {"--num-classes": num_classes, "--size": size}
    _print_next(out_folder, data, model, known)


@contextmanager
def _resume_hint() -> Iterator[None]:
    """Say how to resume after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("Stopped. Run the same command again to resume after the last finished epoch.")
        raise typer.Exit(130) from None


def _print_outcome(outcome: "TrainingOutcome") -> None:
    out.print(_table(outcome))
    out.print(
        f"Trained on {outcome.trained_on} images for the {_WORDS[outcome.target]}.", highlight=False
    )
    out.print(literal(outcome.in_words()), highlight=False)
    if outcome.warning:
        err.print("[yellow]Warning:[/]", literal(outcome.warning))


_WORDS = {"label": "labels of their folders", "prediction": "model's own predictions"}


def _table(outcome: "TrainingOutcome") -> Table:
    """A row for each of the last epochs and for the best one."""
    history, best = outcome.history, outcome.best_epoch
    number = f"{len(history)} epoch{'s' if len(history) > 1 else ''}"
    title = f"{number}, scored on {len(outcome.names)} held-out images; * selected"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("epoch", justify="right")
    for heading in HEADINGS.values():
        table.add_column(heading, justify="right")
    for row in history:
        if row["epoch"] == best or row["epoch"] > len(history) - ROWS:
            mark = "*" if row["epoch"] == best else " "
            style = "bold" if row["epoch"] == best else None
            cells = (f"{row[name]:.3f}" for name in HEADINGS)
            table.add_row(f"{row['epoch']} {mark}", *cells, style=style)
    return table


def _print_next(folder: Path, data: Path, model: str, known: dict[str, Any]) -> None:
    words = ["sufficit", "explain", str(data), "--model", model]
    words += [str(part) for name, value in known.items() if value for part in (name, value)]
    words += ["--methods", str(folder)]
    out.print(
        f"Written to {folder}: config.json, model.safetensors, README.md, checkpoint.pt,"
        " history.csv, training.png, sheet.png, run.json",
        highlight=False,
    )
    typer.echo(f"Next: {shlex.join(words)}")
