"""`sufficit train-lax`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sufficit.cli.console import app, out, print_skipped, say, table
from sufficit.cli.options import run_options
from sufficit.cli.training_run import OPTIONS, print_written, stopped_early, train_on_folder
from sufficit.declared import FolderOptions, Processes
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
    "insertion": "insertion",
    "size": "size",
    "msi": "MSI",
    "leak": "leak",
    "leak_chance": "chance",
    "fragments": "parts",
}
RECIPE = ("recipe", "epochs", "area", "alpha_min", "class_free")
TARGETS = {"label": "labels of their folders", "prediction": "model's own predictions"}


@app.command("train-lax")
@run_options(*OPTIONS, "targets", more=(FolderOptions, Processes))
def train_lax(
    config: RunConfig,
    further: dict[str, Any],
    to: Annotated[str, typer.Option("--out", help="Folder for the adapter.")],
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
    from sufficit.training import train_folder
    from sufficit.training.recipes import recipe_of

    recipe_of(*(further[name] for name in RECIPE))  # raises before a model is loaded
    if further["target"] == "auto":
        further["target"] = config.targets
    outcome = train_on_folder(
        "train-lax", config, place(to), train_folder, FolderOptions, further, announce=say
    )
    if outcome is not None:
        _print_outcome(outcome, place(to), config)


def _print_outcome(outcome: "TrainingOutcome", folder: Path, config: RunConfig) -> None:
    """A row for each of the last epochs and for the best one, and what to do next."""
    record = outcome.record
    print_skipped(record["skipped"])
    history, best = record["history"], record["best_epoch"]
    number = f"{len(history)} epoch{'s' if len(history) > 1 else ''}"
    title = f"{number}, scored on {record['n_validated_on']} held-out images; * selected"
    names = [name for name in HEADINGS if any(name in row for row in history)]
    headings = [HEADINGS[name] for name in names]
    # Without a box and edges it fits 80 columns.
    drawn = table(title, ("epoch", *headings), left=0, title_style="bold", box=None, pad_edge=False)
    for row in history:
        if row["epoch"] == best or row["epoch"] > len(history) - ROWS:
            mark, style = ("*", "bold") if row["epoch"] == best else (" ", None)
            cells = (f"{row[name]:.3f}" if name in row else "-" for name in names)
            drawn.add_row(f"{row['epoch']} {mark}", *cells, style=style)
    out.print(drawn)
    trained, by = record["trained"], "by MSI and leakage"
    planned = trained["recipe"]["epochs"] or len(history)
    end = stopped_early(history, planned, trained["batches"], by)
    made = f"Trained on {record['n_trained_on']} images for the {TARGETS[record['targets']]}."
    if outcome.lax.class_free:
        made = (
            f"Trained on {record['n_trained_on']} images, class-free: it draws one map per image,"
            " whichever class is asked for. Targets in training: the"
            f" {TARGETS[record['targets']]}."
        )
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
        f"{made}{end}",
        outcome.in_words(),
        *outcome.trust.lines(),
        following=[*words, "--methods", str(folder)],
    )
