"""`sufficit evaluate`."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from sufficit.cli.app import app, err, out, print_skipped
from sufficit.cli.options import (
    AlphaOption,
    BatchOption,
    ClassesOption,
    DataOption,
    DeviceOption,
    DevicesOption,
    FillOption,
    HeldOutFillOption,
    JsonOption,
    ModelOption,
    NodesOption,
    OnError,
    OnErrorOption,
    OutOption,
    OverwriteOption,
    PercentStepOption,
    Precision,
    PrecisionOption,
    Score,
    ScoreOption,
    SizeOption,
    Targets,
    TargetsOption,
    ValueStepOption,
    WeightsOption,
)
from sufficit.crews import leads
from sufficit.files import check_output

if TYPE_CHECKING:
    from sufficit.classifier.classifier import Classifier
    from sufficit.results import Estimate
    from sufficit.scored import FolderScores


@app.command()
def evaluate(
    model: ModelOption,
    data: DataOption,
    heatmaps: Annotated[
        Path, typer.Option(help="Heatmaps as .npz or .safetensors, keyed by image.")
    ],
    out_folder: OutOption = Path("sufficit-run"),
    alpha_min: AlphaOption = "0.5",
    score: ScoreOption = Score.accuracy,
    fill: FillOption = "black",
    columns: Annotated[
        str | None, typer.Option(help="Some columns only, as in msi,base_score.")
    ] = None,
    targets: TargetsOption = Targets.auto,
    normalize: Annotated[bool, typer.Option(help="Stretch each heatmap to 0..1 first.")] = False,
    value_step: ValueStepOption = 0.01,
    percent_step: PercentStepOption = 0.02,
    batch_size: BatchOption = None,
    device: DeviceOption = "auto",
    devices: DevicesOption = 1,
    num_nodes: NodesOption = 1,
    precision: PrecisionOption = Precision.fp32,
    weights: WeightsOption = "default",
    num_classes: ClassesOption = None,
    size: SizeOption = None,
    on_error: OnErrorOption = OnError.skip,
    leak: Annotated[
        bool, typer.Option("--leak", help="Also whether masks tell the class by their shape alone.")
    ] = False,
    donors: Annotated[
        int, typer.Option(help="Images of other classes under each mask, for --leak.", min=1)
    ] = 16,
    held_out_fill: HeldOutFillOption = None,
    seed: Annotated[int, typer.Option(help="Of the bootstrap and of donors.", min=0)] = 0,
    as_json: JsonOption = False,
    overwrite: OverwriteOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also model calls and set-up.")
    ] = False,
) -> None:
    """Score heatmaps of any method on your own model and images.

    A heatmap covers what the model sees: the image after resizing and cropping to its input.

    **Examples**

    sufficit evaluate --model torchvision:resnet50 --data photos --heatmaps gradcam.npz

    sufficit evaluate --model saved/birds --data birds --heatmaps lax.safetensors --alpha-min search

    sufficit evaluate --model timm:resnet50 --data photos --heatmaps a.npz --json > scores.json

    sufficit evaluate --model saved/birds --data birds --heatmaps a.npz --leak --held-out-fill blur

    sufficit evaluate --model saved/birds --data birds --heatmaps a.npz --devices 8
    """
    first = leads(devices, num_nodes)
    if first:
        check_output(out_folder, [data], overwrite=overwrite, command="evaluate")
    from sufficit.parsing import alpha_from, classifier_from, columns_from, device_from, fill_from
    from sufficit.scored import Options, save_run
    from sufficit.scoring import score_folder
    from sufficit.training.processes import crew_for

    alpha, wanted = alpha_from(alpha_min), columns_from(columns)
    with crew_for(device_from(device), devices, num_nodes) as crew:
        place = crew.device or device
        classifier = classifier_from(model, weights, num_classes, size, place, precision)
        options = Options(
            alpha_min=alpha,
            score=score.value,
            fill=fill_from(fill, classifier),
            value_step=value_step,
            percent_step=percent_step,
            batch_size=batch_size,
            columns=wanted,
            held_out_fill=None if held_out_fill is None else fill_from(held_out_fill, classifier),
            leak_donors=donors if leak else 0,
            targets=targets.value,
            normalize=normalize,
            on_error=on_error.value,
            seed=seed,
            progress=False if as_json else None,
        )
        result = score_folder(
            classifier, data, heatmaps, options, out=out_folder, crew=crew, overwrite=overwrite
        )
    if result is None:
        return
    config: dict[str, Any] = {"model": model, "weights": weights}
    config |= {"data": str(data), "heatmaps": str(heatmaps), "fill": fill}
    config |= {"held_out_fill": held_out_fill}
    config |= {"size": size, "precision": precision.value, "num_classes": num_classes}
    save_run(out_folder, result, classifier, config, options)
    print_skipped({skipped.name: skipped.reason for skipped in result.skipped})
    if as_json:
        typer.echo(json.dumps(_report(result), indent=2, allow_nan=False))
        return
    _print_result(result, verbose, classifier)
    out.print(
        f"Written to {out_folder}: scores.parquet, curves.parquet, curves.png, summary.json,"
        " run.json"
    )


def _report(result: "FolderScores") -> dict[str, Any]:
    from sufficit.results import as_json, plain
    from sufficit.scored import run_facts

    return {**plain(run_facts(result)), "columns": as_json(result.summary)}


def _print_result(result: "FolderScores", verbose: bool, classifier: "Classifier") -> None:
    scores = result.scores
    title = f"{len(scores)} images, alpha_min {scores.alpha_min:g}"
    out.print(summary_table(title + (" (searched)" if scores.search else ""), result.summary))
    clean = float(scores.clean.nanmean())
    if math.isnan(clean):
        out.print("The model answered NaN for every image: nothing could be scored.")
    elif result.target_kind == "label":
        out.print(f"Scored for the labels; of the whole images the model gets {clean:.1%} right.")
        if clean < 0.5:
            err.print("[yellow]Warning:[/] it misses most labels: is this the model's own task?")
    else:
        out.print("Scored for the model's own predictions.")
    if verbose:
        calls = scores.calls
        out.print(
            f"Model calls: {int(calls.sum())} in all, {calls.min()} to {calls.max()} an image; "
            f"{classifier!r} on {classifier.device}, {classifier.dtype}."
        )


def summary_table(title: str, summary: dict[str, "Estimate"]) -> Table:
    """One row a column: direction, mean, interval."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("column")
    table.add_column("better")
    table.add_column("mean", justify="right")
    table.add_column("95 % interval", justify="right")
    for name, estimate in summary.items():
        interval = (
            "-" if estimate.low != estimate.low else f"{estimate.low:.3f} .. {estimate.high:.3f}"
        )
        nan = f" ({estimate.n_nan} NaN)" if estimate.n_nan else ""
        arrow = {True: "higher", False: "lower", None: "-"}[estimate.higher_is_better]
        style = "bold" if name == "msi" else None
        table.add_row(name, arrow, f"{estimate.mean:.3f}{nan}", interval, style=style)
    return table
