"""`sufficit compare`."""

import json
from pathlib import Path
from typing import Any

import typer

from sufficit.cli.app import app, print_skipped
from sufficit.cli.options import (
    ConfigOption,
    JsonOption,
    OutOption,
    OverwriteOption,
    config_of,
    run_options,
)
from sufficit.files import check_output
from sufficit.runs.config import Workers

OPTIONS = (
    *("model", "data", "methods", "controls", "alpha_min", "score", "fill", "held_out_fill"),
    *("targets", "leak", "donors", "alpha_curve", "columns", "value_step", "percent_step"),
    *("layer", "normalize", "batch_size", "device", "precision", "weights", "num_classes"),
    *("size", "on_error", "save_heatmaps", "seed"),
)


@app.command()
@run_options(*OPTIONS)
def compare(
    given: dict[str, Any],
    workers: Workers | None,
    config: ConfigOption = None,
    out_folder: OutOption = Path("sufficit-compare"),
    as_json: JsonOption = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Which method explains your model best? Score every method on every image.

    Run the same command again to resume an interrupted run.

    **Examples**

    sufficit compare --model torchvision:resnet50 --data photos --methods gradcam,layercam

    sufficit compare --model saved/birds --data birds --methods gradcam,birds-lax,maps.npz

    sufficit compare --model saved/birds --data birds --methods mine=python:mine.py:my_method

    sufficit compare --config sufficit-compare/RUN.toml --seed 1 --out again

    sufficit compare --model timm:resnet50 --data 'web/{000..099}.tar' --targets prediction
    """
    settings = config_of(given, config)
    check_output(out_folder, [Path(settings.data)], overwrite=overwrite, command="compare")
    from sufficit.runs.engine import run
    from sufficit.runs.job import make_job

    progress = False if as_json else None
    results = run(
        make_job(settings), out_folder, overwrite=overwrite, progress=progress, workers=workers
    )
    print_skipped(results.skipped)
    if as_json:
        typer.echo(json.dumps(results.as_json(), indent=2, allow_nan=False))
