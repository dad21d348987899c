"""A comparison as the content that the report and the terminal read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from sufficit.comparing.outcome import Comparison
from sufficit.report import Content, Facts, MethodScores, Shown, interpretation


def content_of(comparison: Comparison, record: Mapping[str, Any] | None = None) -> Content:
    """What the report shows; without the run's record there is no provenance."""
    settings, shown = comparison.settings, comparison.shown
    known: dict[str, Any] = {
        "model": settings.model,
        "data": settings.data,
        "seed": settings.seed,
        "n_skipped": len(comparison.skipped),
        "targets": comparison.target_kind,
    }
    curves, n = comparison.alpha_curves, len(comparison.names)
    random = settings.weights == "none"
    return Content(
        title=f"{len(comparison.standing.ranking)} methods on {settings.model}",
        facts=Facts(**known) if record is None else Facts.of(record, **known),
        scores={m: MethodScores.of(s, shown.numbers) for m, s in comparison.scores.items()},
        summaries=comparison.summaries,
        standing=comparison.standing,
        names=comparison.names,
        shown=Shown(
            shown.numbers,
            shown.images,
            shown.heatmaps,
            chosen="the best, the worst, the most disputed, and some drawn by the seed",
            reasons=shown.reasons,
        ),
        classes=comparison.class_names(),
        fill=comparison.fill,
        remarks=interpretation.run_remarks(n, comparison.empty, random_weights=random),
        alpha_curve=None if curves is None else curves.as_json(comparison.names),
        controls=comparison.outside,
    )


def table(comparison: Comparison) -> Table:
    """The terminal's table."""
    return interpretation.results_table(content_of(comparison))


def sentences(comparison: Comparison) -> Iterator[str]:
    """What the table means."""
    return interpretation.sentences(content_of(comparison))


def warnings_of(comparison: Comparison) -> Iterator[str]:
    """What a reader of the table should know before trusting it."""
    for caution in interpretation.cautions(content_of(comparison)):
        yield " ".join((caution.text, *caution.details))


def where_to_look(out: Path) -> str:
    """The files to open first."""
    return (
        f"Report: {out / 'report.html'}. Also there: sheet.png, curves.png, pairs.csv (every pair"
        " of methods), METHOD/scores.parquet (one row per image). To repeat this run: sufficit"
        f" compare --config {out / 'RUN.toml'} --out ANOTHER"
    )
