"""`sufficit figure`."""

from typing import Annotated, Literal

import typer

from sufficit.cli.console import app, say, say_next
from sufficit.cli.options import listed, was_given
from sufficit.errors import UserError
from sufficit.files import check_output, make_folder, place

OWNERS = dict.fromkeys(("images", "columns", "kept", "rest", "data"), "sheet")
OWNERS |= {"curves": "curves"}
"""The options that only one --show has."""


@app.command()
def figure(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(help="The folder of a finished sufficit compare.")],
    to: Annotated[
        str, typer.Option("--out", help="Its suffix is the format: .pdf, .svg, .eps or .png.")
    ] = "sheet.pdf",
    show: Annotated[
        Literal["sheet", "curves", "alpha", "sizes"],
        typer.Option(
            help="sheet: images and heatmaps. curves: their means. alpha: MSI over alpha_min."
            " sizes: mask size against base score."
        ),
    ] = "sheet",
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
    columns: Annotated[str, typer.Option(help="Scores under the heatmaps of a sheet.")] = "msi",
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
    dpi: Annotated[float, typer.Option(help="Resolution of a .png file.", min=20, max=2400)] = 300,
    data: Annotated[
        str | None, typer.Option(help="Where the images are now, if they were moved.")
    ] = None,
) -> None:
    """Draw a figure for a paper from a finished comparison, without the model.

    **Examples**

    sufficit figure sufficit-compare --out sheet.pdf

    sufficit figure sufficit-compare --images best:2,cat/7.png --kept --width column --out cats.svg

    sufficit figure sufficit-compare --show curves --methods lax,gradcam --out curves.pdf

    sufficit figure sufficit-compare --show sizes --out sizes.png --dpi 600
    """
    from sufficit import plots
    from sufficit.runs.results import RunResults
    from sufficit.runs.shown import draw

    for name, owner in OWNERS.items():
        if was_given(ctx, name) and show != owner:
            raise UserError(f"--{name} is for --show {owner}, got --show {show}: leave it out")
    out_file = place(to)
    plots.check_file(out_file)
    check_output(out_file.parent)
    look = plots.Look(plots.width_from(width), font)
    results = RunResults.read(place(run))
    drawn = draw(
        results, show, None if methods is None else listed(methods),
        images=listed(images), columns=listed(columns), kept=kept, rest=rest,
        curves=listed(curves), look=look, data=data,
    )  # fmt: skip
    make_folder(out_file.parent)
    plots.save(drawn, out_file, dpi=dpi, tight=False)
    say(out_file, soft_wrap=True)
    other = "curves" if show == "sheet" else "sheet"
    say_next("sufficit", "figure", run, "--show", other, "--out", f"{other}{out_file.suffix}")
