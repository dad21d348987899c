"""LAX on Synthetic MNIST and CIFAR-10 with ResNet18: train with several seeds, score, write rows.

    python tools/lax_runs.py --data ROOT --out results/lax

ROOT holds MNIST/raw (as torchvision lays it out) and cifar10/{train,test}/CLASS/ (as images).
The classifiers are trained first, plainly, unless ROOT/classifiers has them already.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lab import (
    Shuffled,
    Split,
    accuracy,
    cifar10,
    classifier_of,
    stride8_resnet18,
    synthetic_mnist,
    train_plainly,
)
from lightning.fabric import Fabric
from torch import Tensor

from sufficit import Classifier, Lax, cache_features, evaluate, explain, leak, train_lax
from sufficit.training import RECIPES, LaxRecipe

MSI = ("base_score", "mask_penalty", "msi")
TESTED, BATCH, DONORS = 2000, 256, 16


@dataclass(frozen=True)
class Task:
    """A classifier, what adapters for it train on, and what they are tested on."""

    name: str
    classifier: Classifier
    train: Split
    test: Split
    alpha_min: float = 0.5

    def loader(self) -> Any:
        """Batches whose features are computed once, kept on the classifier's device."""
        device = self.classifier.device
        return cache_features(self.classifier, Shuffled(self.train, BATCH), device=device)


def score(task: Task, heatmaps: Tensor, n: int = TESTED, **options: Any) -> dict[str, float]:
    """MSI and leak of heatmaps of the first n test images, and where the digit is, IoU with it."""
    images, labels = task.test.part(slice(0, n))
    found = evaluate(
        task.classifier,
        images,
        heatmaps,
        labels,
        alpha_min=task.alpha_min,
        columns=MSI,
        progress=False,
        **options,
    ).mean()
    leaked = leak(
        task.classifier, images, heatmaps, labels, alpha_min=task.alpha_min, donors=DONORS
    )
    found |= leaked.mean() | {"leak_ratio": leaked.ratio}
    if task.test.masks is not None:
        marked, digit = heatmaps > task.alpha_min, task.test.masks[:n]
        both, either = (marked & digit).flatten(1).sum(1), (marked | digit).flatten(1).sum(1)
        found["iou_digit"] = float((both / either.clamp(min=1)).mean())
        peaks = heatmaps.flatten(1).argmax(1)
        found["pointing"] = float(digit.flatten(1).gather(1, peaks[:, None]).float().mean())
    return found


def one_run(
    task: Task,
    name: str,
    recipe: LaxRecipe,
    seed: int,
    loader: Any,
    n: int = TESTED,
    **by: Any,
) -> tuple[dict[str, Any], Lax]:
    """Train an adapter by a recipe, test it, and tell all that is known of it."""
    device = task.classifier.device.type
    precision = "bf16-mixed" if device == "cuda" else "32-true"
    fabric = Fabric(accelerator=device, devices=1, precision=precision)
    begun = time.monotonic()
    lax = train_lax(
        task.classifier,
        loader,
        recipe=recipe,
        seed=seed,
        alpha_min=task.alpha_min,
        patience=None,
        fabric=fabric,
        progress=False,
    )
    seconds = time.monotonic() - begun
    images, labels = task.test.part(slice(0, n))
    heatmaps = explain(task.classifier, images, labels, lax)
    row = {"task": task.name, "arm": name, "seed": seed, "n": n, "train_seconds": seconds}
    row |= score(task, heatmaps, n, **by)
    return row | {"recipe": asdict(recipe), "history": lax.trained["history"]}, lax


def shown(row: dict[str, Any]) -> str:
    """The numbers of a row in one line."""
    keys = ("msi", "base_score", "mask_penalty", "leak", "leak_chance", "leak_ratio", "iou_digit")
    numbers = " ".join(f"{key} {row[key]:.4f}" for key in keys if key in row)
    return (
        f"{row['task']} {row['arm']} seed {row['seed']}: {numbers} ({row['train_seconds']:.0f} s)"
    )


def tasks_of(root: Path, device: str) -> list[Task]:
    """Both tasks, their classifiers trained plainly."""
    digits = synthetic_mnist(root / "MNIST", True, 60_000, 0, device)
    held = synthetic_mnist(root / "MNIST", False, TESTED, 1, device)
    photos, test = cifar10(root, "train", device), cifar10(root, "test", device)
    made = []
    for name, train, tested, epochs in (
        ("synthetic-mnist", digits, held, 6),
        ("cifar10", photos, test, 24),
    ):
        model = stride8_resnet18()
        train_plainly(model, train, epochs, augment=name == "cifar10")
        made.append(Task(name, classifier_of(model), train, tested))
        print(name, "accuracy", accuracy(made[-1].classifier, tested), flush=True)
    return made


def main() -> None:
    """Every recipe with every seed on every task."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--data", type=Path, required=True)
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = words.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for task in tasks_of(asked.data, asked.device):
        loader = task.loader()
        weight = 5 if task.name == "synthetic-mnist" else 2
        upsample = 1 if task.name == "synthetic-mnist" else 2
        paper = replace(RECIPES["paper"], entropy=weight, upsample=upsample, epochs=6)
        for name, recipe in (("robust", RECIPES["robust"]), ("paper", paper)):
            for seed in range(asked.seeds):
                row, lax = one_run(task, name, recipe, seed, loader)
                lax.save_pretrained(asked.out / f"{task.name}-{name}-{seed}")
                print(shown(row), flush=True)
                rows.append(row)
                (asked.out / "rows.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
