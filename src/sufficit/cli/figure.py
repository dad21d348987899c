"""`sufficit figure`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sufficit.cli.app import app, literal, out
from sufficit.cli.options import was_given
from sufficit.errors import UserError
from sufficit.files import check_output, make_folder


class Shows(StrEnum):
    """What a figure shows."""

    sheet = "sheet"
    curves = "curves"
    alpha = "alpha"
    sizes = "sizes"


@app.command()
def figure(
    ctx: typer.Context,
    run: Annotated[Path, typer.Argument(help="The folder of a finished sufficit compare.")],
    out_file: Annotated[
        Path, typer.Option("--out", help="Its suffix is the format: .pdf, .svg, .eps or .png.")
    ] = Path("sheet.pdf"),
    show: Annotated[
        Shows,
        typer.Option(
            help="sheet: images and heatmaps. curves: their means. alpha: MSI over alpha_min."
            " sizes: mask size against base score."
        ),
    ] = Shows.sheet,
    images: Annotated[
        str,
        typer.Option(
            help="Rows of a sheet: names, a number for the first ones, best, worst, disputed, or"
            " best:3."
        ),
    ] = "best,disputed,worst",
    methods: Annotated[
        str | None,
        typer.Option("--methods", "-m", help="Some of the run's methods; all but the controls."),
    ] = None,
    columns: Annotated[
        str, typer.Option(help="What stands under the heatmaps of a sheet.")
    ] = "msi",
    kept: Annotated[
        bool, typer.Option("--kept", help="On a sheet, also the image through each mask.")
    ] = False,
    rest: Annotated[
        bool, typer.Option("--rest", help="On a sheet, also what each mask leaves out.")
    ] = False,
    curves: Annotated[
        str, typer.Option(help="Which curves: show, hide, insertion_pixel, ...")
    ] = "show,hide,insertion_percent,deletion_percent",
    width: Annotated[str, typer.Option(help="column (3.3 in), page (6.9 in), or inches.")] = "page",
    font: Annotated[float, typer.Option(help="Size of titles in points.", min=4, max=40)] = 8,
    dpi: Annotated[
        float, typer.Option(help="Of .png, and of nothing else.", min=20, max=2400)
    ] = 300,
    data: Annotated[
        Path | None, typer.Option(help="Where the images are now, if they were moved.")
    ] = None,
) -> None:
    """Draw a figure for a paper from a finished comparison; its numbers are the run's.

    **Examples**

    sufficit figure sufficit-compare --out sheet.pdf

    sufficit figure sufficit-compare --images best:2,cat/7.png --kept --width column --out cats.svg

    sufficit figure sufficit-compare --show curves --methods lax,gradcam --out curves.pdf

    sufficit figure sufficit-compare --show sizes --out sizes.png --dpi 600
    """
    from sufficit.comparing import plates
    from sufficit.comparing.finished import read_finished
    from sufficit.plots import Look, check_file, save, width_from

    _check_given(ctx, show)
    check_file(out_file)
    check_output(out_file.parent)
    look = Look(width_from(width), font)
    finished, chosen = read_finished(run), _listed(methods)
    if show == Shows.sheet:
        drawn = plates.sheet(
            finished, _listed(images) or [], chosen, columns=_listed(columns) or [], kept=kept,
            rest=rest, look=look, data=data, tell=_tell,
        )  # fmt: skip
    elif show == Shows.curves:
        drawn = plates.curves(finished, chosen, names=_listed(curves) or [], look=look)
    else:
        draw = plates.alphas if show == Shows.alpha else plates.sizes
        drawn = draw(finished, chosen, look=look)
    make_folder(out_file.parent)
    save(drawn, out_file, dpi=dpi, tight=False)
    out.print(literal(str(out_file)), highlight=False)


def _check_given(ctx: typer.Context, show: Shows) -> None:
    """Raise for an option that the figure does not have."""
    of_one = dict.fromkeys(("images", "columns", "kept", "rest", "data"), Shows.sheet)
    for name, owner in (of_one | {"curves": Shows.curves}).items():
        if was_given(ctx, name) and show != owner:
            raise UserError(f"--{name} is of --show {owner.value}, and not of --show {show.value}")


def _listed(text: str | None) -> list[str] | None:
    """Words with commas between them."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _tell(words: str) -> None:
    out.print(words, highlight=False)
