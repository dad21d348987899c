"""What each part of the robust recipe is worth: the recipe with one thing changed, several seeds.

    sufficit reproduce cifar10 --data ROOT --out runs/cifar10
    python tools/lax_arms.py runs/cifar10 --data ROOT --out results/lax/arms-cifar10.json

The classifier is the run's own. Rows that are in the file already are not made again, so that the
same command goes on where it was stopped. `--like WORDS` keeps the arms whose name has them.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from sufficit.comparing.groups import quiet
from sufficit.reproduce.clock import Clock
from sufficit.reproduce.learning import lax_recipe, learn
from sufficit.reproduce.plans import read_plan
from sufficit.reproduce.scoring import overlap, pointing
from sufficit.reproduce.work import Work
from torch import Tensor, nn

from sufficit import Lax, evaluate, explain, leak
from sufficit.data.splits import Split, evenly
from sufficit.files import writing
from sufficit.provenance import provenance
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


def recipe_of(work: Work, arm: str, epochs: int) -> LaxRecipe:
    """The recipe of an arm, for the run's table."""
    if arm in (PAPER, EARLY):
        found = lax_recipe(work.table, "paper", epochs)
        return replace(found, upsample=1) if arm == EARLY else found
    return replace(RECIPES["robust"], epochs=epochs, **ARMS[arm])


def upsampled_early(channels: int, times: int) -> nn.Module:
    """The adapter with its map made finer by interpolation after the first layer."""
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


def trained(work: Work, arm: str, seed: int, loader: Any, epochs: int) -> Lax:
    """An adapter of this arm; the epoch is chosen by pictures held out from the training set."""
    net = None
    if arm == EARLY:
        torch.manual_seed(seed)
        channels = work.classifier.features(work.parts[1].part(slice(0, 1))[0])[0].shape[1]
        net = upsampled_early(channels, lax_recipe(work.table, "paper", 1).upsample)
    recipe = recipe_of(work, arm, epochs)
    return learn(work, loader, recipe=recipe, seed=seed, net=net, progress=False)


def scored(work: Work, test: Split, heatmaps: Tensor) -> dict[str, float]:
    """MSI and leak of heatmaps, and where the object is known, how well they lie on it."""
    images, labels = test.part(slice(None))
    alpha = work.table.alpha_min
    options: dict[str, Any] = {"columns": MSI, "value_step": 0.02, "progress": False}
    scores = evaluate(work.classifier, images, heatmaps, labels, alpha_min=alpha, **options)
    leaked = leak(work.classifier, images, heatmaps, labels, alpha_min=alpha)
    found = scores.mean() | leaked.mean() | {"leak_ratio": leaked.ratio}
    if test.masks is not None:
        found["iou"] = float(overlap(heatmaps, test.masks, alpha).mean())
        found["pointing"] = float(pointing(heatmaps, test.masks).mean())
    return found


def main() -> None:
    """Every arm with every seed, until all are there or time is up."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("run", type=Path)
    words.add_argument("--data", type=Path)
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--first-seed", type=int, default=0)
    words.add_argument("--epochs", type=int, default=4)
    words.add_argument("--images", type=int, default=2000)
    words.add_argument("--like", default="")
    words.add_argument("--keep", type=Path, help="folder for the adapters of the paper's recipe")
    words.add_argument("--minutes", type=float, default=float("inf"))
    asked = words.parse_args()
    begun = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(asked.out.with_suffix(".timings.json"), lambda _: None)
    work = Work(read_plan(asked.run), asked.run, asked.data, device, clock)
    chosen = evenly(work.sets.test.labels, asked.images, work.plan.seed)
    test = work.sets.test.pick(chosen)
    loader = loader_for(work.classifier, work.parts[0], work.plan.lax_batch)
    table = work.plan.table
    told = {"epochs": asked.epochs, "images": len(test), "table": table}
    facts = provenance(told, device, work.classifier.dtype)
    rows = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    known = {(row["arm"], row["seed"]) for row in rows}
    arms = [arm for arm in (*ARMS, PAPER, EARLY) if asked.like in arm]
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    for seed, arm in product(seeds, arms):
        if (arm, seed) in known or time.monotonic() - begun > 60 * asked.minutes:
            continue
        with quiet():
            start = time.monotonic()
            lax = trained(work, arm, seed, loader, asked.epochs)
            seconds = time.monotonic() - start
            heatmaps = explain(work.classifier, *test.part(slice(None)), lax, progress=False)
            row = {"task": table, "arm": arm, "seed": seed} | scored(work, test, heatmaps)
        rows.append(
            row | {"seconds": seconds, "recipe": asdict(recipe_of(work, arm, asked.epochs))}
        )
        print(f"{arm}, seed {seed}: MSI {row['msi']:.3f}, leak {row['leak_ratio']:.2f}", flush=True)
        if asked.keep and arm in (PAPER, EARLY):
            place = f"{table}-{arm}-{seed}".replace(",", "").replace(" ", "-")
            lax.save_pretrained(asked.keep / place)
        with writing(asked.out) as part:
            part.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
