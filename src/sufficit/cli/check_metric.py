"""`sufficit check-metric`."""

import json
import math
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.table import Table

from sufficit.cli.console import app, out, print_skipped, resumable, say, table
from sufficit.cli.options import JsonOption, OutOption, OverwriteOption, run_options
from sufficit.files import check_output, place
from sufficit.runs.config import RunConfig, Workers

if TYPE_CHECKING:
    from sufficit.sanity.metric_check import MetricCheck

OPTIONS = (
    *("model", "data", "truth", "methods", "alpha_min", "score", "fill", "targets", "columns"),
    *("calls", "value_step", "percent_step", "layer", "compile", "batch_size", "unit_size"),
    *("device", "precision", "weights", "num_classes", "output", "size", "image_column"),
    *("label_column", "on_error", "images", "seed"),
)


@app.command("check-metric")
@run_options(*OPTIONS, defaults={"images": 100})
def check_metric(
    config: RunConfig,
    workers: Workers | None,
    to: OutOption = "sufficit-check",
    as_json: JsonOption = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Which columns tell good heatmaps from worse ones, for your model and images?

    The truth, or the heatmaps of the best method, are mixed with noise, shifted, eroded and dilated
    in five levels. A column is right about two levels if the lesser change scores better. Run the
    same command again to resume an interrupted run.

    **Examples**

    sufficit check-metric --model saved/birds --data CUB/images --truth CUB

    sufficit check-metric --model torchvision:resnet50 --data photos --methods gradcam,layercam
    """
    folder, data = place(to), place(config.data)
    check_output(folder, [data], overwrite=overwrite, command="check-metric")
    from sufficit.sanity.metric_check import check_metric as check

    how: Any = {"overwrite": overwrite, "workers": workers}
    with resumable(folder, "the units that are done are kept. Run the same command again."):
        found = check(config, folder, progress=False if as_json else None, **how)
    print_skipped(found.results.skipped, found.results.record["n_skipped"])
    found.save(folder)
    if as_json:
        typer.echo(json.dumps(json.loads((folder / "check.json").read_text()), indent=2))
        return
    out.print(check_table(found))
    say(
        "Share of pairs of levels in the right order; 0.5 is chance. By means: of the means"
        " over the images, with a 95 % interval. By image: of the values of single images."
    )
    say(
        f"Written to {folder}: check.csv, check.json, check.png, degraded (the run)", soft_wrap=True
    )


def check_table(found: "MetricCheck") -> Table:
    """One row per column, best first: all degradations, then each."""
    title = f"{found.base} made worse in five levels, {found.n} images"
    frame = found.frame().set_index(["column", "degradation"])
    kinds = [kind for kind in dict.fromkeys(frame.index.get_level_values(1)) if kind != "all"]
    heads = ["column", "by means", "95 %", *kinds, "by image"]  # all fit into 80 letters
    drawn = table(title, heads, no_wrap=True, box=box.SIMPLE_HEAD, padding=0)
    for column in dict.fromkeys(frame.index.get_level_values(0)):
        whole = frame.loc[(column, "all")]
        ends = f"{whole.by_mean_low:.2f}..{whole.by_mean_high:.2f}"
        each = [_cell(frame.loc[(column, kind)].by_mean) for kind in kinds]
        cells = [_cell(whole.by_mean), ends, *each, _cell(whole.by_image)]
        drawn.add_row(column, *cells, style="bold" if column == "msi" else None)
    return drawn


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
