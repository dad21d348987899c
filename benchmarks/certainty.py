"""What it costs to know a mean within 0.01: sampled, exact, torchcam, quantus, in one run.

    OMP_NUM_THREADS=2 python benchmarks/certainty.py --out benchmarks/results/certainty-cpu.json
    python benchmarks/certainty.py --device cuda --model MODEL --data FOLDER --images 256

Grad-CAM's heatmaps of the images are scored with every mask and with 26 per image, by the model as
it is and, on CUDA, by its compiled copy; the ways take turns. torchcam has two of the eleven
columns (areas by percentage), quantus one (deletion), so that these are measured alone as well.
From the spread of each column over images follows how many images make its 95 % interval +-0.01;
calls and seconds are for that many, computed from the calls and seconds per image measured here.
Heatmaps are not included.
"""

import argparse
import copy
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compiled import classifier_of, images_of
from evaluate import PERCENT, FakeExtractor, flips, peers, quantus_job
from sufficit import Classifier, Scores, evaluate, explain
from sufficit.classifier.acceleration import accelerated
from sufficit.data.digits import synthetic_digits
from sufficit.perturbation.predict import usual_batch
from sufficit.provenance import provenance
from timing import medians, side_by_side

WITHIN = 0.01
SAMPLED, TWO = 26, 10  # masks per image, for eleven columns and for two
STEPS = 50  # of the curves by percentage


def images_needed(values: torch.Tensor) -> float:
    """The number of images whose mean has a 95 % interval of +-WITHIN, by its spread: [N]."""
    return (1.96 * float(values.double().std()) / WITHIN) ** 2


@dataclass
class Way:
    """What one way of scoring found: a value per image and column, and its calls per image."""

    columns: dict[str, torch.Tensor]  # each [N]
    calls: float

    @staticmethod
    def of(scores: Scores) -> "Way":
        return Way(dict(scores.columns), float(scores.calls.double().mean()))


def row(way: Way, seconds: float) -> dict[str, Any]:
    """Images, calls and seconds to the interval: for MSI if it is there, and the widest column."""
    n = len(next(iter(way.columns.values())))
    needed = {name: images_needed(values) for name, values in way.columns.items()}
    widest = max(needed, key=lambda name: needed[name])
    found: dict[str, Any] = {"n": n, "columns": [*needed], "calls_per_image": way.calls}
    found["calls_per_second"] = way.calls * n / seconds
    for label, name in (("msi", "msi"), ("all its columns", widest)):
        if name in needed:
            images = needed[name]
            spent = {"images": images, "calls": images * way.calls, "seconds": images * seconds / n}
            found[label] = spent | {
                "column": name,
                "mean": float(way.columns[name].double().mean()),
            }
    return found


def by_torchcam(
    classifier: Classifier, images: torch.Tensor, maps: torch.Tensor, targets: torch.Tensor
) -> Callable[[], Way]:
    """The areas by percentage of insertion and deletion, by confidence, filled with black."""
    from torchcam.metrics import DeletionInsertionMetric

    inputs = classifier.normalize(images)
    softmax = partial(torch.softmax, dim=-1)
    how: dict[str, Any] = {"baseline": classifier.normalize(torch.zeros_like(images[:1]))}
    how |= {"steps": STEPS, "batch_size": usual_batch(classifier, images.shape[1:])}
    kept: list[tuple[torch.Tensor, ...]] = []

    class Keeping(DeletionInsertionMetric):  # type: ignore[misc]
        """Keeps the curve of each image; torchcam adds them up."""

        def _compute_curves(self, *given: Any, **more: Any) -> Any:
            found = super()._compute_curves(*given, **more)
            kept.append(found)
            return found

    metric = Keeping(FakeExtractor(classifier.model, maps), softmax, **how)

    def work() -> Way:
        kept.clear()
        metric.update(inputs, targets.tolist())
        fractions, deletion, insertion = kept[0]
        areas = (torch.trapezoid(one.float(), fractions) for one in (insertion, deletion))
        calls = 2 * (len(fractions) - 2) + 2  # inner points of both curves, whole, and nothing
        return Way(dict(zip(PERCENT, (one.cpu() for one in areas), strict=True)), calls)

    return work


def by_quantus(
    classifier: Classifier, images: torch.Tensor, maps: torch.Tensor, targets: torch.Tensor
) -> Callable[[], Way]:
    """The area of pixel flipping: quantus takes float32 and flips channel by channel."""
    model = copy.deepcopy(classifier.bare).float().eval()
    inputs, size = classifier.normalize(images.float()).float(), images.shape[1:]
    job = quantus_job(model, inputs, maps, usual_batch(classifier, size), targets.tolist())

    def work() -> Way:
        curves = torch.tensor(np.array(job()), dtype=torch.float32)  # [N,steps]
        return Way({"deletion_percent": curves.mean(1)}, flips(images.shape[-1])[0])

    return work


def ways(
    classifier: Classifier, images: torch.Tensor, asked: argparse.Namespace
) -> dict[str, Callable[[], Way | Scores]]:
    """Every way of scoring Grad-CAM's heatmaps, by name."""
    with torch.no_grad():
        targets = torch.cat([classifier(part).argmax(1) for part in images.split(64)])
    maps = explain(classifier, images, targets, method="gradcam").to(asked.device)
    models = {"": classifier}
    if asked.device == "cuda" and not asked.eager:
        batch = usual_batch(classifier, images.shape[1:])
        models[", compiled"] = accelerated(classifier, (batch, *images.shape[1:]))
    jobs: dict[str, Callable[[], Way | Scores]] = {}
    for name, model in models.items():
        score = partial(evaluate, model, images, maps, targets, progress=False)
        jobs[f"exact{name}"] = score
        jobs[f"{SAMPLED} calls{name}"] = partial(score, calls=SAMPLED)
    two: dict[str, Any] = {"columns": PERCENT, "score": "confidence", "percent_step": 1 / STEPS}
    plain = partial(evaluate, classifier, images, maps, targets, progress=False, **two)
    jobs["two columns, exact"] = plain
    jobs[f"two columns, {TWO} calls"] = partial(plain, calls=TWO)
    few = (images[: asked.peer_images], maps[: asked.peer_images], targets[: asked.peer_images])
    installed = peers()
    if "torchcam" in installed:
        jobs["two columns, torchcam"] = by_torchcam(classifier, *few)
    if "quantus" in installed:
        jobs["deletion alone, quantus"] = by_quantus(classifier, *few)
    return jobs


def measured(
    jobs: dict[str, Callable[[], Way | Scores]], device: str, rounds: int
) -> dict[str, dict[str, Any]]:
    """What each way costs, timed in turns."""
    found: dict[str, Way] = {}

    def keeping(name: str, work: Callable[[], Way | Scores]) -> Callable[[], None]:
        def job() -> None:
            done = work()
            found[name] = done if isinstance(done, Way) else Way.of(done)

        return job

    timed = {name: keeping(name, job) for name, job in jobs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' own
        seconds = medians(side_by_side(dict(timed), device, rounds))
    return {name: row(way, seconds[name]) for name, way in found.items()}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--device", default="cpu")
    words.add_argument("--model", help="as in compiled.py; else digits and their own model")
    words.add_argument("--data", type=Path)
    words.add_argument("--images", type=int, default=100)
    words.add_argument("--side", type=int, default=224)
    words.add_argument("--peer-images", type=int, default=64, help="scored by other libraries")
    words.add_argument("--eager", action="store_true", help="no compiled copy")
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
    results = measured(ways(classifier, images, asked), asked.device, asked.rounds)
    for name, one in results.items():
        for label in ("msi", "all its columns"):
            if label in one:
                spent = one[label]
                print(
                    f"{name:28} {label:16} {spent['images']:8,.0f} images {spent['calls']:12,.0f}"
                    f" calls {spent['seconds']:9.2f} s  {spent['column']} {spent['mean']:.3f}"
                )
    if asked.out:
        facts = provenance({"argv": sys.argv[1:]}, classifier.device, classifier.dtype)
        facts |= {"n": len(images), "within": WITHIN, "results": results}
        asked.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
