"""Does the map of a class lie on its own digit? Adapters of the shipped network, several seeds.

    OMP_NUM_THREADS=1 python tools/digit_pairs.py results/adapters/digit-pairs.json

Trains an adapter per arm and seed on single digits, for few steps (a minute or two of one CPU
core). Scores it on single digits (MSI, leakage, the map for a class that is not there), on two
digits side by side and, with two answers, on twice the same digit. None of these digits was
trained on. Rows that are in the file are kept: run the same command again to resume.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from paired_digits import digit_pairs
from torch.utils.data import DataLoader, TensorDataset

from lax_arms import CHANGES, Scores, answer_scores, pair_scores, third_class
from sufficit import Classifier, Lax, evaluate, explain, leak, train_lax
from sufficit.data.digits import Digits, synthetic_digits
from sufficit.files import make_folder, read_json, writing
from sufficit.provenance import provenance
from sufficit.training import RECIPES

CHANGED = CHANGES | {"two-answers-no-mosaics": {"answers": 2, "mosaics": 0.0}}
BATCH, EPOCHS, DIGITS, SCORED, PAIRS, ALPHA = 32, 6, 2000, 300, 500, 0.5


def loader_of(digits: Digits) -> DataLoader[tuple[object, ...]]:
    """Batches of images and labels."""
    return DataLoader(TensorDataset(digits.images, digits.labels), BATCH, shuffle=True)


def trained(classifier: Classifier, arm: str, seed: int) -> Lax:
    """The adapter of an arm; in bfloat16, which takes half the time on a CPU."""
    return train_lax(
        classifier,
        loader_of(synthetic_digits(DIGITS, seed=seed + 1, held_out=False)),
        recipe=replace(RECIPES["robust"], epochs=EPOCHS, **CHANGED[arm]),
        seed=seed,
        validation=loader_of(synthetic_digits(32, seed=99, held_out=False)),
        validation_images=32,
        patience=None,
        fabric=Fabric(accelerator="cpu", devices=1, precision="bf16-mixed"),
        progress=False,
    )


def single_scores(classifier: Classifier, lax: Lax) -> Scores:
    """On single digits: MSI under two fills, leakage, and the map for another class."""
    digits = synthetic_digits(SCORED, seed=0)
    images, labels = digits.images, digits.labels
    maps = explain(classifier, images, labels, lax, progress=False)
    given = (classifier, images, maps, labels)
    options: dict[str, Any] = {"columns": ("msi",), "value_step": 0.05, "progress": False}
    found = {
        f"msi_{fill}": evaluate(*given, fill=fill, **options).mean()["msi"]
        for fill in ("black", "blur")
    }
    found["leak_ratio"] = leak(*given, progress=False).ratio
    absent = third_class(labels[:, None].expand(-1, 2), lax.classes or 0)
    empty = explain(classifier, images, absent, lax, progress=False)
    found |= {"mean_map": float(maps.mean()), "mean_map_of_absent": float(empty.mean())}
    found["absent_empty"] = float((empty.flatten(1).amax(1) <= ALPHA).float().mean())
    for k in range(lax.answers if lax.answers > 1 else 0):
        alone = explain(classifier, images, labels, lax.answer(k), progress=False) > ALPHA
        with torch.no_grad():
            right = classifier(images * alone[:, None]).argmax(1) == labels
        found[f"single_suffices_{k + 1}"] = float(right.float().mean())
        found[f"single_empty_{k + 1}"] = float((~alone.flatten(1).any(1)).float().mean())
    return found


def row_of(arm: str, seed: int) -> dict[str, Any]:
    """Train and score one adapter."""
    classifier = Classifier.load("sufficit:digits")
    classifier.model.to(memory_format=torch.channels_last)
    start = time.process_time()
    lax = trained(classifier, arm, seed)
    seconds = round(time.process_time() - start, 1)
    scores = single_scores(classifier, lax)
    scores |= pair_scores(classifier, lax, digit_pairs(PAIRS, seed=7), ALPHA)
    if lax.answers > 1:
        scores |= answer_scores(classifier, lax, digit_pairs(PAIRS, seed=8, same=True), ALPHA)
    config = {"epochs": EPOCHS, "digits": DIGITS, "batch": BATCH, "recipe": lax.trained["recipe"]}
    about = provenance(config, torch.device("cpu"), torch.float32)
    return {"arm": arm, "seed": seed, **scores, "cpu_seconds": seconds, **about}


def main() -> None:
    """Every arm with every seed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("out", type=Path)
    options.add_argument("--arms", default="robust,no-mosaics,two-answers")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asked = options.parse_args()
    make_folder(asked.out.parent)
    for arm in asked.arms.split(","):
        for seed in asked.seeds:
            rows = read_json(asked.out) if asked.out.exists() else []
            if not any((row["arm"], row["seed"]) == (arm, seed) for row in rows):
                rows.append(row_of(arm, seed))
                with writing(asked.out) as part:
                    part.write_text(json.dumps(rows, indent=1) + "\n")
                shown = {k: round(v, 3) for k, v in rows[-1].items() if isinstance(v, float)}
                print(arm, seed, shown, flush=True)


if __name__ == "__main__":
    main()
