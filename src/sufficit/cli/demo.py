"""`sufficit demo`: a small digit classifier, explained and scored, with nothing to download."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sufficit.cli.browser import show_page
from sufficit.cli.compare import print_results, write_pictures
from sufficit.cli.console import app, out
from sufficit.cli.options import OutOption, SeedOption
from sufficit.files import check_output, place
from sufficit.outside import literal
from sufficit.runs.config import RunConfig

if TYPE_CHECKING:
    from torch import Tensor

    from sufficit.classifier.classifier import Classifier
    from sufficit.explainers.lax import Lax
    from sufficit.runs.results import RunResults

LEARNED, TRUTH = "lax", "true-digit"
BATCH = 8
DONORS = 32  # per image: with fewer, chance decides what the table says
SIZE_WEIGHT = 1.25  # of the recipe's area term: in so short a training 2 makes masks too small


@app.command()
def demo(
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
    """Explain and score a small digit classifier: no download, about two minutes on two cores.

    **Examples**

    sufficit demo

    sufficit demo --images 200 --out my-demo --no-open
    """
    out_folder = place(to)
    check_output(out_folder)
    results = run_demo(out_folder, images, seed, train_images)
    print_results(results)
    write_pictures(results, out_folder)
    report = out_folder / "report.html"
    opened = show_page(report, open_report)
    words = "is open in your browser" if opened else "opens in any browser"
    said = literal(f"{report} {words}, without a network.")
    out.print(said, highlight=False, soft_wrap=True)


def run_demo(folder: Path, n: int, seed: int, trained_on: int) -> "RunResults":
    """Train LAX, then score it, five CAMs, the controls and the truth on n digits."""
    import torch

    from sufficit.classifier.classifier import Classifier
    from sufficit.data.digits import synthetic_digits
    from sufficit.data.images import ImageSource
    from sufficit.data.truth import TruthMasks
    from sufficit.explainers import CAMS
    from sufficit.runs.engine import run
    from sufficit.runs.job import make_job, with_controls
    from sufficit.runs.maps import MapTensor, Source

    out.print("This takes about two minutes on two cores; a bar shows the time left.")
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
    sources: dict[str, Source] = {LEARNED: learned, **{name: name for name in CAMS}}
    sources[TRUTH] = MapTensor(around(digits.masks))
    config = RunConfig(
        model="sufficit:digits",
        data="synthetic digits",
        methods=tuple(sources),
        value_step=0.02,  # half as fine as usual, in half of the time
        percent_step=0.04,
        donors=DONORS,
        seed=seed,
        truth="the digits' own pixels",
    )
    names = [f"digit-{i:04d}" for i in range(n)]
    images = ImageSource.from_tensors(digits.images, names, digits.labels)
    scored = with_controls(sources, wanted=True)
    given: Any = {"classifier": classifier, "images": images, "sources": scored, "unit": BATCH}
    job = make_job(config, truth=TruthMasks(digits.masks), **given)
    return run(replace(job, references=(TRUTH,)), folder, overwrite=True)


def train(classifier: "Classifier", n: int, seed: int) -> "Lax":
    """An adapter for the classifier, trained for one epoch on n digits that are not scored."""
    from torch.utils.data import DataLoader, TensorDataset

    from sufficit.data.digits import synthetic_digits
    from sufficit.explainers.recipes import RECIPES
    from sufficit.training import train_lax

    shown = synthetic_digits(n, seed=seed + 1, held_out=False)
    loader = DataLoader(TensorDataset(shown.images, shown.labels), BATCH, shuffle=True)
    recipe = replace(RECIPES["robust"], size=SIZE_WEIGHT)
    options: Any = {"recipe": recipe, "epochs": 1, "validation_images": min(32, n)}
    with one_thread():
        return train_lax(classifier, loader, seed=seed, **options)


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
