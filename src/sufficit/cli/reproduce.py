"""`sufficit reproduce`."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from typer import Argument, Option

from sufficit.cli.console import RESUME, app, err, out, resumable, table
from sufficit.cli.options import OverwriteOption, run_options
from sufficit.errors import UserError, without_secrets
from sufficit.files import check_output, is_remote
from sufficit.outside import literal
from sufficit.reproduce.paper_tables import PlanOptions, table_named
from sufficit.runs.config import RunConfig, Workers

if TYPE_CHECKING:
    from sufficit.reproduce.table_results import TableResults

SCORED = ("compare", "search")  # the stages that score


@app.command()
@run_options("device", defaults={"model": "", "data": ""}, more=(PlanOptions,))
def reproduce(
    config: RunConfig,
    workers: Workers | None,
    further: dict[str, Any],
    table: Annotated[
        str, Argument(help="synthetic-mnist, cub200, cifar10, cifar10-vit, or folder: your own.")
    ],
    data_word: Annotated[
        str | None,
        Option(
            "--data", help="Folder with MNIST, CIFAR-10 or CUB-200-2011 in it, or class folders."
        ),
    ] = None,
    to: Annotated[
        str | None, Option("--out", help="Folder for the results; TABLE by default.")
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="A small net and few images: minutes on a CPU.")
    ] = False,
    download: Annotated[
        bool, Option("--download", help="Download the data to --data first.")
    ] = False,
    report: Annotated[bool, Option(help="Write report.html at the end.")] = True,
    overwrite: OverwriteOption = False,
) -> None:
    """Repeat a table of the paper: train the classifier and LAX, score every method, report.

    Run the same command again to resume, also in a folder that was moved to another machine.

    **Examples**

    sufficit reproduce synthetic-mnist --quick

    sufficit reproduce cifar10 --data data --download --weights none

    sufficit reproduce cub200 --data data --model resnet50 --out birds

    sufficit reproduce cifar10 --data data --workers 8

    sufficit reproduce folder --data photos --model resnet50 --out mine
    """
    data_name = table_named(table).data
    folder, data = _local("--out", to) or Path(table), _local("--data", data_word)
    check_output(folder)
    from sufficit.classifier.loading import device_named
    from sufficit.reproduce.datasets import download as fetch
    from sufficit.reproduce.pipeline import reproduce as run

    if download:
        if data is None:
            raise UserError("--download needs a folder to put the data in: give --data ROOT")
        fetch(data_name, data)
    options: dict[str, Any] = {"data": data, "quick": quick, "overwrite": overwrite}
    options |= {"device": device_named(config.device), "workers": workers}
    options |= {"say": lambda line: err.print(literal(line), highlight=False), "report": report}
    with resumable(folder, _stages_kept):
        results = run(table, folder, **options, **further)
    _print(results, folder)


def _stages_kept(folder: Path) -> str:
    """What is kept of a table, and what to do next."""
    done = stages_done(folder)
    kept = f"done and kept: {', '.join(done)}" if done else "no stage is done yet"
    return f"{kept}; of the stage at work, finished epochs or images. {RESUME}"


def stages_done(folder: Path) -> list[str]:
    """The stages of a table that are done: its classifier, its adapters, its scores."""
    done = [path.parent.name for path in sorted(folder.glob("**/trained.json"))]
    return done + [one for one in SCORED if (folder / one / "run.json").exists()]


def _local(option: str, word: str | None) -> Path | None:
    if word is not None and is_remote(word):
        raise UserError(
            f"reproduce reads and writes local folders, got {option} {without_secrets(word)}: copy"
            " the data here, and the results to object storage when they are done"
        )
    return None if word is None else Path(word)


def _print(results: "TableResults", folder: Path) -> None:
    from sufficit.reproduce.paper_tables import TITLES
    from sufficit.reproduce.table_results import HEADINGS

    n, alpha_min = results.compared.n, results.compared.alpha_min
    title = f"Means over {n} test images, alpha_min {alpha_min:g}"
    shown = ("base_score", "mask_penalty", "msi")
    heads = ["method", *(HEADINGS[name] for name in shown), "95 % of MSI", "leak", "paper"]
    drawn = table(title, heads, no_wrap=True, box=box.SIMPLE_HEAD, padding=0)
    for method in [name for name in TITLES if name in results.pooled]:
        summary = results.summary(results.pooled[method])
        cells = [f"{summary[name].mean:.3f}" for name in shown]
        cells.append(f"{summary['msi'].low:.2f} .. {summary['msi'].high:.2f}")
        leaked = summary["leak_ratio"].mean if "leak_ratio" in summary else math.nan
        cells.append("-" if math.isnan(leaked) else f"{leaked:.2f}")
        printed = results.plan.paper.printed_row(method)
        cells.append(f"{printed['msi']:.3f}" if printed else "")
        drawn.add_row(TITLES[method], *cells)
    out.print(drawn)
    right = results.trained["test_accuracy"]
    out.print(f"The classifier's test accuracy is {right:.1%}.", highlight=False)
    where = f"All files are in {folder}, tables and figures in {folder / 'results'}"
    report = folder / "results" / "report.html"
    out.print(literal(f"{where}; the report is {report}." if report.exists() else f"{where}."))
