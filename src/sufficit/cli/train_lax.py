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
from sufficit.crews import leads
from sufficit.files import CHECKPOINT, check_output

if TYPE_CHECKING:
    from sufficit.training.outcomes import Outcome

ROWS = 10  # epochs in the table
HEADINGS = {
    "loss": "loss",
    "accuracy": "right on masked",
    "base_score": "base",
    "mask_penalty": "penalty",
    "msi": "MSI",
    "leak": "leak",
    "leak_chance": "chance",
}


class TrainPrecision(StrEnum):
    """The arithmetic of training; weights are float32 in both."""

    fp32 = "fp32"
    bf16 = "bf16"


@app.command("train-lax")
def train_lax(
    model: ModelOption,
    data: DataOption,
    out_folder: Annotated[Path, typer.Option("--out", help="Where the adapter goes.")],
    recipe: Annotated[
        str, typer.Option(help="robust, paper, or another recipe's name.")
    ] = "robust",
    target: Annotated[
        Targets,
        typer.Option(
            "--target", "--targets", help="What is explained. auto: labels where there are any."
        ),
    ] = Targets.auto,
    epochs: Annotated[int | None, typer.Option(help="The recipe's own by default.", min=1)] = None,
    area: Annotated[
        float | None, typer.Option(help="What the mean of a heatmap should be, as 0.1.")
    ] = None,
    alpha_min: Annotated[
        float | None, typer.Option(help="Where a heatmap begins to mark; 0.5 by default.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images a step, in each process.", min=1)] = 32,
    patience: Annotated[
        int, typer.Option(help="Stop after so many epochs without progress; 0: never.", min=0)
    ] = 5,
    validation_share: Annotated[
        float, typer.Option(help="Share of the images held out; at most 256 of them.")
    ] = 0.1,
    workers: Annotated[int, typer.Option(help="Processes that read images.", min=0)] = 0,
    cache_features: Annotated[
        bool,
        typer.Option("--cache-features", help="Read and look once; keeps all images in memory."),
    ] = False,
    devices: Annotated[
        int, typer.Option(help="Train on so many GPUs, or in so many processes.", min=1)
    ] = 1,
    num_nodes: NodesOption = 1,
    device: DeviceOption = "auto",
    precision: Annotated[
        TrainPrecision, typer.Option(help="bf16 is mixed: weights stay fp32.")
    ] = TrainPrecision.fp32,
    layer: LayerOption = None,
    weights: WeightsOption = "default",
    num_classes: ClassesOption = None,
    size: SizeOption = None,
    on_error: OnErrorOption = OnError.skip,
    seed: SeedOption = 0,
    overwrite: Annotated[bool, typer.Option(help="Begin anew in --out.")] = False,
) -> None:
    """Train a LAX adapter: it draws the heatmap in the model's own forward pass.

    The model stays as it is. The same command goes on with a run that was stopped.

    **Examples**

    sufficit train-lax --model saved/birds --data birds --out birds-lax

    sufficit train-lax --model torchvision:resnet50 --data photos --out lax --target prediction

    sufficit train-lax --model saved/birds --data birds --out small --area 0.1 --epochs 20

    sufficit train-lax --model saved/birds --data birds --out lax --devices 4 --precision bf16

    sufficit train-lax --model saved/birds --data birds --out lax --num-nodes 2 --devices 8
    """
    first = leads(devices, num_nodes)
    if first:
        begun = (out_folder / CHECKPOINT).exists()
        check_output(out_folder, [data], overwrite=overwrite or begun, command="train-lax")
    from sufficit.parsing import classifier_from, device_from
    from sufficit.training import FolderOptions, train_folder
    from sufficit.training.processes import fabric_for, one_voice, own_rank, part, places
    from sufficit.training.recipes import recipe_of

    recipe_of(recipe, epochs, area, alpha_min)  # what is wrong with it is said before all else
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
    with one_voice(first, own_rank(devices)), _stopping_well():
        fabric = fabric_for(device_from(device), devices, precision.value, num_nodes)
        place = str(fabric.device) if devices * num_nodes == 1 else "cpu"
        classifier = classifier_from(model, weights, num_classes, size, place, "fp32", layer)
        outcome = train_folder(classifier, data, out_folder, options, fabric=fabric, config=config)
        part()
    if outcome is None:
        return
    print_skipped(outcome.skipped)
    _print_outcome(outcome)
    known: dict[str, Any] = {"--weights": weights if weights != "default" else None}
    known |= {"--num-classes": num_classes, "--size": size}
    _print_next(out_folder, data, model, known)


@contextmanager
def _stopping_well() -> Iterator[None]:
    """Say what Ctrl-C leaves."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("Stopped. The same command goes on after the last epoch that was finished.")
        raise typer.Exit(130) from None


def _print_outcome(outcome: "Outcome") -> None:
    out.print(_table(outcome))
    out.print(
        f"Trained on {outcome.trained_on} images for the {_WORDS[outcome.target]}.", highlight=False
    )
    out.print(literal(outcome.in_words()), highlight=False)
    if outcome.warning:
        err.print("[yellow]Warning:[/]", literal(outcome.warning))


_WORDS = {"label": "labels of their folders", "prediction": "model's own predictions"}


def _table(outcome: "Outcome") -> Table:
    """The last epochs and the best one, a row each."""
    history, best = outcome.history, outcome.best["epoch"]
    number = f"{len(history)} epoch{'s' if len(history) > 1 else ''}"
    title = f"{number}, scored on {outcome.validated_on} held-out images; * the best"
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
    words += ["--method", str(folder)]
    out.print(
        f"Written to {folder}: config.json, model.safetensors, README.md, checkpoint.pt,"
        " history.csv, training.png, sheet.png, run.json",
        highlight=False,
    )
    typer.echo(f"Next: {shlex.join(words)}")
