"""`sufficit explain`."""

from dataclasses import replace
from typing import Annotated

import typer

from sufficit.cli.console import app, print_skipped, resumable, say, warn
from sufficit.cli.options import OutOption, OverwriteOption, run_options
from sufficit.errors import UserError
from sufficit.files import check_output, place
from sufficit.runs.config import RunConfig, Workers

OPTIONS = (
    *("model", "methods", "targets", "layer", "normalize", "weights", "num_classes", "prompts"),
    *("output", "size", "on_error"),
    *("device", "precision", "seed"),
)
DEFAULTS = {"methods": ("gradcam",), "data": "", "checks": ("none",)}


@app.command()
@run_options(*OPTIONS, defaults=DEFAULTS)
def explain(
    config: RunConfig,
    workers: Workers | None,
    images: Annotated[list[str], typer.Argument(help="Image files, or folders of them.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="One class for all images, by number or name.", rich_help_panel="Methods"
        ),
    ] = None,
    to: OutOption = "sufficit-explain",
    overwrite: OverwriteOption = False,
) -> None:
    """Draw heatmaps: overlays, sheets of all images, and files that `sufficit evaluate` reads.

    Run the same command again to resume an interrupted run.

    **Examples**

    sufficit explain cat.jpg --model torchvision:resnet50

    sufficit explain photos --model timm:vit_tiny_patch16_224 --methods gradcam,rollout

    sufficit explain a.jpg b.jpg --model torchvision:resnet18 --methods finer-cam --target tabby

    sufficit explain photos --model saved/birds --methods birds-lax,gradcam
    """
    if target is not None and config.targets != "auto":
        raise UserError(
            f"--target {target} sets one class for all images, --targets {config.targets} one per"
            " image: give one of them"
        )
    config = replace(config, data=" ".join(images))
    out_folder, given_images = place(to), [place(word) for word in images]
    check_output(out_folder, given_images, command="explain")
    from sufficit.report.interpretation import run_remarks
    from sufficit.runs.job import load_model, make_job
    from sufficit.runs.overlays import SHEET_ROWS, class_number, explain_run, images_in
    from sufficit.runs.workers import spreading

    source = images_in(given_images)
    classifier = load_model(replace(config, layer=None))
    if target is not None:
        config = replace(config, targets="prediction")
    job = make_job(config, classifier=classifier, images=source, unit=SHEET_ROWS)
    if target is not None:
        number = class_number(target, classifier.classes)
        job = replace(job, entries=job.entries.labelled(target=number), targets="label")
    with resumable(out_folder), spreading(workers, job) as (job, spread):
        record = explain_run(job, out_folder, overwrite=overwrite, spread=spread)
    print_skipped(record["skipped"])
    for remark in run_remarks(record["n"], record["empty_heatmaps"]):
        warn(remark)
    for path in sorted(out_folder.iterdir()):
        say(path, soft_wrap=True)
