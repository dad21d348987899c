"""`sufficit demo`."""

from pathlib import Path
from typing import Annotated

import typer

from sufficit.cli.app import app, out
from sufficit.cli.browser import show_page
from sufficit.files import check_output


@app.command()
def demo(
    out_folder: Annotated[Path, typer.Option("--out", help="Where the pictures go.")] = Path(
        "sufficit-demo"
    ),
    images: Annotated[int, typer.Option(help="How many digits to score.", min=2, max=1000)] = 32,
    train_images: Annotated[
        int, typer.Option(help="How many other digits LAX is trained on.", min=32, max=100_000)
    ] = 2048,
    seed: Annotated[int, typer.Option(help="Which digits.", min=0)] = 0,
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
    check_output(out_folder)
    from sufficit.demo import run_demo

    run_demo(out_folder, images, seed, out, train_images)
    report = out_folder / "report.html"
    opened = show_page(report, open_report)
    words = "is open in your browser" if opened else "opens in any browser"
    out.print(f"{report} {words}, and needs no network.", highlight=False, soft_wrap=True)
