"""What it costs to know a mean within 0.01: sampled and exact curves, side by side in one run.

    OMP_NUM_THREADS=2 python benchmarks/certainty.py --out benchmarks/results/certainty-cpu.json
    python benchmarks/certainty.py --device cuda --model MODEL --data FOLDER --images 500

Grad-CAM's heatmaps of the images are scored with every mask and with 26 per image, by the model as
it is and, on CUDA, by its compiled copy; the ways take turns. From the spread of each column over
images follows how many images make its 95 % interval +-0.01; calls and seconds are for that many,
computed from the calls and seconds per image measured here. Heatmaps are not included.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compiled import classifier_of, images_of
from sufficit import Classifier, Scores, evaluate, explain
from sufficit.classifier.acceleration import accelerated
from sufficit.data.digits import synthetic_digits
from sufficit.perturbation.predict import usual_batch
from sufficit.provenance import provenance
from timing import medians, side_by_side

WITHIN = 0.01
SAMPLED = 26


def images_needed(values: torch.Tensor) -> float:
    """The number of images whose mean has a 95 % interval of +-WITHIN, by its spread: [N]."""
    return (1.96 * float(values.double().std()) / WITHIN) ** 2


def row(scores: Scores, seconds: float) -> dict[str, Any]:
    """Images, calls and seconds to the interval: for MSI, and for the widest column."""
    n, calls = len(scores), float(scores.calls.double().mean())
    needed = {name: images_needed(values) for name, values in scores.columns.items()}
    widest = max(needed, key=lambda name: needed[name])
    found: dict[str, Any] = {"calls_per_image": calls, "calls_per_second": calls * n / seconds}
    for label, name in (("msi", "msi"), ("all eleven columns", widest)):
        images = needed[name]
        spent = {"images": images, "calls": images * calls, "seconds": images * seconds / n}
        found[label] = spent | {"column": name}
    return found


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--device", default="cpu")
    words.add_argument("--model", help="as in compiled.py; else digits and their own model")
    words.add_argument("--data", type=Path)
    words.add_argument("--images", type=int, default=100)
    words.add_argument("--side", type=int, default=224)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    if asked.model is None:
        digits, classifier = synthetic_digits(asked.images), Classifier.load("sufficit:digits")
        images, classifier = digits.images, classifier.to(asked.device)
    else:
        classifier = classifier_of(asked.model, asked.side, asked.device)
        images = images_of(asked, classifier)
    images = images.to(asked.device)
    with torch.no_grad():
        targets = torch.cat([classifier(part).argmax(1) for part in images.split(64)])
    maps = explain(classifier, images, targets, method="gradcam").to(asked.device)
    models = {"": classifier}
    if asked.device == "cuda":
        batch = usual_batch(classifier, images.shape[1:])
        models[", compiled"] = accelerated(classifier, (batch, *images.shape[1:]))
    jobs: dict[str, Callable[[], Scores]] = {}
    for name, model in models.items():
        score = partial(evaluate, model, images, maps, targets)
        jobs[f"exact{name}"] = score
        jobs[f"{SAMPLED} calls{name}"] = partial(score, calls=SAMPLED)
    seconds = medians(side_by_side(dict(jobs), asked.device, asked.rounds))
    results = {name: row(job(), seconds[name]) for name, job in jobs.items()}
    for name, found in results.items():
        for label in ("msi", "all eleven columns"):
            spent = found[label]
            print(
                f"{name:22} {label:20} {spent['images']:8,.0f} images {spent['calls']:12,.0f} calls"
                f" {spent['seconds']:9.2f} s"
            )
    if asked.out:
        facts = provenance({"argv": sys.argv[1:]}, classifier.device, classifier.dtype)
        facts |= {"n": len(images), "within": WITHIN, "results": results}
        asked.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
