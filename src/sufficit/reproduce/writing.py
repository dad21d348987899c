"""The results of a run as files: rows, summary, provenance, the table, pictures."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from sufficit import plots as figures
from sufficit.comparing.settings import CONTROLS
from sufficit.files import make_folder, writing
from sufficit.reproduce.kept import Kept
from sufficit.reproduce.outcome import Outcome, paper_rows, summary_of
from sufficit.reproduce.plans import NUMBERS
from sufficit.reproduce.tables import table_of
from sufficit.results import as_json, save_json

FOLDER = "results"
SHEET = 6  # images on the sheet; adapters by their first seed
TITLES = {
    "gradcam": "Grad-CAM",
    "gradcam++": "Grad-CAM++",
    "layercam": "Layer-CAM",
    "kpca-cam": "KPCA-CAM",
    "finer-cam": "Finer-CAM",
    "rollout": "Attention rollout",
    "lax-paper": "LAX, paper's recipe",
    "lax-robust": "LAX, robust recipe",
    "random": "random (control)",
    "center": "center (control)",
}
HEADINGS = {
    "insertion_pixel": "ins. px ↑",
    "deletion_pixel": "del. px ↓",
    "insertion_percent": "ins. % ↑",
    "deletion_percent": "del. % ↓",
    "fid_minus_pixel": "Fid- px ↓",
    "fid_plus_pixel": "Fid+ px ↑",
    "fid_minus_percent": "Fid- % ↓",
    "fid_plus_percent": "Fid+ % ↑",
    "base_score": "base ↑",
    "mask_penalty": "penalty ↓",
    "msi": "MSI ↑",
}
BESIDE = {"leak_ratio": "leak / chance", "iou": "IoU ↑", "pointing": "pointing ↑"}
PARQUET = ("pyarrow",)
REPORT = ("pyarrow", "jinja2")


def absent(packages: tuple[str, ...]) -> list[str]:
    """Which of some packages are not installed here."""
    return [name for name in packages if find_spec(name) is None]


def write_results(out: Path, outcome: Outcome) -> Path:
    """Everything that can be told of a run from its files; rows where pyarrow is installed."""
    folder, seed = out / FOLDER, outcome.plan.seed
    make_folder(folder)
    own = {m: as_json(summary_of(c, seed)) for m, c in outcome.columns.items()}
    pooled = {m: as_json(summary_of(c, seed)) for m, c in outcome.pooled().items()}
    save_json(folder / "summary.json", {"methods": pooled, "runs": own, "seeds": _seeds(outcome)})
    if outcome.search is not None:
        save_json(folder / "alpha.json", alpha_curves(outcome))
        figures.save(_alpha_figure(outcome), folder / "alpha.png")
    _save_sheet(out, folder, outcome)
    with writing(folder / "table.md") as path:
        path.write_text("\n".join(table_lines(outcome.plan.table, pooled)) + "\n")
    if not absent(PARQUET):
        _save_rows(folder / "rows.parquet", outcome)
    save_json(folder / "run.json", run_record(outcome))
    return folder


def run_record(outcome: Outcome) -> dict[str, Any]:
    """What the numbers need to be believed and repeated."""
    facts, trained = outcome.facts, outcome.trained
    keys = ("test_accuracy", "test_images", "train_images", "random_at_first", "data")
    return {
        **facts["record"],
        "table": outcome.plan.table,
        "n": outcome.n,
        "alpha_min": facts["alpha_min"],
        "seed": outcome.plan.seed,
        "clean_accuracy": float(np.nanmean(outcome.clean)),
        "empty_heatmaps": facts["empty"],
        "model_calls": facts["model_calls"],
        "classifier": {key: trained[key] for key in keys},
        "seconds": outcome.seconds,
    }


def table_lines(table: str, summaries: dict[str, Any]) -> list[str]:
    """Our rows and the paper's under each, as markdown; summaries as JSON has them."""
    shown = {k: v for k, v in BESIDE.items() if any(k in s for s in summaries.values())}
    heads = ["method", *HEADINGS.values(), "95 % of MSI", *shown.values()]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    theirs = paper_rows(table)
    for method in [m for m in TITLES if m in summaries]:
        summary = summaries[method]
        cells = [number(summary[name]["mean"]) for name in HEADINGS]
        cells.append(f"{number(summary['msi']['low'], 2)} .. {number(summary['msi']['high'], 2)}")
        cells += [number(summary.get(name, {}).get("mean"), 2) for name in shown]
        lines.append(f"| {TITLES[method]} | {' | '.join(cells)} |")
        known = theirs.get("lax" if method.startswith("lax-") else method)
        if known and method != "lax-robust":
            cells = [number(known[name]) for name in HEADINGS] + [""] * (1 + len(shown))
            lines.append(f"| *paper* | {' | '.join(f'*{c}*' if c else '' for c in cells)} |")
    return lines


def number(value: float | None, digits: int = 3) -> str:
    """A number as tables have it; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def alpha_curves(outcome: Outcome) -> dict[str, Any]:
    """Mean MSI over alpha_min for every method, and where it is best."""
    search = outcome.pooled_search()
    means = {m: np.nanmean(values, axis=0) for m, values in search.items()}
    best = {m: outcome.alphas[int(np.nanargmax(v))] for m, v in means.items()}
    n = len(next(iter(search.values())))
    told = {"alphas": list(outcome.alphas), "n": n, "best": best}
    return told | {"mean_msi": {m: v.tolist() for m, v in means.items()}}


def _seeds(outcome: Outcome) -> dict[str, Any]:
    """How far the seeds of a recipe are apart."""
    found = {}
    for recipe in outcome.plan.recipes if outcome.plan.seeds else ():
        means = outcome.seed_means(recipe, "msi")
        found[recipe] = {"msi": means, "sd": float(np.std(means, ddof=1)) if means[1:] else None}
    return found


def _alpha_figure(outcome: Outcome) -> Any:
    curves, table = alpha_curves(outcome), table_of(outcome.plan.table)
    lines = {method: (curves["alphas"], means) for method, means in curves["mean_msi"].items()}
    panel = figures.alpha_panel(lines, table.alpha_min)
    controls = [method for method in lines if method in CONTROLS]
    return figures.lines_figure(
        [panel], controls, words=f"{table.title}: mean over {curves['n']} images"
    )


def _save_sheet(out: Path, folder: Path, outcome: Outcome) -> None:
    kept = Kept(out / NUMBERS / "shown.safetensors")
    if not kept.exists():
        return
    tensors, facts = kept.read()
    later = {m for m, (_, seed) in outcome.plan.adapters.items() if seed > outcome.plan.seed}
    names = facts["names"][:SHEET]
    rows = [outcome.names.index(name) for name in names]
    methods = [m for m in facts["methods"] if m not in later]
    maps = {m: tensors[f"{m}/heatmaps"][:SHEET].float() / 255 for m in methods}
    captions = {m: [f"MSI {outcome.columns[m]['msi'][row]:+.2f}" for row in rows] for m in methods}
    images = tensors["images"][:SHEET].float() / 255
    sheet = figures.sheet_figure(images, maps, [_class_name(name) for name in names], captions)
    figures.save(sheet, folder / "sheet.png", dpi=80)


def _class_name(name: str) -> str:
    """An image's class folder, without the number of CUB-200.

    >>> _class_name("011.Rusty_Blackbird/00003.png"), _class_name("cat/00001.png")
    ('Rusty_Blackbird', 'cat')
    """
    folder = name.partition("/")[0]
    return folder.partition(".")[2] or folder


def _save_rows(path: Path, outcome: Outcome) -> None:
    """A row an image and method."""
    import pandas

    facts = {"image": outcome.names, "target": outcome.targets, "clean_accuracy": outcome.clean}
    frames = [pandas.DataFrame({"method": m, **facts, **c}) for m, c in outcome.columns.items()]
    with writing(path) as part:
        pandas.concat(frames).to_parquet(part, index=False)
