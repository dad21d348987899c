"""`sufficit demo`: a small digit classifier, explained and scored, with nothing to download."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from sufficit import plots as figures
from sufficit.classifier.classifier import Classifier
from sufficit.data.digits import Digits, synthetic_digits
from sufficit.explainers import CAMS, Method, explain_all
from sufficit.explainers.lax import Lax
from sufficit.files import make_folder
from sufficit.metrics.alpha_search import AlphaCurves, alpha_curves, coarse, spread
from sufficit.metrics.compare_scores import Standing, compare_scores
from sufficit.metrics.leakage import Leak, leak
from sufficit.metrics.scores import Scores, evaluate, join, with_leak
from sufficit.progress import bar
from sufficit.report import Content, Facts, MethodScores, Shown, pick_shown, write_report
from sufficit.results import (
    Estimate,
    as_json,
    provenance,
    save_json,
    save_pairs,
    save_scores,
    summarise,
)
from sufficit.tables import MAIN, methods_table
from sufficit.training import train_lax
from sufficit.training.recipes import RECIPES

LEARNED = "lax"
CONTROLS = ("center", "random")
METHODS = (*CAMS, *CONTROLS)
TRAINED_ON, BATCH = 2048, 8
DONORS = 32  # a picture, all there are: with fewer, chance decides what the table says
EPOCHS = 1  # of several, 32 pictures would choose one, and rounding decides whom they like best
RECIPE = replace(RECIPES["robust"], size=1.25)  # in so short a training 2 makes masks too small
TRUTH = "true digit"
STEPS = {"value_step": 0.02, "percent_step": 0.04}  # half as fine as usual, in half of the time
SHOWN = 6  # pictures on the sheet
SAMPLE = 8  # pictures that MSI over alpha_min is measured on


def run_demo(
    folder: Path, n: int, seed: int, console: Console, trained_on: int = TRAINED_ON
) -> None:
    """Train, draw, score, print and save."""
    make_folder(folder)
    console.print("This takes about two minutes on two cores; a bar says how long is left.")
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
        f"[bold]3[/] Training LAX, an adapter that draws the net's heatmap, on {trained_on} other"
        " pictures; nobody tells it where a digit is."
    )
    learned = train(classifier, trained_on, seed)
    console.print(
        f"[bold]4[/] Asking it and {len(METHODS)} other methods where the net looked, and comparing"
        " with the digit's true place and four pixels around it."
    )
    asked: dict[str, Method] = {LEARNED: learned, **{name: name for name in METHODS}}
    heatmaps = explain_all(classifier, digits.images, digits.labels, asked)
    heatmaps[TRUTH] = around(digits.masks)
    console.print(
        "[bold]5[/] Showing and hiding what each heatmap marks, and asking the net again each time:"
        " is what it marks enough, and is the rest not?"
    )
    scores = score_all(classifier, digits, heatmaps)
    curves = sample_alphas(classifier, digits, heatmaps)
    summaries = {name: summarise(found, seed=seed) for name, found in scores.items()}
    contest = {name: scores[name] for name in (LEARNED, *CAMS)}
    standing = compare_scores(contest, seed=seed)
    title = f"Means over {n} pictures, alpha_min 0.5"
    if "leak_ratio" in summaries[LEARNED]:
        title += "; leak near 1: masks don't tell the class"
    console.print(methods_table(summaries, standing, title, (*MAIN, "leak_ratio")))
    calls = sum(int(found.calls.sum()) for found in scores.values()) + curves.calls
    console.print(in_words(summaries, standing.best), highlight=False)
    _save(folder, digits, heatmaps, scores, curves, summaries, standing, classifier)
    console.print(
        f"All of it, from {calls:,} model calls, is in {folder}: pictures, and a row a picture for"
        " every method.",
        highlight=False,
    )


def train(classifier: Classifier, n: int, seed: int) -> Lax:
    """An adapter for the classifier, from one look at each of n pictures that are not held out."""
    shown = synthetic_digits(n, seed=seed + 1, held_out=False)
    loader = DataLoader(TensorDataset(shown.images, shown.labels), BATCH, shuffle=True)
    judges = min(32, n)
    with one_thread():
        return train_lax(
            classifier, loader, recipe=RECIPE, epochs=EPOCHS, seed=seed, validation_images=judges
        )


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums are not split over cores inside, so their number does not change the rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def score_all(
    classifier: Classifier, digits: Digits, heatmaps: dict[str, Tensor]
) -> dict[str, Scores]:
    """Every method's scores, under one progress bar."""
    parts: dict[str, list[Scores]] = {name: [] for name in heatmaps}
    steps = [
        (name, part) for name in heatmaps for part in torch.arange(len(digits.labels)).split(8)
    ]
    total = len(steps) + len(heatmaps)
    with bar("  scoring", wanted=None) as tick:
        for done, (name, part) in enumerate(steps, 1):
            images, labels = digits.images[part], digits.labels[part]
            maps = heatmaps[name][part]
            parts[name].append(
                evaluate(classifier, images, maps, labels, **STEPS, progress=False)  # type: ignore[arg-type]  # they are numbers
            )
            if tick:
                tick(done, total)
        joined = {name: join(found) for name, found in parts.items()}
        if len(digits.labels.unique()) < 2:
            return joined
        for done, name in enumerate(joined, len(steps) + 1):
            joined[name] = with_leak(joined[name], _leak(classifier, digits, heatmaps[name]))
            if tick:
                tick(done, total)
    return joined


def sample_alphas(
    classifier: Classifier, digits: Digits, heatmaps: dict[str, Tensor]
) -> AlphaCurves:
    """Every method's MSI over alpha_min, on a few of the pictures."""
    rows = list(spread(len(digits.labels), SAMPLE))
    maps = {name: found[rows] for name, found in heatmaps.items()}
    given = (classifier, digits.images[rows], maps, digits.labels[rows], rows)
    with bar("  MSI over alpha_min", wanted=None) as tick:
        return alpha_curves(*given, step=coarse(STEPS["value_step"]), tick=tick)


def _leak(classifier: Classifier, digits: Digits, heatmaps: Tensor) -> Leak:
    return leak(classifier, digits.images, heatmaps, digits.labels, donors=DONORS, progress=False)


def in_words(summaries: Mapping[str, Mapping[str, Estimate]], best: str) -> str:
    """What the table means, in two sentences."""
    means = {name: found["msi"].mean for name, found in summaries.items()}
    penalty, bar_to_clear = summaries[best]["mask_penalty"].mean, max(means[c] for c in CONTROLS)
    beaten = [m for m in means if m not in (*CONTROLS, TRUTH) and not means[m] > bar_to_clear]
    told = " and ".join(f"{name} {means[name]:.2f}" for name in CONTROLS)
    found = f" {', '.join(beaten)} did not." if beaten else " All did."
    return (
        f"MSI is near +1 when a small region suffices and nothing else does: {best} is the best"
        f" method here at {means[best]:.2f}, marking {penalty:.0%} of the picture, where the true"
        f" digit reaches {means[TRUTH]:.2f}. Two controls never look at the net and earn {told}: a"
        f" method must beat them to have explained anything.{found}"
    )


def around(masks: Tensor) -> Tensor:
    """The digit and the four pixels around it: what the net needs to see of it."""
    return torch.nn.functional.max_pool2d(masks[:, None], 9, 1, 4)[:, 0]


def _save(
    folder: Path,
    digits: Digits,
    heatmaps: dict[str, Tensor],
    scores: dict[str, Scores],
    curves: AlphaCurves,
    summaries: dict[str, dict[str, Estimate]],
    standing: Standing,
    classifier: Classifier,
) -> None:
    shown = slice(0, SHOWN)
    names = [*standing.ranking, TRUTH, "center", "random"]
    captions = {name: [f"MSI {v:+.2f}" for v in scores[name].msi[shown]] for name in names}
    titles = [f"a {label}" for label in digits.labels[shown].tolist()]
    maps = {name: heatmaps[name][shown] for name in names}
    sheet = figures.sheet_figure(digits.images[shown], maps, titles, captions)
    figures.save(sheet, folder / "sheet.png")
    best = standing.best
    figures.save(figures.curves_figure(scores[best], best), folder / "curves.png")
    images = _names(digits)
    for name, found in scores.items():
        place = make_folder(folder / name.replace(" ", "-"))
        save_scores(place, found, images)
    summary = {name: as_json(found) for name, found in summaries.items()}
    save_json(folder / "summary.json", summary | {"standing": asdict(standing)})
    save_pairs(folder / "pairs.csv", standing)
    config = {"methods": list(scores), "data": "synthetic digits", "model": "sufficit:digits"}
    run = provenance(config, classifier.device, classifier.dtype)
    calls = sum(int(found.calls.sum()) for found in scores.values())
    facts = {"n": len(images), "model_calls": calls, "seed": standing.chance.seed}
    _save_report(folder / "report.html", digits, heatmaps, scores, curves, summaries, standing, run)
    more = {"alpha_curve": curves.as_json(images), "chance": asdict(standing.chance)}
    save_json(folder / "run.json", run | facts | more)


def _save_report(
    path: Path,
    digits: Digits,
    heatmaps: dict[str, Tensor],
    scores: dict[str, Scores],
    curves: AlphaCurves,
    summaries: dict[str, dict[str, Estimate]],
    standing: Standing,
    run: dict[str, Any],
) -> None:
    shown = pick_shown({name: scores[name] for name in standing.ranking})
    seed = standing.chance.seed
    content = Content(
        title="Where does a small net look for a digit?",
        facts=Facts.of(run, model="sufficit:digits", data="synthetic digits", seed=seed),
        scores={name: MethodScores.of(found, shown) for name, found in scores.items()},
        summaries=summaries,
        standing=standing,
        names=_names(digits),
        shown=Shown(
            shown,
            digits.images[shown],
            {name: maps[shown] for name, maps in heatmaps.items()},
            chosen="the best, the worst, the most disputed, and some drawn by the seed",
        ),
        classes=[str(digit) for digit in range(10)],
        alpha_curve=curves.as_json(_names(digits)),
        controls=("center", "random"),
    )
    write_report(path, content)


def _names(digits: Digits) -> list[str]:
    return [f"digit-{i:04d}" for i in range(len(digits.labels))]
