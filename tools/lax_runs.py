"""LAX on Synthetic MNIST and CIFAR-10 with ResNet18: train with several seeds, score, write rows.

    python tools/lax_runs.py --data ROOT --out results/lax

ROOT holds MNIST and CIFAR-10 as `sufficit reproduce` reads them. The classifiers are trained first,
plainly. The runs in results/lax were made by an earlier form of this file.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from sufficit import Classifier, Lax, evaluate, explain, leak, train_lax
from sufficit.data.datasets import DataOptions, load_sets
from sufficit.data.splits import Split, evenly
from sufficit.models import IMAGENET_MEAN, IMAGENET_STD, build, fold
from sufficit.reproducing.learning import lax_recipe
from sufficit.reproducing.scoring import overlap, pointing
from sufficit.reproducing.tables import TABLES
from sufficit.training import RECIPES, LaxRecipe
from sufficit.training.classifiers import ClassifierRecipe, accuracy, train_classifier
from sufficit.training.loaders import loader_for

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
        return loader_for(self.classifier, self.train, BATCH)


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
        digit = task.test.masks[:n]
        found["iou_digit"] = float(overlap(heatmaps, digit, task.alpha_min).mean())
        found["pointing"] = float(pointing(heatmaps, digit).mean())
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
    fabric = fabric_of(task.classifier.device.type)
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


def tasks_of(root: Path, out: Path, device: str) -> list[Task]:
    """Both tasks, their classifiers trained plainly."""
    made = []
    for name in ("synthetic-mnist", "cifar10"):
        table = TABLES[name]
        sets = load_sets(name, root, DataOptions(side=table.side, device=device))
        training = table.training
        recipe = ClassifierRecipe(
            training.epochs, training.batch_size, lr=training.lr, augment=training.augment
        )
        model = build(table.model, len(sets.classes), table.side)
        train_classifier(
            model,
            sets.train,
            recipe,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            fabric=fabric_of(device),
            out=out / f"{name}-classifier",
        )
        found = Classifier(fold(model), "layer4", IMAGENET_MEAN, IMAGENET_STD)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        classifier = found.to(device, dtype, torch.channels_last)
        test = sets.test.pick(evenly(sets.test.labels, TESTED, seed=0))
        made.append(Task(name, classifier, sets.train, test))
        print(name, "accuracy", accuracy(classifier, sets.test), flush=True)
    return made


def fabric_of(device: str) -> Fabric:
    """Mixed precision on a GPU."""
    precision = "bf16-mixed" if device == "cuda" else "32-true"
    return Fabric(accelerator=device, devices=1, precision=precision)


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
    for task in tasks_of(asked.data, asked.out, asked.device):
        loader = task.loader()
        paper = lax_recipe(TABLES[task.name], "paper", 6)
        for name, recipe in (("robust", RECIPES["robust"]), ("paper", paper)):
            for seed in range(asked.seeds):
                row, lax = one_run(task, name, recipe, seed, loader)
                lax.save_pretrained(asked.out / f"{task.name}-{name}-{seed}")
                print(shown(row), flush=True)
                rows.append(row)
                (asked.out / "rows.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
