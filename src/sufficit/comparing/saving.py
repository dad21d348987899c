"""The files of a comparison; run.json comes last."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from sufficit import keeping
from sufficit import plots as figures
from sufficit.comparing.groups import HEATMAPS
from sufficit.comparing.jobs import FILES
from sufficit.comparing.outcome import Comparison
from sufficit.comparing.settings import CONTROLS, read_run, settings_from
from sufficit.comparing.telling import content_of
from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.loader import folder_targets
from sufficit.errors import UserError
from sufficit.explainers import EXPLAINERS
from sufficit.explainers.lax import name_of
from sufficit.files import make_folder
from sufficit.keeping import Parts
from sufficit.report import write_report
from sufficit.results import as_json, provenance, save_json, save_pairs, save_scores


def save_comparison(out: Path, comparison: Comparison, parts: Parts) -> None:
    """Write all results, then run.json, and only then give up the parts."""
    for method, scores in comparison.scores.items():
        place = make_folder(out / method)
        save_scores(place, scores, comparison.names)
        if comparison.settings.save_heatmaps:
            write_heatmaps(place / "heatmaps.npz", _heatmaps(parts, method))
    summary = {name: as_json(comparison.summaries[name]) for name in comparison.order()}
    save_json(out / "summary.json", summary | {"standing": asdict(comparison.standing)})
    save_pairs(out / "pairs.csv", comparison.standing)
    ordered = {method: comparison.scores[method] for method in comparison.order()}
    lines = figures.methods_figure(ordered, quiet=comparison.outside)
    figures.save(lines, out / "curves.png")
    _save_sheet(out, comparison)
    record = _record(comparison)
    write_report(out / "report.html", content_of(comparison, record))
    save_json(out / "run.json", record)
    parts.remove()


def clear(out: Path) -> None:
    """Remove what an earlier run left, in the folders of its methods too."""
    folders = [out / name for name in _methods_of(out) if (out / name).is_dir()]
    keeping.clear(out, (*FILES, "summary.json"))
    for folder in folders:
        for name in ("scores.parquet", "curves.parquet", "heatmaps.npz"):
            (folder / name).unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _methods_of(out: Path) -> set[str]:
    """The methods that an earlier run has folders of."""
    try:
        settings = settings_from(read_run(out / "RUN.toml"))
    except UserError:
        return set(EXPLAINERS)
    return {*settings.methods, *map(name_of, settings.lax), *CONTROLS}


def _save_sheet(out: Path, comparison: Comparison) -> None:
    """A row a shown image, a column a method, the MSI under each heatmap."""
    shown, methods = comparison.shown, comparison.order()
    titles = [
        f"{name if len(name) <= 28 else f'...{name[-25:]}'}\n{label}\n{reason}"
        for name, label, reason in zip(shown.names, shown.class_names, shown.reasons, strict=True)
    ]
    rows = list(shown.numbers)
    captions = {m: [f"MSI {v:+.2f}" for v in comparison.scores[m].msi[rows]] for m in methods}
    maps = {method: shown.heatmaps[method] for method in methods}
    figures.save(figures.sheet_figure(shown.images, maps, titles, captions), out / "sheet.png")


def _record(comparison: Comparison) -> dict[str, object]:
    """What the numbers need to be believed and repeated."""
    classifier, standing = comparison.classifier, comparison.standing
    targets = next(iter(comparison.scores.values())).targets
    labelled = comparison.target_kind == "label"
    shown = zip(comparison.shown.names, comparison.shown.reasons, strict=True)
    record = provenance(asdict(comparison.settings), classifier.device, classifier.dtype)
    searches = {m: found.search for m, found in comparison.scores.items() if found.search}
    if searches:
        alphas = list(next(iter(searches.values())).alphas)
        means = {method: search.means.tolist() for method, search in searches.items()}
        record["search"] = {"alphas": alphas, "mean_msi": means}
    if comparison.alpha_curves is not None:
        record["alpha_curve"] = comparison.alpha_curves.as_json(comparison.names)
    return (
        record
        | comparison.facts()
        | {
            "skipped": [asdict(skipped) for skipped in comparison.skipped],
            "class_folders": folder_targets(comparison.names, targets) if labelled else {},
            "shown": dict(shown),
            "seed": comparison.settings.seed,
            "chance": asdict(standing.chance),
        }
    )


def _heatmaps(parts: Parts, method: str) -> Iterator[tuple[str, Tensor]]:
    """Every image's heatmap, a group at a time in memory."""
    for number in parts.done(HEATMAPS):
        part = parts.read(HEATMAPS, number)
        yield from zip(part.facts["names"], part.tensors[method], strict=True)
