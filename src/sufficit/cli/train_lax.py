"""`sufficit train-lax`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from sufficit.cli.console import app, out, print_skipped
from sufficit.cli.options import run_options
from sufficit.cli.training_run import OPTIONS, print_written, train_on_folder
from sufficit.files import place
from sufficit.runs.config import RunConfig

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
    "grid_energy": "grid",
    "fragments": "parts",
}
TARGETS = {"label": "labels of their folders", "prediction": "model's own predictions"}


@app.command("train-lax")
@run_options(*OPTIONS, "targets")
def train_lax(
    config: RunConfig,
    training: dict[str, Any],
    to: Annotated[str, typer.Option("--out", help="Folder for the adapter.")],
    recipe: Annotated[
        str,
        typer.Option(
            help="robust, paper, l1, one of the paper's tables (paper-cub200), or another work's"
            " losses (rt-saliency, masked-in-out, learn-to-rank)."
        ),
    ] = "robust",
    target: Annotated[
        Literal["auto", "label", "prediction"] | None,
        typer.Option(help="Same as --targets.", hidden=True),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Default: 1,500 steps, but at least the epochs of the recipe.", min=1),
    ] = None,
    area: Annotated[
        float | None, typer.Option(help="Wanted mean of a heatmap, such as 0.1.")
    ] = None,
    alpha_min: Annotated[
        float | None, typer.Option(help="Value above which a heatmap marks; default 0.5.")
    ] = None,
    class_free: Annotated[
        bool,
        typer.Option("--class-free", help="Explain the prediction only, not a class asked for."),
    ] = False,
    answers: Annotated[
        int | None, typer.Option(help="Maps to draw, one per region, each to suffice alone.", min=1)
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers to read, as A,B,C, the coarsest last; else found.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="Folder of a twin, which judges every other step.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Same adapter twice on a GPU; half the speed.")
    ] = False,
    cache_features: Annotated[
        bool,
        typer.Option("--cache-features", help="Compute features once; keeps all images in memory."),
    ] = False,
) -> None:
    """Train a LAX adapter, which draws the heatmap in the model's own forward pass.

    The model does not change. Run the same command again to resume an interrupted run.

    **Examples**

    sufficit train-lax --model saved/birds --data birds --out birds-lax

    sufficit train-lax --model torchvision:resnet50 --data photos --out lax --targets prediction

    sufficit train-lax --model saved/birds --data birds --out small --area 0.1 --epochs 20

    sufficit train-lax --model saved/birds --data birds --out two --answers 2

    sufficit train-lax --model saved/birds --data birds --out lax --devices 4 --precision bf16

    sufficit train-lax --model saved/birds --data birds --out lax --num-nodes 2 --devices 8
    """
    from sufficit.explainers.recipes import recipe_of
    from sufficit.training import FolderOptions, train_folder

    # Raises before a model is loaded.
    recipe_of(recipe, epochs, area, alpha_min, answers, class_free)
    options = partial(
        FolderOptions,
        recipe=recipe,
        target=target or config.targets,
        epochs=epochs,
        area=area,
        alpha_min=alpha_min,
        answers=answers,
        class_free=class_free,
        layers=None if layers is None else tuple(one.strip() for one in layers.split(",")),
        twin=judge,
        deterministic=deterministic,
        cache=cache_features,
    )
    outcome = train_on_folder("train-lax", config, place(to), train_folder, options, training)
    if outcome is not None:
        _print_outcome(outcome, place(to), config)


def _print_outcome(outcome: "TrainingOutcome", folder: Path, config: RunConfig) -> None:
    """A row for each of the last epochs and for the best one, and what to do next."""
    print_skipped(outcome.skipped)
    history, best = outcome.history, outcome.best_epoch
    number = f"{len(history)} epoch{'s' if len(history) > 1 else ''}"
    title = f"{number}, scored on {len(outcome.names)} held-out images; * selected"
    look: Any = {"box": None, "pad_edge": False}  # so that it fits 80 columns
    table = Table(title=title, title_justify="left", title_style="bold", **look)
    for heading in ("epoch", *HEADINGS.values()):
        table.add_column(heading, justify="right")
    for row in history:
        if row["epoch"] == best or row["epoch"] > len(history) - ROWS:
            mark, style = ("*", "bold") if row["epoch"] == best else (" ", None)
            cells = (f"{row[name]:.3f}" if name in row else "-" for name in HEADINGS)
            table.add_row(f"{row['epoch']} {mark}", *cells, style=style)
    out.print(table)
    weights = config.weights if config.weights != RunConfig.weights else None
    known = {"--weights": weights, "--num-classes": config.num_classes}
    known |= {"--output": config.output, "--size": config.size}
    known |= {"--prompts": ",".join(config.prompts or ())}
    words = ["sufficit", "explain", config.data, "--model", config.model]
    words += [str(part) for name, value in known.items() if value for part in (name, value)]
    print_written(
        folder,
        "config.json, model.safetensors, README.md, checkpoint.pt, history.csv, training.png,"
        " sheet.png, trust.md, run.json",
        f"Trained on {outcome.trained_on} images for the {TARGETS[outcome.target]}.",
        outcome.in_words(),
        *outcome.trust.lines(),
        following=[*words, "--methods", str(folder)],
    )
