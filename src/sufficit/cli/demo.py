"""`sufficit demo`: photographs of pets and a network for breeds, or digits and a training."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sufficit.cli.compare import REPORT, print_results, write_pictures
from sufficit.cli.console import app, out, resumable, say, say_next, show_page
from sufficit.cli.options import OutOption, SeedOption, was_given
from sufficit.errors import UserError
from sufficit.files import check_output, make_folder, place, writing
from sufficit.runs.config import RunConfig

if TYPE_CHECKING:
    from torch import Tensor

    from sufficit.classifier.classifier import Classifier
    from sufficit.explainers.lax import Lax
    from sufficit.regions import Regions
    from sufficit.runs.results import RunResults

PETS = "sufficit:pets"
LEARNED, TRUTH = "lax", "true-digit"
FITTED = (LEARNED, "gradcam")  # also cut where the model agrees; `center` is, as their control
PHOTOGRAPHS, DIGITS = 37, 32  # scored
PICTURE, DRAWN, COLUMNS = "regions.jpg", 6, 3  # regions of the first photographs
SIDE, LARGE = 128, 224  # pixels that the network sees, and that are drawn
UNIT = 8  # images between two steps of the bar
ASKED = 16  # masked photographs per forward pass: the fastest on a CPU
DONORS = 32  # per digit: with fewer, chance decides what the table says
BATCH = 8  # digits


@app.command()
def demo(
    ctx: typer.Context,
    train: Annotated[
        bool,
        typer.Option("--train", help="Train a LAX adapter in front of you, on digits (minutes)."),
    ] = False,
    to: OutOption = "sufficit-demo",
    images: Annotated[
        int | None,
        typer.Option(
            help=f"Number of images to score. Default: all {PHOTOGRAPHS} photographs, or {DIGITS}"
            " digits.",
            min=2,
            max=1000,
        ),
    ] = None,
    train_images: Annotated[
        int, typer.Option(help="Number of other digits to train LAX on.", min=32, max=100_000)
    ] = 2048,
    seed: SeedOption = RunConfig.seed,
    open_report: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open", help="Open the report in a browser; by default in a terminal only."
        ),
    ] = None,
) -> None:
    """Which part of a photograph does a network need? No download, a minute on two cores.

    --train shows a training instead: a LAX adapter for a small network that reads digits.

    **Examples**

    sufficit demo

    sufficit demo --images 12 --out my-demo --no-open

    sufficit demo --train
    """
    out_folder = place(to)
    check_output(out_folder)
    if was_given(ctx, "train_images") and not train:
        raise UserError("--train-images needs --train: add it")
    if not train and images is not None and images > PHOTOGRAPHS:
        raise UserError(f"--images must be at most {PHOTOGRAPHS} photographs, got {images}")
    with resumable(out_folder, "the demo keeps nothing. Run it again."):
        if train:
            results = run_digits(out_folder, images or DIGITS, seed, train_images)
            print_results(results)
            write_pictures(results, out_folder)
        else:
            results = run_photos(out_folder, images or PHOTOGRAPHS, seed)
            print_results(results, further=False)
            results.report(out_folder / REPORT)
    report = out_folder / REPORT
    opened = show_page(report, open_report)
    words = "is open in your browser" if opened else "opens in any browser"
    out.print()
    say(f"Report: {report} {words}, without a network.", soft_wrap=True)
    model = ("--model", "torchvision:resnet50")
    say_next("sufficit", "explain", "PHOTOS", *model, where=", with a folder of your own as PHOTOS")


def run_photos(folder: Path, n: int, seed: int) -> "RunResults":
    """Show one photograph's region, then score LAX, the CAMs and the controls on n photographs."""
    import torch

    from sufficit.classifier.classifier import Classifier
    from sufficit.data.images import open_images
    from sufficit.data.pets import CREDIT, MASKS, PHOTOS
    from sufficit.explainers import CAMS
    from sufficit.explainers.lax import Lax
    from sufficit.runs.engine import run
    from sufficit.runs.job import make_job
    from sufficit.sources import Fitted, Given, sources_of

    classifier = Classifier.load(PETS).to(memory_format=torch.channels_last)
    lax = Lax.from_pretrained(PETS)
    make_folder(folder)
    regions = draw_regions(classifier, lax, folder)
    say(regions[0].sentence)
    say(f"Picture: {folder / PICTURE}   Photographs: {CREDIT}", soft_wrap=True)
    out.print()
    methods: dict[str, Given] = {LEARNED: lax, **{name: name for name in CAMS}}
    fitted = {f"{name}+fit": Fitted(methods[name], batch_size=ASKED) for name in FITTED}
    named = {**methods, **fitted}
    config = RunConfig(
        model=PETS,
        data=f"test photographs ({CREDIT})",
        methods=tuple(named),
        images=n,
        targets="prediction",
        truth=str(MASKS),
        checks=("controls", "fill"),  # so few images of 37 classes say nothing of leakage
        batch_size=ASKED,
        seed=seed,
    )
    job = make_job(
        config,
        classifier=classifier,
        images=open_images(PHOTOS),
        sources=sources_of(named, seed=seed),
        unit=UNIT,
    )
    out.print(f"Scoring {len(job.sources)} heatmaps of each of {n} photographs ...")
    return run(job, folder, overwrite=True, progress=True if sys.stderr.isatty() else None)


def draw_regions(classifier: "Classifier", lax: "Lax", folder: Path) -> "Regions":
    """Draw the regions of the first photographs, one beside the other, and return them."""
    from sufficit.data.pets import CREDIT, pet_photos
    from sufficit.plots import gallery, region_picture
    from sufficit.regions import explain
    from sufficit.sources.certificate import percent

    images, photos = (pet_photos(DRAWN, side=side).images for side in (SIDE, LARGE))
    regions = explain(
        classifier,
        images,
        method=lax,
        fit=True,
        batch_size=ASKED,
        progress=False,
    )
    drawn = gallery(
        [
            region_picture(photo, heatmap)
            for photo, heatmap in zip(photos, regions.heatmaps, strict=True)
        ],
        [
            f"{one.target}: {percent(one.share) if one.enough else 'the whole photograph'}"
            for one in regions.certificates
        ],
        columns=COLUMNS,
        title="Which part of a photograph is enough for a network to name the breed?",
        lines=[
            "Outlined, and alone: of this part the network says the same as of the whole"
            " photograph, with black, blur or noise around it.",
            f"sufficit demo. Photographs: {CREDIT}",
        ],
    )
    with writing(folder / PICTURE) as path:
        drawn.reduce(2).save(path, "JPEG", quality=90)
    return regions


def run_digits(folder: Path, n: int, seed: int, trained_on: int) -> "RunResults":
    """Train LAX, then score it, five CAMs, the controls and the truth on n digits."""
    import torch

    from sufficit.classifier.classifier import Classifier
    from sufficit.data.digits import synthetic_digits
    from sufficit.data.images import ImageSource
    from sufficit.data.truth import TruthMasks
    from sufficit.explainers import CAMS
    from sufficit.runs.engine import run
    from sufficit.runs.job import make_job
    from sufficit.sources import Given, MapTensor, sources_of

    out.print("This takes two to three minutes on two cores; a bar shows the time left.")
    out.print(f"[bold]1[/] Drawing {n} images: a digit somewhere in noise, among random boxes.")
    digits = synthetic_digits(n, seed=seed)
    classifier = Classifier.load("sufficit:digits")
    with torch.no_grad():
        right = (classifier(digits.images).argmax(1) == digits.labels).float().mean()
    out.print(f"[bold]2[/] A small network that ships with Sufficit reads {right:.0%} of them.")
    task = "draw the network's heatmap without knowing where the digits are"
    out.print(f"[bold]3[/] Training LAX on {trained_on} other images to {task}.")
    learned = train_on_digits(classifier, trained_on, seed)
    question = "does what a heatmap marks suffice, and does the rest not?"
    out.print(f"[bold]4[/] Scoring LAX and {len(CAMS)} other methods: {question}")
    truth = MapTensor(TRUTH, around(digits.masks), role="reference")
    named: dict[str, Given] = {LEARNED: learned, **{name: name for name in CAMS}, TRUTH: truth}
    config = RunConfig(
        model="sufficit:digits",
        data="synthetic digits",
        methods=tuple(named),
        calls="exact",
        value_step=0.02,  # half as fine as usual, in half of the time
        percent_step=0.04,
        donors=DONORS,
        seed=seed,
        truth="the digits' own pixels",
    )
    names = [f"digit-{i:04d}" for i in range(n)]
    images = ImageSource.from_tensors(digits.images, names, digits.labels)
    job = make_job(
        config,
        classifier=classifier,
        images=images,
        sources=sources_of(named, seed=seed),
        unit=BATCH,
        truth=TruthMasks(digits.masks),
    )
    return run(job, folder, overwrite=True)


def train_on_digits(classifier: "Classifier", n: int, seed: int) -> "Lax":
    """An adapter for the classifier, trained for one epoch on n digits that are not scored."""
    from torch.utils.data import DataLoader, TensorDataset

    from sufficit.data.digits import synthetic_digits
    from sufficit.training import train_lax

    shown = synthetic_digits(n, seed=seed + 1, held_out=False)
    loader = DataLoader(TensorDataset(shown.images, shown.labels), BATCH, shuffle=True)
    with one_thread():
        return train_lax(classifier, loader, seed=seed, epochs=1, validation_images=min(32, n))


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread inside, so that the number of cores does not change the rounding."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def around(masks: "Tensor") -> "Tensor":
    """The digit and the four pixels around it: what the network needs to see of it."""
    import torch

    return torch.nn.functional.max_pool2d(masks[:, None], 9, 1, 4)[:, 0]
