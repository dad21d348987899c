"""`sufficit evaluate`."""

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from sufficit.cli.console import (
    app,
    out,
    print_skipped,
    resumable,
    say,
    say_next,
    scored,
    table,
    warn,
)
from sufficit.cli.options import JsonOption, OutOption, OverwriteOption, run_options, shown_options
from sufficit.files import check_output, place
from sufficit.outside import literal
from sufficit.runs.config import RunConfig, Workers

if TYPE_CHECKING:
    from rich.table import Table

    from sufficit.runs.results import RunResults

NOT_OF_A_FILE = ("methods", "layer", "quick")  # options of compare
OPTIONS = ("normalize", *shown_options(*NOT_OF_A_FILE))
DEFAULTS = {"checks": ("none",), "calls": "exact"}
SOURCE = "heatmaps"


@app.command()
@run_options(*OPTIONS, defaults=DEFAULTS, toml=True)
def evaluate(
    config: RunConfig,
    workers: Workers | None,
    heatmaps: Annotated[
        str,
        typer.Option(
            help="Heatmaps as .npz or .safetensors, keyed by image.", rich_help_panel="Input"
        ),
    ],
    to: OutOption = "sufficit-run",
    as_json: JsonOption = False,
    overwrite: OverwriteOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print model calls.")
    ] = False,
) -> None:
    """Score the heatmaps in a file, of any method, on your own model and images.

    A heatmap covers what the model sees: the image after resizing and cropping to its input. Run
    the same command again to resume an interrupted run.

    **Examples**

    sufficit evaluate --model torchvision:resnet50 --data photos --heatmaps gradcam.npz

    sufficit evaluate --model saved/birds --data birds --heatmaps lax.safetensors --alpha-min search

    sufficit evaluate --model timm:resnet50 --data photos --heatmaps a.npz --json > scores.json

    sufficit evaluate --model saved/birds --data birds --heatmaps a.npz --checks leak,fill
    """
    from sufficit.report.interpretation import control_words, unmarked_remark
    from sufficit.sums import few_images

    config = replace(config, methods=(f"{SOURCE}={heatmaps}",))
    out_folder, data = place(to), place(config.data)
    check_output(out_folder, [data], command="evaluate")
    with resumable(out_folder):
        results = scored(config, out_folder, as_json=as_json, overwrite=overwrite, workers=workers)
    print_skipped(results.skipped, results.record.n_skipped)
    if as_json:
        typer.echo(json.dumps(results.as_json(), indent=2, allow_nan=False))
        return
    out.print(_summary_table(results))
    if results.record.targets == "label":
        clean = f"{results.record.clean_accuracy:.1%}"
        out.print(f"Targets: the labels. The model classifies {clean} of whole images correctly.")
        if results.record.clean_accuracy < 0.5:
            warn("the model misses most labels: are they its own classes?")
    else:
        out.print("Targets: the model's own predictions.")
    for sentence in results.made():
        say(sentence)
    if results.controls and results.standing is not None and results.shown is not None:
        say(control_words(results.content()))
    leak_warning = results.record.leak_warnings.get(SOURCE)  # those of controls are no news
    dim = {name: k for name, k in results.unmarked.items() if name not in results.unranked}
    marked = [unmarked_remark(results.n, dim, results.alpha_min)] if dim else []
    for remark in (*results.remarks(), *marked, few_images(results.n), leak_warning):
        if remark is not None:
            warn(remark)
    if verbose:
        calls = results.rows.column(SOURCE, "calls")
        out.print(f"Model calls: {int(calls.sum())}, {calls.min()} to {calls.max()} per image.")
    say(f"Results: {out_folder}", soft_wrap=True)
    say_next("sufficit", "report", out_folder)


def _summary_table(results: "RunResults") -> "Table":
    """One row per column: direction, mean, interval."""
    searched = " (searched)" if results.record.search else ""
    images = f"{results.n} image{'s' if results.n > 1 else ''}"
    title = f"{images}, alpha_min {results.alpha_min:g}{searched}"
    heads = ("column", "better", "mean", "95 % interval")
    drawn = table(title, heads, left=2, title_style="bold")
    for name, found in results.summaries[SOURCE].items():
        interval = "-" if math.isnan(found.low) else f"{found.low:.3f} .. {found.high:.3f}"
        nan = f" ({found.n_nan} NaN)" if found.n_nan else ""
        arrow = {True: "higher", False: "lower", None: "-"}[found.higher_is_better]
        style = "bold" if name == "msi" else None
        drawn.add_row(literal(name), arrow, f"{found.mean:.3f}{nan}", interval, style=style)
    return drawn
