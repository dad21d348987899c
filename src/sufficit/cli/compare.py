"""`sufficit compare`."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sufficit.cli.console import (
    app,
    out,
    print_skipped,
    resumable,
    say,
    say_next,
    scored,
    warn,
)
from sufficit.cli.options import JsonOption, OutOption, OverwriteOption, run_options, shown_options
from sufficit.files import check_output, place
from sufficit.loggers import check_log
from sufficit.outside import literal
from sufficit.runs.config import RunConfig, Workers

if TYPE_CHECKING:
    from sufficit.runs.results import RunResults

OPTIONS = shown_options()
CHECK_COLUMNS = ("msi_held_out", "fill_drop")  # of a default check: a warning says what they find
REPORT = "report.html"  # the last file that is written


@app.command()
@run_options(*OPTIONS, toml=True)
def compare(
    config: RunConfig,
    workers: Workers | None,
    to: OutOption = "sufficit-compare",
    as_json: JsonOption = False,
    overwrite: OverwriteOption = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Also print how it was measured, and all warnings."),
    ] = False,
) -> None:
    """Which method explains your model best? Score every method on every image.

    Run the same command again to resume an interrupted run, or to see the results of a finished
    one.

    --help-all lists every option.

    **Examples**

    sufficit compare --model torchvision:resnet50 --data photos --methods gradcam,layercam

    sufficit compare --model saved/birds --data birds --methods gradcam,birds-lax,maps.npz

    sufficit compare --model torchvision:resnet50 --data photos --quick
    """
    out_folder, data = place(to), place(config.data)
    check_output(out_folder, [data], command="compare")
    check_log(config.log, out_folder)
    with resumable(out_folder):
        results = scored(config, out_folder, as_json=as_json, overwrite=overwrite, workers=workers)
        if not (out_folder / REPORT).exists():  # else this run was finished before
            results.log()
            if results.shown is not None:
                write_pictures(results, out_folder)
    print_skipped(results.skipped, results.record.n_skipped)
    if as_json:
        typer.echo(json.dumps(results.as_json(), indent=2, allow_nan=False))
        return
    if results.shown is None:
        lines = results.table().round(3).to_string().splitlines()
        out.print(*map(literal, lines), sep="\n", highlight=False)
        text = f"No report, which shows MSI on images of one size. Results: {out_folder}"
        say(text)
        return
    print_results(results, verbose=verbose)
    say(f"Report: {out_folder / REPORT}{'' if verbose else '   More: -v'}", soft_wrap=True)
    if verbose:
        say(
            f"Also in {out_folder}: sheet.png, curves.png, pairs.csv (every pair of methods),"
            " METHOD/scores.parquet (one row per image). To repeat this run: sufficit compare"
            f" --config {out_folder / 'RUN.toml'} --out ANOTHER",
            soft_wrap=True,
        )
    say_next("sufficit", "figure", out_folder, "--images", "best:2,worst", "--kept")


def print_results(results: "RunResults", *, verbose: bool = False, further: bool = True) -> None:
    """The verdict in three lines, the table, and warnings; with `verbose` all there is to know.

    Without `further` there is one table: that of the scores.
    """
    from sufficit.report.interpretation import cautions, notes, zero_line_words
    from sufficit.report.tables import (
        further_tables,
        groups_words,
        legend,
        results_table,
        short_legend,
    )

    content = results.content()
    found = results.verdict
    answer = literal(found.answer)
    answer.stylize("bold")
    out.print(answer)
    say(found.sure)
    say(found.change)
    out.print()
    out.print(results_table(content))
    lines = [short_legend(content), groups_words(content)]
    if not math.isnan(content.zero_line):
        lines.append(zero_line_words(content))
    lines += content.made
    if verbose:
        lines = legend(content)
    for line in filter(None, lines):
        say(line)
    hidden = () if verbose else CHECK_COLUMNS
    for table in further_tables(content, without=hidden) if further else ():
        out.print(table)
    if not verbose:
        for warning in found.warnings:
            warn(warning)
        return
    for sentence in notes(content):
        say(sentence)
    for caution in cautions(content):
        warn(" ".join([caution.text, *caution.details]))


def write_pictures(results: "RunResults", folder: Path) -> None:
    """Write sheet.png, curves.png and, last, report.html."""
    from sufficit import plots

    content, shown = results.content(), results.shown
    assert shown is not None  # the caller asked
    targets = [content.class_name(target) for target in content.first.targets.tolist()]
    names = [name if len(name) <= 28 else f"...{name[-25:]}" for name in shown.names]
    lines = [names, targets]
    if len(names) < content.n:  # else none is chosen, and few images would all be the best
        lines.append([*shown.reasons])
    titles = ["\n".join(parts) for parts in zip(*lines, strict=True)]
    methods = results.methods
    look = plots.Look()
    sheet = results.plot("sheet", rows=shown.rows, titles=titles, methods=methods, look=look)
    plots.save(sheet, folder / "sheet.png")
    curves = results.plot("curves", curves=None, methods=methods, look=look)
    plots.save(curves, folder / "curves.png")
    results.report(folder / REPORT)
