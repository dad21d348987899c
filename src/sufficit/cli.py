"""The command line: parse, call one function, print. Torch is imported by the commands alone."""

import json
import os
import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sufficit import __version__
from sufficit.errors import UserError, unknown
from sufficit.files import check_output

if TYPE_CHECKING:
    from sufficit.classifiers import Classifier
    from sufficit.results import Estimate
    from sufficit.scoring import FolderScores

app = typer.Typer(
    name="sufficit",
    help="Score visual explanations of image classifiers. Start with: sufficit demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)


class Score(StrEnum):
    """What a masked image scores."""

    accuracy = "accuracy"
    confidence = "confidence"


class Precision(StrEnum):
    """The dtype of the model's weights and inputs."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Targets(StrEnum):
    """Which class an image is scored for."""

    auto = "auto"
    label = "label"
    prediction = "prediction"


class OnError(StrEnum):
    """What an image that can't be scored does."""

    skip = "skip"
    stop = "stop"


def main() -> None:
    """Run the command line; what the user can mend is one line, not a traceback."""
    warnings.showwarning = _show_warning
    try:
        app()
    except UserError as error:
        err.print("[bold red]Error:[/]", _literal(str(error)))
        sys.exit(2)
    except Exception as error:
        if os.environ.get("SUFFICIT_TRACEBACK"):
            raise
        err.print("[bold red]Error:[/]", _literal(f"{type(error).__name__}: {error}"))
        err.print(
            "This came from the model, a library or Sufficit; SUFFICIT_TRACEBACK=1 shows where."
        )
        sys.exit(1)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Score visual explanations of image classifiers. Start with: sufficit demo"""
    if version:
        typer.echo(f"sufficit {__version__}")
        raise typer.Exit


ModelOption = Annotated[
    str,
    typer.Option(
        help="torchvision:NAME, timm:NAME, transformers:NAME, a saved classifier's folder, or your"
        " own python:FILE.py:FUNCTION."
    ),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
WeightsOption = Annotated[
    str,
    typer.Option(help="default (published), none (random), or a .safetensors, .pt or .pth file."),
]
ClassesOption = Annotated[
    int | None,
    typer.Option("--num-classes", help="Number of classes, for weights of your own.", min=2),
]
LayerOption = Annotated[
    str | None, typer.Option(help="Feature layer by name; found by itself for most models.")
]
SizeOption = Annotated[
    str | None, typer.Option(help="What the model sees: 224 or 224x320 (height x width).")
]


@app.command()
def evaluate(
    model: ModelOption,
    data: Annotated[Path, typer.Option(help="Folder of images; class folders give labels.")],
    heatmaps: Annotated[
        Path, typer.Option(help="Heatmaps as .npz or .safetensors, keyed by image.")
    ],
    out_folder: Annotated[Path, typer.Option("--out", help="Where results go.")] = Path(
        "sufficit-run"
    ),
    alpha_min: Annotated[str, typer.Option(help="A number in 0..1, or search.")] = "0.5",
    score: Annotated[Score, typer.Option(help="What a masked image scores.")] = Score.accuracy,
    fill: Annotated[
        str, typer.Option(help="black, mean, blur, noise, or an image file.")
    ] = "black",
    columns: Annotated[
        str | None, typer.Option(help="Some columns only, as in msi,base_score.")
    ] = None,
    targets: Annotated[
        Targets, typer.Option(help="auto: labels where there are any.")
    ] = Targets.auto,
    normalize: Annotated[bool, typer.Option(help="Stretch each heatmap to 0..1 first.")] = False,
    value_step: Annotated[float, typer.Option(help="Step of the pixel-value curves.")] = 0.01,
    percent_step: Annotated[float, typer.Option(help="Step of the percentage curves.")] = 0.02,
    batch_size: Annotated[
        int | None, typer.Option(help="Masked images a model call.", min=1)
    ] = None,
    device: DeviceOption = "auto",
    precision: Annotated[Precision, typer.Option(help="Of weights and inputs.")] = Precision.fp32,
    weights: WeightsOption = "default",
    num_classes: ClassesOption = None,
    size: SizeOption = None,
    on_error: Annotated[OnError, typer.Option(help="For unreadable images.")] = OnError.skip,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.", min=0)] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON only.")
    ] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier run in --out.")] = False,
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
    """
    check_output(out_folder, [data], overwrite=overwrite)
    from sufficit.parsing import alpha_from, classifier_from, columns_from, fill_from
    from sufficit.scoring import Options, save_run, score_folder

    alpha, wanted = alpha_from(alpha_min), columns_from(columns)
    classifier = classifier_from(model, weights, num_classes, size, device, precision)
    options = Options(
        alpha_min=alpha,
        score=score.value,
        fill=fill_from(fill, classifier),
        value_step=value_step,
        percent_step=percent_step,
        batch_size=batch_size,
        columns=wanted,
        targets=targets.value,
        normalize=normalize,
        on_error=on_error.value,
        seed=seed,
        progress=False if as_json else None,
    )
    result = score_folder(classifier, data, heatmaps, options)
    config: dict[str, Any] = {"model": model, "weights": weights}
    config |= {"data": str(data), "heatmaps": str(heatmaps), "fill": fill}
    config |= {"size": size, "precision": precision.value, "num_classes": num_classes}
    save_run(out_folder, result, classifier, config, options)
    _print_skipped({skipped.name: skipped.reason for skipped in result.skipped})
    if as_json:
        typer.echo(json.dumps(_report(result), indent=2, allow_nan=False))
        return
    _print_result(result, verbose, classifier)
    out.print(
        f"Written to {out_folder}: scores.parquet, curves.parquet, curves.png, summary.json,"
        " run.json"
    )


@app.command()
def explain(
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    model: ModelOption,
    method: Annotated[
        str, typer.Option("--method", "-m", help="Methods by name, as in gradcam,layercam.")
    ] = "gradcam",
    target: Annotated[
        str | None,
        typer.Option(help="One class for all images, by number or name."),
    ] = None,
    targets: Annotated[
        Targets, typer.Option(help="Without --target. auto: labels where there are any.")
    ] = Targets.auto,
    out_folder: Annotated[Path, typer.Option("--out", help="Where the pictures go.")] = Path(
        "sufficit-explain"
    ),
    layer: LayerOption = None,
    device: DeviceOption = "auto",
    precision: Annotated[Precision, typer.Option(help="Of weights and inputs.")] = Precision.fp32,
    weights: WeightsOption = "default",
    num_classes: ClassesOption = None,
    size: SizeOption = None,
    on_error: Annotated[OnError, typer.Option(help="For unreadable images.")] = OnError.skip,
    seed: Annotated[int, typer.Option(help="Of the method random.", min=0)] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier run in --out.")] = False,
) -> None:
    """Draw heatmaps: overlays, one sheet of all, and files that `sufficit evaluate` reads.

    **Examples**

    sufficit explain cat.jpg --model torchvision:resnet50

    sufficit explain photos --model timm:vit_tiny_patch16_224 --method gradcam,rollout

    sufficit explain a.jpg b.jpg --model torchvision:resnet18 --method finer-cam --target tabby
    """
    check_output(out_folder, images, overwrite=overwrite)
    from sufficit.drawing import Wanted, class_number, explain_pictures, pictures_of, save_drawn
    from sufficit.explainers import EXPLAINERS
    from sufficit.parsing import classifier_from

    methods = [part.strip() for part in method.split(",") if part.strip()]
    for name in methods:
        if name not in EXPLAINERS:
            raise unknown("method", name, EXPLAINERS)
    pictures = pictures_of(images)
    classifier = classifier_from(model, weights, num_classes, size, device, precision)
    wanted: Wanted = targets.value
    if target is not None:
        wanted = class_number(target, classifier.classes)
    drawn = explain_pictures(
        classifier, pictures, methods, wanted, layer=layer, seed=seed, on_error=on_error.value
    )
    config: dict[str, Any] = {"model": model, "weights": weights, "methods": methods}
    config["target"] = wanted
    config |= {"layer": layer or classifier.layer, "size": size, "seed": seed}
    _print_skipped(drawn.skipped)
    for path in save_drawn(out_folder, drawn, classifier, config):
        out.print(str(path), highlight=False, markup=False)


@app.command()
def methods() -> None:
    """List the explanation methods.

    **Example**

    sufficit methods
    """
    from sufficit.explainers import EXPLAINERS

    table = Table("method", "what it draws", box=None)
    for name, explainer in EXPLAINERS.items():
        table.add_row(name, explainer.description)
    out.print(table)


@app.command()
def models(
    pattern: Annotated[str, typer.Argument(help="Only names that contain this.")] = "",
) -> None:
    """List the models that can be loaded by name.

    **Examples**

    sufficit models

    sufficit models resnet
    """
    from sufficit.sources import known_models

    table = Table("model", "about", box=None)
    shown = [(name, about) for name, about in known_models() if pattern.lower() in name.lower()]
    for name, about in shown:
        table.add_row(name, about)
    if not shown:
        raise UserError(f"no model's name contains {pattern!r}: try sufficit models")
    out.print(table)
    out.print("Also transformers:NAME from the hub, a saved one's folder, python:FILE.py:FUNCTION.")


@app.command()
def demo(
    out_folder: Annotated[Path, typer.Option("--out", help="Where the pictures go.")] = Path(
        "sufficit-demo"
    ),
    images: Annotated[int, typer.Option(help="How many digits to score.", min=2, max=1000)] = 32,
    seed: Annotated[int, typer.Option(help="Which digits.", min=0)] = 0,
) -> None:
    """Explain and score a small digit classifier: no download, about two minutes on two cores.

    **Examples**

    sufficit demo

    sufficit demo --images 200 --out my-demo
    """
    check_output(out_folder)
    from sufficit.demo import run_demo

    run_demo(out_folder, images, seed, out)


def _literal(text: str) -> str:
    """Text in which square brackets are no markup."""
    return text.replace("[", r"\[")


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    err.print("[yellow]Warning:[/]", _literal(str(message)))


def _report(result: "FolderScores") -> dict[str, Any]:
    from sufficit.results import as_json, plain
    from sufficit.scoring import run_facts

    return {**plain(run_facts(result)), "columns": as_json(result.summary)}


def _print_skipped(skipped: dict[str, str]) -> None:
    for name, reason in list(skipped.items())[:10]:
        err.print("[yellow]Skipped[/]", _literal(f"{name}: {reason}"))
    if skipped:
        err.print(f"{len(skipped)} images skipped; run.json names all of them.")


def _print_result(result: "FolderScores", verbose: bool, classifier: "Classifier") -> None:
    scores = result.scores
    title = f"{len(scores)} images, alpha_min {scores.alpha_min:g}"
    out.print(summary_table(title + (" (searched)" if scores.search else ""), result.summary))
    clean = float(scores.clean.nanmean())
    if result.target_kind == "label":
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
        arrow = "higher" if estimate.higher_is_better else "lower"
        style = "bold" if name == "msi" else None
        table.add_row(name, arrow, f"{estimate.mean:.3f}{nan}", interval, style=style)
    return table


if __name__ == "__main__":
    main()
