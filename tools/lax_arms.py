"""What each part of the robust recipe is worth: the recipe with one change, several seeds.

    sufficit reproduce cifar10 --data ROOT --out runs/cifar10
    python tools/lax_arms.py runs/cifar10 --data ROOT --out results/adapters/cifar10.json --jobs 4

The classifier is that of the run; so are the adapters of the arm `robust`. Every adapter is kept in
RUN/arms, with its scores: run the same command again to resume. `--arms` selects arms by name.
`--jobs` trains so many at the same time, each in a process of its own.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from paired_digits import DigitPairs, compose_pairs, pointing_by_class
from torch import Tensor

from sufficit import Classifier, Lax, evaluate, explain, leak, plots
from sufficit.data.splits import Split, evenly, middle
from sufficit.files import make_folder, read_json, writing
from sufficit.metrics.artefacts import fits, fragments, grid_energy, smoothed
from sufficit.metrics.localization import pointing
from sufficit.provenance import provenance, save_json
from sufficit.reproduce.datasets import DATASETS, read_digits
from sufficit.reproduce.pipeline import TablePipeline
from sufficit.reproduce.table_plan import read_plan
from sufficit.runs.explanations import quiet
from sufficit.similarity import region_overlap
from sufficit.training import RECIPES

MSI = ("base_score", "mask_penalty", "msi")
CHANGES: dict[str, dict[str, Any]] = {  # of the recipe
    "robust": {},
    "class-free": {"absent": 0.0},
    "no-mosaics": {"mosaics": 0.0},
    "no-donors": {"donors": 0.0},
    "no-masked-out": {"drop": 0.0},
    "black-alone": {"fills": ("black",)},
    "not-pushed": {"decide": 0.0},
    "two-stages": {"stages": 2},
    "large-at-first": {"bias": 0.0},
    "pixel-shuffle": {"stages": 1, "absent": 0.0, "upsample": 4, "bias": 0.0},
    "two-answers": {"answers": 2},
    "twin-judged": {},
    "crisp-contrast-1": {"donors": 1.4, "size": 2.5, "decide": 2},
}
PAIRS, SHOWN = 1000, 8
Scores = dict[str, float]


def train(table: TablePipeline, arm: str, seed: int, epochs: int, folder: Path) -> Lax:
    """The adapter of an arm in its folder, trained if it is not there."""
    if arm == "robust":
        name = f"lax-robust-{seed}"
        if not (table.out / "adapters" / name / "trained.json").exists():
            table.train_named(name)
        return Lax.from_pretrained(table.out / "adapters" / name)
    if arm in CHANGES:
        recipe = replace(table.plan.recipe("robust"), epochs=epochs, **CHANGES[arm])
    else:
        recipe = replace(RECIPES[arm], epochs=epochs)
    options: dict[str, Any] = {"recipe": recipe, "seed": seed, "progress": False}
    if arm == "twin-judged":
        options["twin"] = twin_of(table)
    return table.train_adapter(table.loader, out=folder, **options)


def twin_of(table: TablePipeline) -> Classifier | None:
    """The twin in the run's folder, if there is one."""
    if not (table.out / "twin" / "run.json").exists():
        return None
    found = Classifier.load(str(table.out / "twin"))
    return found.to(table.device, table.classifier.dtype)


def scores_of(table: TablePipeline, test: Split, lax: Lax) -> tuple[dict[str, float], Tensor]:
    """MSI by model and twin with two fills, leakage, artefacts, overlap with the object."""
    images, labels = test.part(slice(None))
    classifier, alpha = table.classifier, table.plan.paper.alpha_min
    heatmaps = explain(classifier, images, labels, lax, progress=False)
    options: dict[str, Any] = {"value_step": 0.02, "progress": False, "alpha_min": alpha}
    found = evaluate(classifier, images, heatmaps, labels, columns=MSI, **options).mean()
    judges = {"": classifier, "_twin": twin_of(table)}
    for fill, (name, judge) in product(("black", "blur"), judges.items()):
        if judge is not None and (fill, name) != ("black", ""):
            given = (judge, images, heatmaps, labels)
            scores = evaluate(*given, columns=("msi",), fill=fill, **options)
            found[f"msi_{fill}{name}"] = scores.mean()["msi"]
    leaked = leak(classifier, images, heatmaps, labels, alpha_min=alpha, progress=False)
    found |= leaked.mean() | {"leak_ratio": leaked.ratio}
    found |= artefacts_of(classifier, images, heatmaps.cpu(), alpha)
    cell = (found["cell"],) * 2
    given = (classifier, images, smoothed(heatmaps, cell).to(heatmaps), labels)
    found["msi_smoothed"] = evaluate(*given, columns=("msi",), **options).mean()["msi"]
    if test.masks is not None:
        objects = middle(test.masks[:, None], table.plan.side)[:, 0]
        found["iou"] = float(region_overlap(heatmaps, objects.float(), alpha, empty=0.0).mean())
        found["pointing"] = float(pointing(heatmaps, objects).nanmean())
    return found, heatmaps


def artefacts_of(
    classifier: Classifier, images: Tensor, heatmaps: Tensor, alpha: float
) -> dict[str, float]:
    """Grid energy at the cell of the features, that of a smoothed copy, fragments."""
    with torch.no_grad():
        features, _ = classifier.features(images[:1])
    h, w = (side / cells for side, cells in zip(images.shape[2:], features.shape[2:], strict=True))
    while not fits((h, w), (images.shape[2], images.shape[3])):
        h, w = h / 2, w / 2  # the last features have too few cells: those of an earlier stage
    grids = [grid_energy(maps, (h, w)) for maps in (heatmaps, smoothed(heatmaps, (h, w)))]
    parts = fragments(heatmaps, alpha)
    return {
        "cell": h,
        "grid_energy": float(grids[0].nanmean()),
        "grid_energy_smoothed": float(grids[1].nanmean()),
        "fragments_median": float(parts.median()),
        "fragments_mean": float(parts.mean()),
    }


def pair_scores(classifier: Classifier, lax: Lax, pairs: DigitPairs, alpha: float) -> Scores:
    """On two digits side by side: whose map points to which, and what of it lies in which half.

    `pointing_chance` is what a map that ignores the class gets: the mean of the hits of both maps
    on both digits. The class `third` is of no digit in the image.
    """
    images, labels = pairs.images.to(torch.float32), pairs.labels
    asked = [labels[:, 0], labels[:, 1], third_class(labels, lax.classes or 0)]
    maps = [explain(classifier, images, one, lax, progress=False) for one in asked]
    both = torch.stack(maps[:2], 1)
    hits = [pointing_by_class(some, pairs.masks, box=True) for some in (both, both.flip(1))]
    halves = torch.stack([half.sum((2, 3)) for half in both.tensor_split(2, 3)], 2)  # [N,2,2]
    shares = halves.diagonal(dim1=1, dim2=2) / halves.sum(2).clamp(min=1e-6)
    return {
        "pointing_by_class": float(hits[0].mean()),
        "pointing_chance": float(torch.stack(hits).mean()),
        "pointing_both": float((hits[0] == 1).all(1).float().mean()),
        "mass_in_own_half": float(shares.mean()),
        "mean_map_of_pair": float(both.mean()),
        "mean_map_of_third": float(maps[2].mean()),
        "third_empty": float((maps[2].flatten(1).amax(1) <= alpha).float().mean()),
    }


def third_class(labels: Tensor, classes: int) -> Tensor:
    """A class that is not in a pair, a different one from image to image: [N,2] -> [N]."""
    found = torch.arange(len(labels), device=labels.device) % classes
    for _ in range(2):
        found = torch.where((found[:, None] == labels).any(1), (found + 1) % classes, found)
    return found


def answer_scores(classifier: Classifier, lax: Lax, twice: DigitPairs, alpha: float) -> Scores:
    """On twice the same digit: on which one each answer lies, and whether it suffices alone."""
    images, targets = twice.images.to(torch.float32), twice.labels[:, 0]
    right, on = [], []
    for k in range(lax.answers):
        maps = explain(classifier, images, targets, lax.answer(k), progress=False)
        kept = (maps > alpha).float()
        with torch.no_grad():
            parts = (images * kept[:, None]).split(250)
            said = torch.cat([classifier(some).argmax(1) for some in parts])
        right.append(said == targets)
        inside = (kept[:, None] * twice.masks).sum((2, 3))  # [N,2]
        on.append(inside.argmax(1).masked_fill(inside.amax(1) == 0, -1 - k))  # -1, -2: on none
    suffice, places = torch.stack(right), torch.stack(on)
    apart = (places[0] != places[1]) & (places[:2] >= 0).all(0)
    return {
        "first_suffices": float(suffice[0].float().mean()),
        "both_suffice_alone": float(suffice[:2].all(0).float().mean()),
        "on_two_digits": float(apart.float().mean()),
        "both_suffice_on_two_digits": float((suffice[:2].all(0) & apart).float().mean()),
    }


def two_digit_scores(table: TablePipeline, lax: Lax, root: Path | None) -> Scores:
    """The scores of pairs of the run's test digits."""
    folder = None if root is None else DATASETS["synthetic-mnist"].find(root)
    strokes, labels = read_digits(folder, "test")
    known = strokes.to(table.device), labels.to(table.device), PAIRS, (table.plan.seed, "test")
    found, alpha = Scores(), table.plan.paper.alpha_min
    for same, wanted in ((False, lax.classes is not None), (True, lax.answers > 1)):
        if wanted:
            pairs = compose_pairs(*known, same=same)
            pairs = replace(pairs, images=pairs.images.float() / 255)
            scored = answer_scores if same else pair_scores
            found |= scored(table.classifier, lax, pairs, alpha)
    return found


def one(asked: argparse.Namespace, arm: str, seed: int) -> None:
    """Train and score an adapter; its scores are the last file of its folder."""
    folder = make_folder(asked.run / "arms" / f"{arm}-{seed}")
    if (folder / "scores.json").exists():
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = read_plan(asked.run)
    table = TablePipeline(plan, asked.run, asked.data, device, say=lambda _: None, progress=False)
    epochs = asked.epochs or plan.lax_epochs
    test = table.sets.test.pick(evenly(table.sets.test.labels, asked.images, plan.seed))
    with quiet():
        start = time.monotonic()
        lax = train(table, arm, seed, epochs, folder)
        seconds = round(time.monotonic() - start, 1)
        scores, heatmaps = scores_of(table, test, lax)
        if plan.table == "synthetic-mnist":
            scores |= two_digit_scores(table, lax, asked.data)
    rows = evenly(test.labels, SHOWN, 1)
    images, labels = test.part(rows.to(test.labels.device))
    titles = [table.sets.classes[label] for label in labels.tolist()]
    shown = plots.sheet_figure(
        images.cpu(), {arm: heatmaps[rows.to(heatmaps.device)].cpu()}, titles
    )
    plots.save(shown, folder / "sheet.png")
    trained = {key: lax.trained[key] for key in ("recipe", "target", "seed", "batches")}
    row = {"table": plan.table, "arm": arm, "seed": seed, **scores, "seconds": seconds}
    row |= {"history": lax.trained["history"], "trained": trained}
    config = {"epochs": epochs, "images": len(test), "table": plan.table, "arm": arm}
    save_json(folder / "scores.json", provenance(config, device, table.classifier.dtype) | row)
    print(f"{plan.table}, {arm}, seed {seed}: MSI {row['msi']:.3f}, blur {row['msi_blur']:.3f},"
          f" leak {row['leak_ratio']:.2f}, {seconds:.0f} s", flush=True)  # fmt: skip


def main() -> None:
    """Every arm with every seed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("run", type=Path)
    options.add_argument("--data", type=Path)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--arms", default="robust")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--epochs", type=int, help="of other arms than robust; default: the run's")
    options.add_argument("--images", type=int, default=2000)
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--only", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.only:
        one(asked, asked.only[0], int(asked.only[1]))
        return

    def start(pair: tuple[int, str]) -> None:
        subprocess.run([sys.executable, *sys.argv, "--only", pair[1], str(pair[0])], check=False)

    pairs = [*product(range(asked.seeds), asked.arms.split(","))]
    with ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(start, pairs))
    found = sorted((asked.run / "arms").glob("*/scores.json"))
    make_folder(asked.out.parent)
    with writing(asked.out) as part:
        part.write_text(json.dumps([read_json(path) for path in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
