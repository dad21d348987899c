"""`sufficit demo`."""

from pathlib import Path
from typing import Annotated

import typer

from sufficit.cli.app import app, out
from sufficit.files import check_output


@app.command()
def demo(
    out_folder: Annotated[Path, typer.Option("--out", help="Where the pictures go.")] = Path(
        "sufficit-demo"
    ),
    images: Annotated[int, typer.Option(help="How many digits to score.", min=2, max=1000)] = 32,
    train_images: Annotated[
        int, typer.Option(help="How many other digits LAX is trained on.", min=32, max=100_000)
    ] = 512,
    seed: Annotated[int, typer.Option(help="Which digits.", min=0)] = 0,
) -> None:
    """Explain and score a small digit classifier: no download, about two minutes on two cores.

    **Examples**

    sufficit demo

    sufficit demo --images 200 --out my-demo
    """
    check_output(out_folder)
    from sufficit.demo import run_demo

    run_demo(out_folder, images, seed, out, train_images)
