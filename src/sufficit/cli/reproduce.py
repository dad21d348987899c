"""`sufficit reproduce`."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sufficit.cli.app import app, err, literal, out
from sufficit.cli.options import DeviceOption, NodesOption
from sufficit.crews import leads
from sufficit.errors import UserError
from sufficit.files import check_output

if TYPE_CHECKING:
    from sufficit.reproduce.outcome import Outcome


@app.command()
def reproduce(
    table: Annotated[
        str,
        typer.Argument(help="synthetic-mnist, cub200, cifar10, cifar10-vit, or folder: your own."),
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with MNIST, CIFAR-10 or CUB-200-2011 in it, or class folders."),
    ] = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Where everything goes; TABLE by default.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small net and few images: minutes on a CPU.")
    ] = False,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch the data into --data first.")
    ] = False,
    images: Annotated[
        int | None, typer.Option(help="Test images that are scored; 2000 by default.", min=2)
    ] = None,
    search_images: Annotated[
        int | None, typer.Option(help="Of them, those alpha_min is searched on; 500.", min=1)
    ] = None,
    train_images: Annotated[
        int | None, typer.Option(help="Training images; all by default.", min=20)
    ] = None,
    test_images: Annotated[
        int | None, typer.Option(help="Test images to draw from; all by default.", min=2)
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Adapters of each recipe; 3.", min=0)] = None,
    recipes: Annotated[str | None, typer.Option(help="Of LAX; paper,robust by default.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Of the classifier.", min=1)] = None,
    lax_epochs: Annotated[int | None, typer.Option(help="Of each adapter.", min=1)] = None,
    model: Annotated[
        str | None, typer.Option(help="Another architecture than the paper's.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="To begin with: default (ImageNet's), none, or a .safetensors file."),
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="Of CUB-200, with commas; twenty by the seed.")
    ] = None,
    device: DeviceOption = "auto",
    devices: Annotated[
        int, typer.Option(help="Share adapters and scoring among so many GPUs.", min=1)
    ] = 1,
    num_nodes: NodesOption = 1,
    precision: Annotated[
        str | None, typer.Option(help="fp32 or bf16; bf16 on a GPU by default.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Masked images a model call.", min=1)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of all that is random.", min=0)] = None,
    step: Annotated[
        float | None,
        typer.Option(help="Of the pixel-value curves, 0.01; twice that of the percentage curves."),
    ] = None,
    report: Annotated[bool, typer.Option(help="Write report.html at the end.")] = True,
) -> None:
    """Repeat a table of the paper: train the classifier and LAX, score every method, report.

    A run that was stopped goes on where it was when the same command is given again; so does one
    that was moved to another machine.

    **Examples**

    sufficit reproduce synthetic-mnist --quick

    sufficit reproduce cifar10 --data data --download --weights none

    sufficit reproduce cub200 --data data --model resnet50 --out birds

    sufficit reproduce cifar10 --data data --devices 8

    sufficit reproduce folder --data photos --model resnet50 --out mine
    """
    from sufficit.reproduce.tables import table_of

    data_name = table_of(table).data
    folder = out_folder or Path(table)
    first = leads(devices, num_nodes)
    if first:
        check_output(folder)
    from sufficit.parsing import device_from
    from sufficit.reproduce.chain import reproduce as run
    from sufficit.reproduce.datasets import download as fetch
    from sufficit.training.processes import crew_for

    if download:
        if data is None:
            raise UserError("--download needs a folder to put the data in: give --data ROOT")
        if first:
            fetch(data_name, data)
    asked: dict[str, Any] = {
        "images": images,
        "search_images": search_images,
        "train_images": train_images,
        "test_images": test_images,
        "seeds": seeds,
        "step": step,
        "recipes": _words(recipes),
        "epochs": epochs,
        "lax_epochs": lax_epochs,
        "model": model,
        "weights": weights,
        "classes": _words(classes),
        "precision": precision,
        "batch_size": batch_size,
        "seed": seed,
    }
    chosen = device_from(device)
    with crew_for(chosen, devices, num_nodes) as crew:
        outcome = run(
            table,
            folder,
            data=data,
            device=chosen,
            quick=quick,
            report=report,
            say=lambda line: err.print(literal(line), highlight=False),
            crew=crew,
            **asked,
        )
    if outcome is not None:
        _print(outcome, folder)


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(w.strip() for w in text.split(",") if w.strip())


def _print(outcome: "Outcome", folder: Path) -> None:
    from rich import box
    from rich.table import Table

    from sufficit.reproduce.outcome import paper_rows, summary_of
    from sufficit.reproduce.writing import HEADINGS, TITLES

    theirs = paper_rows(outcome.plan.table)
    title = f"Means over {outcome.n} test images, alpha_min {outcome.facts['alpha_min']:g}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("method", no_wrap=True)
    shown = ("base_score", "mask_penalty", "msi")
    for name in shown:
        table.add_column(HEADINGS[name], justify="right", no_wrap=True)
    for heading in ("95 % of MSI", "leak", "paper"):
        table.add_column(heading, justify="right", no_wrap=True)
    for method, columns in outcome.pooled().items():
        summary = summary_of(columns, outcome.plan.seed)
        cells = [f"{summary[name].mean:.3f}" for name in shown]
        cells.append(f"{summary['msi'].low:.2f} .. {summary['msi'].high:.2f}")
        leaked = summary["leak_ratio"].mean if "leak_ratio" in summary else math.nan
        cells.append("-" if math.isnan(leaked) else f"{leaked:.2f}")
        known = theirs.get("lax" if method == "lax-paper" else method)
        cells.append(f"{known['msi']:.3f}" if known else "")
        table.add_row(TITLES.get(method, method), *cells)
    out.print(table)
    right = outcome.trained["test_accuracy"]
    out.print(f"The classifier gets {right:.1%} of all test images right.", highlight=False)
    where = f"Everything is in {folder}; tables and pictures in {folder / 'results'}"
    report = folder / "results" / "report.html"
    out.print(literal(f"{where}{f', the report is {report}' if report.exists() else ''}."))
