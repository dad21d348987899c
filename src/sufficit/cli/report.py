"""`sufficit report`."""

from typing import Annotated

import typer

from sufficit.cli.console import app, say, say_next, show_page
from sufficit.files import check_output, place


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="Folder of a finished compare, evaluate or demo.")],
    out_file: Annotated[
        str | None, typer.Option("--out", help="The HTML file; RUN/report.html by default.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the report.")] = None,
    open_report: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the report in a browser.")
    ] = False,
) -> None:
    """Write the report of a finished run again. It needs neither the model nor the images.

    **Examples**

    sufficit report sufficit-compare

    sufficit report sufficit-compare --title "Our birds" --out birds.html --open
    """
    from dataclasses import replace

    from sufficit.report import write_report
    from sufficit.runs.results import RunResults

    path = place(run) / "report.html" if out_file is None else place(out_file)
    content = RunResults.read(place(run)).content()
    check_output(path.parent)
    write_report(path, content if title is None else replace(content, title=title))
    say(str(path), soft_wrap=True)
    if open_report:
        show_page(path, wanted=True)
    say_next("sufficit", "figure", run)
