"""`sufficit demo`: a small digit classifier, explained and scored, with nothing to download."""

from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sufficit import figures
from sufficit.classifiers import Classifier
from sufficit.data.digits import Digits, synthetic_digits
from sufficit.explainers import CAMS, explain_all
from sufficit.metrics.evaluate import Scores, evaluate, join
from sufficit.progress import bar
from sufficit.results import Estimate, as_json, provenance, save_json, save_scores, summarise

METHODS = (*CAMS, "center", "random")
TRUTH = "true digit"
SHOWN = 6
HEADINGS = {
    "insertion_percent": "insertion",
    "deletion_percent": "deletion",
    "base_score": "base",
    "mask_penalty": "penalty",
    "msi": "MSI",
}


def run_demo(folder: Path, n: int, seed: int, console: Console) -> None:
    """Draw, score, print and save."""
    folder.mkdir(parents=True, exist_ok=True)
    console.print(
        f"[bold]1[/] Making {n} pictures: a digit somewhere in noise, among boxes that mean"
        " nothing."
    )
    digits = synthetic_digits(n, seed=seed)
    classifier = Classifier.load("sufficit:digits")
    with torch.no_grad():
        right = (classifier(digits.images).argmax(1) == digits.labels).float().mean()
    console.print(
        f"[bold]2[/] A small net that ships with Sufficit reads {right:.0%} of them rightly."
    )
    console.print(
        f"[bold]3[/] Asking {len(METHODS)} methods where it looked, and comparing with the digit's"
        " true place and four pixels around it."
    )
    heatmaps = explain_all(classifier, digits.images, digits.labels, METHODS)
    heatmaps[TRUTH] = around(digits.masks)
    console.print(
        "[bold]4[/] Showing and hiding what each heatmap marks, and asking the net again."
    )
    scores = score_all(classifier, digits, heatmaps)
    summaries = {name: summarise(found, seed=seed) for name, found in scores.items()}
    console.print(demo_table(summaries, n))
    calls = sum(int(found.calls.sum()) for found in scores.values())
    console.print(in_words(summaries, calls))
    _save(folder, digits, heatmaps, scores, summaries, classifier, seed)
    console.print(
        f"Look at {folder / 'sheet.png'} and {folder / 'curves.png'}; all rows are in {folder}."
    )


def score_all(
    classifier: Classifier, digits: Digits, heatmaps: dict[str, Tensor]
) -> dict[str, Scores]:
    """Every method's scores, under one progress bar."""
    parts: dict[str, list[Scores]] = {name: [] for name in heatmaps}
    steps = [
        (name, part) for name in heatmaps for part in torch.arange(len(digits.labels)).split(8)
    ]
    with bar("  scoring", wanted=None) as tick:
        for done, (name, part) in enumerate(steps, 1):
            images, labels = digits.images[part], digits.labels[part]
            parts[name].append(
                evaluate(classifier, images, heatmaps[name][part], labels, progress=False)
            )
            if tick:
                tick(done, len(steps))
    return {name: join(found) for name, found in parts.items()}


def demo_table(summaries: dict[str, dict[str, Estimate]], n: int) -> Table:
    """A row a method, best MSI first."""
    title = f"Means over {n} pictures, alpha_min 0.5"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("method", no_wrap=True)
    for column, heading in HEADINGS.items():
        arrow = "↑" if summaries[TRUTH][column].higher_is_better else "↓"
        table.add_column(f"{heading} {arrow}", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    for name in ranked(summaries):
        found = summaries[name]
        cells = [f"{found[column].mean:.3f}" for column in HEADINGS]
        cells.append(f"{found['msi'].low:.2f} .. {found['msi'].high:.2f}")
        table.add_row(name, *cells, style="dim" if name in ("random", "center", TRUTH) else None)
    return table


def ranked(summaries: dict[str, dict[str, Estimate]]) -> list[str]:
    """Methods by MSI, best first."""
    return sorted(summaries, key=lambda name: -summaries[name]["msi"].mean)


def in_words(summaries: dict[str, dict[str, Estimate]], calls: int) -> str:
    """What the table means, in two sentences."""
    best = next(name for name in ranked(summaries) if name in CAMS)
    msi, truth = summaries[best]["msi"].mean, summaries[TRUTH]["msi"].mean
    penalty = summaries[best]["mask_penalty"].mean
    return (
        f"MSI is near +1 when a small region suffices and nothing else does: {best} is the best"
        f" method here at {msi:.2f}, marking {penalty:.0%} of the picture, where the true digit"
        f" reaches {truth:.2f}. The controls random and center say what looking nowhere in"
        f" particular earns; a method must beat them. ({calls:,} model calls.)"
    )


def around(masks: Tensor) -> Tensor:
    """The digit and the four pixels around it: what the net needs to see of it."""
    return torch.nn.functional.max_pool2d(masks[:, None], 9, 1, 4)[:, 0]


def _save(
    folder: Path,
    digits: Digits,
    heatmaps: dict[str, Tensor],
    scores: dict[str, Scores],
    summaries: dict[str, dict[str, Estimate]],
    classifier: Classifier,
    seed: int,
) -> None:
    shown = slice(0, SHOWN)
    names = [name for name in ranked(summaries) if name in CAMS] + [TRUTH, "center", "random"]
    captions = {name: [f"MSI {v:+.2f}" for v in scores[name].msi[shown]] for name in names}
    titles = [f"a {label}" for label in digits.labels[shown].tolist()]
    maps = {name: heatmaps[name][shown] for name in names}
    sheet = figures.sheet_figure(digits.images[shown], maps, titles, captions)
    figures.save(sheet, folder / "sheet.png")
    best = names[0]
    figures.save(figures.curves_figure(scores[best], best), folder / "curves.png")
    images = [f"digit-{i:04d}" for i in range(len(digits.labels))]
    for name, found in scores.items():
        place = folder / name.replace(" ", "-")
        place.mkdir(exist_ok=True)
        save_scores(place, found, images)
    save_json(folder / "summary.json", {name: as_json(found) for name, found in summaries.items()})
    config = {"methods": list(scores), "data": "synthetic digits", "model": "sufficit:digits"}
    run = provenance(config, classifier.device, classifier.dtype)
    calls = sum(int(found.calls.sum()) for found in scores.values())
    save_json(folder / "run.json", run | {"n": len(images), "seed": seed, "model_calls": calls})
