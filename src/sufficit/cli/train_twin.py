"""`sufficit train-twin`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sufficit.cli.console import app, out, print_skipped, table
from sufficit.cli.options import run_options
from sufficit.cli.training_run import OPTIONS, print_written, stopped_early, train_on_folder
from sufficit.declared import Processes, TwinOptions
from sufficit.files import place
from sufficit.runs.config import RunConfig


@app.command("train-twin")
@run_options(*OPTIONS, more=(TwinOptions, Processes))
def train_twin(
    config: RunConfig,
    further: dict[str, Any],
    to: Annotated[str, typer.Option("--out", help="Folder for the twin.")],
) -> None:
    """Train a twin: a copy of the model, tuned on masked images, as a second judge of explanations.

    It learns from images under random masks and never sees an explanation. The model does not
    change. Run the same command again to resume an interrupted run.

    **Examples**

    sufficit train-twin --model saved/birds --data birds --out birds-twin

    sufficit train-twin --model torchvision:resnet50 --data photos --out twin --precision bf16
    """
    from sufficit.training.train_folder import train_twin_folder

    record = train_on_folder(
        "train-twin", config, place(to), train_twin_folder, TwinOptions, further
    )
    if record is not None:
        _print_record(record, place(to), config)


def _print_record(record: dict[str, Any], folder: Path, config: RunConfig) -> None:
    """The accuracy of model and twin on whole and on masked images, and what to do next."""
    print_skipped(record["skipped"])
    n, history = record["n_validated_on"], record["history"]
    title = f"{n} held-out images; accuracy against {record['accuracy_of']}"
    drawn = table(title, ("", "whole images", "under random masks"), title_style="bold")
    for name in ("original", "twin"):
        accuracies = (record[name][f"{kind}_accuracy"] for kind in ("whole", "masked"))
        drawn.add_row(name, *(f"{value:.1%}" for value in accuracies))
    out.print(drawn)
    epochs = f"{len(history)} epoch{'s' if len(history) > 1 else ''}"
    made, by = record["config"], "by the loss on held-out images"
    end = stopped_early(history, made["epochs"], made["batches"], by)
    words = ["sufficit", "compare", "--model", config.model, "--data", config.data]
    print_written(
        folder,
        "classifier.json, classifier.safetensors, checkpoint.pt, history.csv, run.json",
        f"Trained on {record['n_trained_on']} images for {epochs}; selected epoch"
        f" {record['best_epoch']}.{end}",
        following=[*words, "--twin", str(folder)],
    )
