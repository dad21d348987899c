"""`sufficit evaluate`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sufficit.cli.app import app, out, print_skipped
from sufficit.cli.options import JsonOption, OutOption, OverwriteOption, config_of, run_options
from sufficit.files import check_output
from sufficit.runs.config import Workers

OPTIONS = (
    *("model", "data", "alpha_min", "score", "fill", "held_out_fill", "columns", "targets"),
    *("normalize", "leak", "donors", "value_step", "percent_step", "batch_size", "device"),
    *("precision", "weights", "num_classes", "size", "on_error", "seed"),
)


@app.command()
@run_options(*OPTIONS, defaults={"leak": False})
def evaluate(
    given: dict[str, Any],
    workers: Workers | None,
    heatmaps: Annotated[
        Path,
        typer.Option(
            help="Heatmaps as .npz or .safetensors, keyed by image.", rich_help_panel="Input"
        ),
    ],
    out_folder: OutOption = Path("sufficit-run"),
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

    sufficit evaluate --model saved/birds --data birds --heatmaps a.npz --leak --held-out-fill blur
    """
    fixed = {"methods": [f"heatmaps={heatmaps}"], "controls": False, "alpha_curve": False}
    config = config_of({"leak": False} | given, **fixed)
    check_output(out_folder, [Path(config.data)], overwrite=overwrite, command="evaluate")
    from sufficit.runs.engine import run
    from sufficit.runs.job import make_job

    progress = False if as_json else None
    results = run(
        make_job(config),
        out_folder,
        overwrite=overwrite,
        flat=True,
        progress=progress,
        workers=workers,
    )
    print_skipped(results.skipped)
    if as_json:
        typer.echo(json.dumps(results.as_json(), indent=2, allow_nan=False))
        return
    out.print(results.table())
