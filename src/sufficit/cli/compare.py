"""`sufficit compare`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sufficit.cli.console import app, err, out, print_forecast, print_skipped, resumable
from sufficit.cli.options import (
    ConfigOption,
    JsonOption,
    OutOption,
    OverwriteOption,
    config_of,
    run_options,
)
from sufficit.files import check_output, place
from sufficit.loggers import check_log
from sufficit.outside import literal
from sufficit.runs.config import Workers

if TYPE_CHECKING:
    from sufficit.runs.job import Job
    from sufficit.runs.results import RunResults

CHECKED = 8  # images of --sanity
OPTIONS = (
    *("model", "data", "images", "quick", "methods", "controls", "alpha_min", "score", "fill"),
    *("fills", "held_out_fill", "twin", "targets", "truth", "leak", "donors", "alpha_curve"),
    *("ceiling", "columns", "calls", "within", "value_step", "percent_step"),
    *("layer", "normalize", "compile", "batch_size", "unit_size", "device", "precision"),
    *("weights", "num_classes", "prompts", "output", "size", "image_column", "label_column"),
    *("on_error", "verify", "save_heatmaps", "log", "seed"),
)


@app.command()
@run_options(*OPTIONS)
def compare(
    given: dict[str, Any],
    workers: Workers | None,
    config: ConfigOption = None,
    to: OutOption = "sufficit-compare",
    as_json: JsonOption = False,
    overwrite: OverwriteOption = False,
    sanity: Annotated[
        bool,
        typer.Option(
            help="Also make the output layer random: do the maps change? On up to 8 images.",
            rich_help_panel="Methods",
        ),
    ] = False,
) -> None:
    """Which method explains your model best? Score every method on every image.

    Run the same command again to resume an interrupted run.

    **Examples**

    sufficit compare --model torchvision:resnet50 --data photos --methods gradcam,layercam

    sufficit compare --model saved/birds --data birds --methods gradcam,birds-lax,maps.npz

    sufficit compare --model saved/birds --data birds --methods mine=python:mine.py:my_method

    sufficit compare --config sufficit-compare/RUN.toml --seed 1 --out again

    sufficit compare --model timm:resnet50 --data 'web/{000..099}.tar' --targets prediction

    sufficit compare --model saved/birds --data birds --within 0.01

    sufficit compare --model torchvision:resnet50 --data photos --quick
    """
    settings = config_of(given, config)
    out_folder, data = place(to), place(settings.data)
    check_output(out_folder, [data], overwrite=overwrite, command="compare")
    check_log(settings.log, out_folder)
    from sufficit.runs.engine import run
    from sufficit.runs.job import make_job

    progress = False if as_json else None
    with resumable(out_folder):
        job = make_job(settings)
        if not as_json:
            print_forecast(job, None if overwrite else out_folder, workers)
        results = run(job, out_folder, overwrite=overwrite, progress=progress, workers=workers)
        if sanity and results.shown is not None:
            results = with_head_check(results, job)
        results.log()
        if results.shown is not None:
            write_pictures(results, out_folder)
    print_skipped(results.skipped, results.record["n_skipped"])
    if as_json:
        typer.echo(json.dumps(results.as_json(), indent=2, allow_nan=False))
        return
    if results.shown is None:
        lines = results.table().round(3).to_string().splitlines()
        out.print(*map(literal, lines), sep="\n", highlight=False)
        text = f"No report, which shows MSI on images of one size. Results: {out_folder}"
        out.print(literal(text), highlight=False)
        return
    print_results(results)
    out.print(
        literal(
            f"Report: {out_folder / 'report.html'}. Also there: sheet.png, curves.png, pairs.csv"
            " (every pair of methods), METHOD/scores.parquet (one row per image). To repeat this"
            f" run: sufficit compare --config {out_folder / 'RUN.toml'} --out ANOTHER"
        ),
        highlight=False,
        soft_wrap=True,
    )


def with_head_check(results: "RunResults", job: "Job") -> "RunResults":
    """The results with what becomes of the maps when the output layer is random, also on disk."""
    from sufficit.provenance import plain, save_json
    from sufficit.runs.maps import GivenMaps
    from sufficit.runs.results import RunResults
    from sufficit.sanity.checks import head_check

    shown = results.shown
    assert shown is not None  # the caller asked
    methods = {
        name: source
        for name, source in job.sources.items()
        if name in job.ranked and not isinstance(source, GivenMaps)
    }
    if not methods:
        return results
    targets = shown.predictions[job.ranked[0]].targets
    given = (shown.images[:CHECKED].to(job.classifier.device), targets[:CHECKED], methods)
    found = plain(head_check(job.classifier, *given, seed=job.config.seed))
    record = {**results.record, "head_check": found}
    save_json(results.folder / "run.json", record)
    return RunResults.read(results.folder, record)


def print_results(results: "RunResults") -> None:
    """The table, what it means, and what to know before trusting it."""
    from sufficit.report.answer import answer, cost, orders, ranking_remarks
    from sufficit.report.interpretation import Caution, cautions, results_table, sentences

    content = results.content()
    out.print(results_table(content))
    said = [*map(str, answer(content)), *results.answers(), *sentences(content)]
    said += [*orders(content), *filter(None, [cost(content)])]
    for sentence in said:
        out.print(literal(sentence), highlight=False)
    against = [*map(Caution, ranking_remarks(content)), *cautions(content)]
    for caution in (one for one in against if one.text not in said):
        err.print("[yellow]Warning:[/]", literal(" ".join((caution.text, *caution.details))))


def write_pictures(results: "RunResults", folder: Path) -> None:
    """Write report.html, sheet.png and curves.png."""
    from sufficit import plots

    results.report(folder / "report.html")
    content, shown = results.content(), results.shown
    assert shown is not None  # the caller asked
    methods = list(results.methods)
    names = content.shown.names
    targets = [content.class_name(target) for target in content.first.targets.tolist()]
    titles = [
        f"{name if len(name) <= 28 else f'...{name[-25:]}'}\n{target}\n{reason}"
        for name, target, reason in zip(names, targets, shown.reasons, strict=True)
    ]
    values = {method: content.scores[method]["msi"].tolist() for method in methods}
    captions = {method: [f"MSI {v:+.2f}" for v in values[method]] for method in methods}
    maps = {method: shown.heatmaps[method] for method in methods}
    plots.save(plots.sheet_figure(shown.images, maps, titles, captions), folder / "sheet.png")
    lines = plots.methods_figure(results.scores, results.unranked)
    plots.save(lines, folder / "curves.png")
