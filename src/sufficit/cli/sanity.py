"""`sufficit sanity`."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from sufficit.cli.console import app, out, print_skipped, resumable, say, say_next, table
from sufficit.cli.options import OutOption, OverwriteOption, run_options
from sufficit.files import check_output, place
from sufficit.outside import literal
from sufficit.runs.config import MODEL, RunConfig

if TYPE_CHECKING:
    from sufficit.sanity import SanityReport

OPTIONS = (
    *(*MODEL, "data", "images", "methods", "targets", "image_column", "label_column"),
    *("on_error", "seed"),
)

NOTHING_KEPT = (
    "a check keeps nothing before its end. Run the same command again; fewer --images or --steps"
    " take less time."
)


@app.command()
@run_options(*OPTIONS, defaults={"methods": ("gradcam", "center"), "images": 64})
def sanity(
    config: RunConfig,
    steps: Annotated[int, typer.Option(help="Most blocks to randomise, one by one.", min=1)] = 8,
    to: OutOption = "sufficit-sanity",
    overwrite: OverwriteOption = False,
) -> None:
    """Check that heatmaps depend on the model: randomise its layers and compare.

    **Examples**

    sufficit sanity --model torchvision:resnet50 --data photos --methods gradcam,kpca-cam,center

    sufficit sanity --model saved/birds --data birds --methods birds-lax,gradcam,center
    """
    out_folder, data = place(to), place(config.data)
    check_output(out_folder, [data], overwrite=overwrite, command="sanity")
    from sufficit.runs.job import load_model
    from sufficit.sanity import check_folder, save_sanity

    classifier = load_model(
        replace(config, layer=None)
    )  # check_folder looks for the layer in each copy
    with resumable(out_folder, NOTHING_KEPT):
        result = check_folder(config, classifier, steps=steps)
        known = {name: getattr(config, name) for name in OPTIONS}
        save_sanity(out_folder, result, classifier, known | {"options": {"steps": steps}})
    print_skipped(result.skipped)
    _print_report(result.report)
    say(f"Written to {out_folder}: report.html, sanity.csv, sanity.png, run.json")
    methods = ",".join(config.methods)
    say_next(
        *("sufficit", "compare", "--model", config.model, "--data", config.data),
        *("--methods", methods),
    )


def _print_report(report: "SanityReport") -> None:
    """A row per method: its rank correlation after the first, a middle and the last step."""
    n = len(report.targets)
    title = f"Rank correlation with the original maps, mean over {n} images"
    steps = report.cascade_of(report.methods[0])
    shown = sorted({0, len(steps) // 2, len(steps) - 1})
    words = [f"{'down to ' if i else ''}{steps[i].layer} random" for i in shown]
    drawn = table(title, ["method", *words], title_style="bold")
    for name in report.methods:
        steps = report.cascade_of(name)
        found = [steps[i] for i in shown]
        means = (f"{float(one.rank_correlation.nanmean()):.2f}" for one in found)
        drawn.add_row(literal(name), *means)
    out.print(drawn)
    for name, sentence in report.sentences().items():
        method = literal(name)
        method.stylize("bold")
        out.print(method, literal(sentence), highlight=False)
