"""What each part of the robust recipe is worth: the recipe with one change, several seeds.

    sufficit reproduce cifar10 --data ROOT --out runs/cifar10
    python tools/lax_arms.py runs/cifar10 --data ROOT --out results/lax/arms-cifar10.json

The classifier is that of the run. Rows that are in the file are not computed again: run the same
command again to resume. `--like WORDS` selects the arms with WORDS in their name.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sufficit import Lax, evaluate, explain, leak
from sufficit.data.splits import Split, evenly
from sufficit.files import writing
from sufficit.metrics.localization import pointing
from sufficit.provenance import provenance
from sufficit.reproduce.pipeline import TablePipeline
from sufficit.reproduce.table_plan import read_plan
from sufficit.runs.engine import quiet
from sufficit.similarity import region_overlap
from sufficit.training import RECIPES, LaxRecipe
from sufficit.training.loaders import loader_for

MSI = ("base_score", "mask_penalty", "msi")
LENT = RECIPES["robust"].fills
ARMS: dict[str, dict[str, Any]] = {
    "robust": {},
    "no donors": {"donors": 0.0},
    "donors 0.6": {"donors": 0.6},
    "no masked-out term": {"drop": 0.0},
    "black alone": {"fills": ("black",)},
    "black alone, no donors": {"fills": ("black",), "donors": 0.0},
    "other images as well": {"fills": (*LENT, "other")},
    "not pushed to 0 and 1": {"decide": 0.0},
    "unbounded terms": {"power": 0.0, "size": 8.0, "drop": 1.0, "decide": 1.0},
    "size 1": {"size": 1.0},
    "size 3": {"size": 3.0},
    "map of the features' size": {"upsample": 1},
    "twice the features' size": {"upsample": 2},
    "bias -2": {"bias": -2.0},
    "bias 2": {"bias": 2.0},
}
PAPER, EARLY = "paper", "paper, upsampled early"


def arm_recipe(table: TablePipeline, arm: str, epochs: int) -> LaxRecipe:
    """The recipe of an arm, with the values of the run's table."""
    if arm in (PAPER, EARLY):
        found = replace(table.plan.recipe("paper"), epochs=epochs)
        return replace(found, upsample=1) if arm == EARLY else found
    return replace(RECIPES["robust"], epochs=epochs, **ARMS[arm])


def upsampled_early(channels: int, times: int) -> nn.Module:
    """An adapter whose map is upsampled after the first layer."""
    return nn.Sequential(
        nn.Conv2d(channels, 256, 1),
        nn.ReLU(),
        nn.Upsample(scale_factor=times, mode="bilinear"),
        nn.Conv2d(256, 128, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(128, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 1, 3, padding=1),
    )


def train_arm(table: TablePipeline, arm: str, seed: int, loader: Any, epochs: int) -> Lax:
    """An adapter of this arm; images held out from the training set select the epoch."""
    net = None
    if arm == EARLY:
        torch.manual_seed(seed)
        channels = table.classifier.features(table.parts[1].part(slice(0, 1))[0])[0].shape[1]
        net = upsampled_early(channels, table.plan.recipe("paper").upsample)
    recipe = arm_recipe(table, arm, epochs)
    return table.train_adapter(loader, recipe=recipe, seed=seed, net=net, progress=False)


def scores_of(table: TablePipeline, test: Split, heatmaps: Tensor) -> dict[str, float]:
    """MSI and leakage of heatmaps, and their overlap with the object where it is known."""
    images, labels = test.part(slice(None))
    classifier, alpha = table.classifier, table.plan.paper.alpha_min
    options: dict[str, Any] = {"columns": MSI, "value_step": 0.02, "progress": False}
    scores = evaluate(classifier, images, heatmaps, labels, alpha_min=alpha, **options)
    leaked = leak(classifier, images, heatmaps, labels, alpha_min=alpha)
    found = scores.mean() | leaked.mean() | {"leak_ratio": leaked.ratio}
    if test.masks is not None:
        overlap = region_overlap(heatmaps, test.masks.float(), alpha, empty=0.0)
        found["iou"] = float(overlap.mean())
        found["pointing"] = float(pointing(heatmaps, test.masks).mean())
    return found


def main() -> None:
    """Every arm with every seed, until all are done or time is up."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("run", type=Path)
    options.add_argument("--data", type=Path)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--first-seed", type=int, default=0)
    options.add_argument("--epochs", type=int, default=4)
    options.add_argument("--images", type=int, default=2000)
    options.add_argument("--like", default="")
    options.add_argument("--keep", type=Path, help="folder for the adapters of the paper's recipe")
    options.add_argument("--minutes", type=float, default=float("inf"))
    asked = options.parse_args()
    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = read_plan(asked.run)
    table = TablePipeline(plan, asked.run, asked.data, device, say=lambda _: None)
    test = table.sets.test.pick(evenly(table.sets.test.labels, asked.images, plan.seed))
    loader = loader_for(table.classifier, table.parts[0], plan.lax_batch)
    config = {"epochs": asked.epochs, "images": len(test), "table": plan.table}
    facts = provenance(config, device, table.classifier.dtype)
    rows = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    known = {(row["arm"], row["seed"]) for row in rows}
    arms = [arm for arm in (*ARMS, PAPER, EARLY) if asked.like in arm]
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    for seed, arm in product(seeds, arms):
        if (arm, seed) in known or time.monotonic() - start > 60 * asked.minutes:
            continue
        with quiet():
            before = time.monotonic()
            lax = train_arm(table, arm, seed, loader, asked.epochs)
            seconds = time.monotonic() - before
            heatmaps = explain(table.classifier, *test.part(slice(None)), lax, progress=False)
            row = {"task": plan.table, "arm": arm, "seed": seed}
            row |= scores_of(table, test, heatmaps)
        recipe = asdict(arm_recipe(table, arm, asked.epochs))
        rows.append(row | {"seconds": seconds, "recipe": recipe})
        print(f"{arm}, seed {seed}: MSI {row['msi']:.3f}, leak {row['leak_ratio']:.2f}", flush=True)
        if asked.keep and arm in (PAPER, EARLY):
            place = f"{plan.table}-{arm}-{seed}".replace(",", "").replace(" ", "-")
            lax.save_pretrained(asked.keep / place)
        with writing(asked.out) as part:
            part.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
