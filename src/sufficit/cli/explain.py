"""`sufficit explain`."""

import csv
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sufficit.cli.console import app, print_skipped, resumable, say, say_next, warn
from sufficit.cli.options import OutOption, OverwriteOption, run_options
from sufficit.errors import UserError
from sufficit.files import check_output, place
from sufficit.runs.config import RunConfig, Workers

if TYPE_CHECKING:
    from sufficit.classifier.classifier import Classifier
    from sufficit.data.images import ImageSource

OPTIONS = (
    *("model", "methods", "targets", "layer", "normalize", "weights", "num_classes", "prompts"),
    *("output", "size", "on_error"),
    *("device", "precision", "seed"),
)
RECOMMENDED = "recommended"  # in place of methods
DEFAULTS = {"methods": (RECOMMENDED,), "data": "", "checks": ("none",)}
MOST_SENTENCES = 5  # on the terminal; certificates.csv has all


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
    fit: Annotated[
        bool,
        typer.Option(
            "--fit/--no-fit",
            help="Cut each map where the model agrees, or draw the plain maps.",
            rich_help_panel="Methods",
        ),
    ] = True,
    share: Annotated[
        float | None,
        typer.Option(
            help="Cut every map at this share of the image instead, as 0.1; nothing is fitted.",
            rich_help_panel="Methods",
        ),
    ] = None,
    to: OutOption = "sufficit-explain",
    overwrite: OverwriteOption = False,
) -> None:
    """Show the region of each image that is enough for the model, with a certificate.

    Each method orders the pixels, and the model is run on growing shares of them until one is
    enough. The results are a picture of each region, a sheet, certificates.csv, and heatmap files
    for `sufficit compare`. --no-fit writes plain heatmaps. Run the same command again to resume.

    **Examples**

    sufficit explain cat.jpg --model torchvision:resnet50

    sufficit explain photos --model timm:vit_tiny_patch16_224 --methods gradcam,rollout

    sufficit explain a.jpg b.jpg --model torchvision:resnet18 --methods finer-cam --target tabby

    sufficit explain photos --model saved/birds --methods birds-lax --no-fit
    """
    if target is not None and config.targets != "auto":
        raise UserError(
            f"--target {target} sets one class for all images, --targets {config.targets} one per"
            " image: give one of them"
        )
    config = replace(config, data=" ".join(images))
    out_folder, given_images = place(to), [place(word) for word in images]
    check_output(out_folder, given_images, command="explain")
    from sufficit.explainers.words import FIT
    from sufficit.report.interpretation import run_remarks
    from sufficit.runs.job import load_model, make_job
    from sufficit.runs.overlays import SHEET_ROWS, class_number, explain_run, images_in
    from sufficit.runs.workers import spreading
    from sufficit.sources import Cut

    source = images_in(given_images)
    classifier = load_model(replace(config, layer=None))
    if target is not None:
        config = replace(config, targets="prediction")
    if config.methods == (RECOMMENDED,):
        config = replace(config, methods=(_recommended(classifier, source),))
    if fit and share is None:
        words = [word if word.endswith(FIT) else f"{word}{FIT}" for word in config.methods]
        config = replace(config, methods=tuple(dict.fromkeys(words)))
    job = make_job(config, classifier=classifier, images=source, unit=SHEET_ROWS)
    if target is not None:
        number = class_number(target, classifier.classes)
        job = replace(job, entries=job.entries.labelled(target=number), targets="label")
    if share is not None:
        job = replace(job, sources=tuple(Cut(source, share) for source in job.sources))
    with resumable(out_folder), spreading(workers, job) as (job, spread):
        record = explain_run(job, out_folder, overwrite=overwrite, spread=spread)
    print_skipped(record["skipped"])
    for remark in run_remarks(record["n"], record["empty_heatmaps"]):
        warn(remark)
    _print_sentences(out_folder, record["no_region"])
    for path in sorted(out_folder.iterdir()):
        say(path, soft_wrap=True)
    _say_compare(config, given_images)


def _say_compare(config: RunConfig, images: list[Path]) -> None:
    """Say how to score the methods: whether what they mark is better than what controls mark."""
    from sufficit.explainers.words import FIT

    plain = [word.removesuffix(FIT) for word in config.methods]
    methods = dict.fromkeys([*plain, *config.methods])
    folder = images[0] if len(images) == 1 and images[0].is_dir() else None
    where = "" if folder else ", with a folder of your own as PHOTOS"
    say_next(
        *("sufficit", "compare", "--model", config.model, "--data", folder or "PHOTOS"),
        *("--methods", ",".join(methods), "--targets", "prediction"),
        where=where,
    )


def _recommended(classifier: "Classifier", source: "ImageSource") -> str:
    """The method that is recommended for the model, tried on an image that can be read."""
    from sufficit.data.image_files import BadImageError
    from sufficit.explainers import recommended
    from sufficit.explainers.registry import RECOMMENDED as BY_KIND

    for image in islice(source, MOST_SENTENCES):
        with suppress(BadImageError, OSError):
            return recommended(classifier, image.read(classifier.view)[None])
    return BY_KIND["convolutional"]


def _print_sentences(folder: Path, no_region: dict[str, list[str]]) -> None:
    """The first certificates in words, and how many images have no region."""
    if not no_region:
        return
    from sufficit.runs.region_files import CERTIFICATES

    with (folder / CERTIFICATES).open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        several = len(no_region) > 1
        for row in islice(rows, MOST_SENTENCES):
            method = f" ({row['method']})" if several else ""
            say(f"{row['image']}{method}: {row['sentence']}")
        more = sum(1 for _ in rows)
    if more:
        say(f"{more} more: {folder / CERTIFICATES}", soft_wrap=True)
    for method, names in no_region.items():
        if names:
            shown = ", ".join(names[:MOST_SENTENCES]) + (", ..." if names[MOST_SENTENCES:] else "")
            images = "1 image" if len(names) == 1 else f"{len(names)} images"
            say(f"{method}: no region is enough in {images}: {shown}")
