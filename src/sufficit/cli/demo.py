"""`sufficit demo`: digits with nothing to download, or photographs with a published network."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sufficit.cli.compare import print_results, write_pictures
from sufficit.cli.console import app, out, resumable, say, show_page
from sufficit.cli.options import OutOption, SeedOption, was_given
from sufficit.errors import UserError
from sufficit.files import check_output, place
from sufficit.outside import literal
from sufficit.runs.config import RunConfig

if TYPE_CHECKING:
    from torch import Tensor

    from sufficit.classifier.classifier import Classifier
    from sufficit.explainers.lax import Lax
    from sufficit.runs.results import RunResults

NETWORK = "torchvision:mobilenet_v2"  # 14 MB, and fast on a CPU
LEARNED, TRUTH = "lax", "true-digit"
BATCH = 8
DONORS = 32  # per image: with fewer, chance decides what the table says


@app.command()
def demo(
    ctx: typer.Context,
    photos: Annotated[
        bool, typer.Option("--photos", help="Four photographs and a network trained on ImageNet.")
    ] = False,
    model: Annotated[str, typer.Option(help="The network of --photos.")] = NETWORK,
    weights: Annotated[
        str, typer.Option(help="Weights of --photos: default (a download), or a file of your own.")
    ] = "default",
    to: OutOption = "sufficit-demo",
    images: Annotated[int, typer.Option(help="Number of digits to score.", min=2, max=1000)] = 32,
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
    """Explain and score a small digit classifier: no download, two to three minutes on two cores.

    --photos does the same with photographs and a published network, which is downloaded.

    **Examples**

    sufficit demo

    sufficit demo --images 200 --out my-demo --no-open

    sufficit demo --photos --out my-photos

    sufficit demo --photos --weights mobilenet_v2.pth
    """
    out_folder = place(to)
    check_output(out_folder)
    for name in ("images", "train_images") if photos else ("model", "weights"):
        if was_given(ctx, name):
            flag = f"--{name.replace('_', '-')}"
            wrong = "is not for --photos: leave it out" if photos else "needs --photos: add it"
            raise UserError(f"{flag} {wrong}")
    with resumable(out_folder, "the demo keeps nothing. Run it again."):
        if photos:
            results = run_photos(out_folder, model, weights, seed)
        else:
            results = run_demo(out_folder, images, seed, train_images)
        print_results(results)
        write_pictures(results, out_folder)
    report = out_folder / "report.html"
    opened = show_page(report, open_report)
    words = "is open in your browser" if opened else "opens in any browser"
    say(f"{report} {words}, without a network.", soft_wrap=True)


def run_demo(folder: Path, n: int, seed: int, trained_on: int) -> "RunResults":
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
    learned = train(classifier, trained_on, seed)
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


def run_photos(folder: Path, model: str, weights: str, seed: int) -> "RunResults":
    """Score five CAMs and the controls on the photographs that ship with the package."""
    from sufficit.classifier.loading import load_classifier
    from sufficit.data.images import PHOTOS, open_images
    from sufficit.explainers import CAMS
    from sufficit.runs.engine import run
    from sufficit.runs.job import make_job

    classifier = load_classifier(model, weights=weights)  # raises before anything is written
    images = open_images(PHOTOS)
    words = f"{len(list(images))} photographs that ship with Sufficit, and {model}."
    out.print("[bold]1[/]", literal(words))
    out.print(f"[bold]2[/] Scoring {len(CAMS)} methods; a bar shows the time left.")
    config = RunConfig(
        model=model,
        weights=weights,
        data=str(PHOTOS),
        methods=tuple(CAMS),
        targets="prediction",
        value_step=0.05,  # a fifth as fine as usual, in a fifth of the time
        percent_step=0.1,
        checks=("controls", "fill"),  # four images say nothing of leakage
        seed=seed,
    )
    job = make_job(config, classifier=classifier, images=images, unit=2)
    return run(job, folder, overwrite=True)


def train(classifier: "Classifier", n: int, seed: int) -> "Lax":
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
