"""Train the adapter that ships for the small net on synthetic digits: 20 minutes of one CPU core.

    python tools/train_digits_lax.py src/sufficit/assets/digits/lax [cuda]

The recipe is `robust`. Pictures of held-out digits, which neither the net nor the adapter has seen,
tell what came of it.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from sufficit import Classifier, evaluate, explain, leak
from sufficit.data.digits import Digits, synthetic_digits
from sufficit.explainers import Method
from sufficit.training import train_lax
from sufficit.training.processes import fabric_for

EPOCHS, PICTURES, BATCH, SEED = 8, 12_000, 64, 0


def loader_of(digits: Digits) -> DataLoader[tuple[object, ...]]:
    """Batches of pictures and labels."""
    return DataLoader(TensorDataset(digits.images, digits.labels), BATCH, shuffle=True)


def told(classifier: Classifier, digits: Digits, method: Method) -> str:
    """How well a method does on pictures."""
    images, labels = digits.images, digits.labels
    heatmaps = explain(classifier, images, labels, method)
    scores = evaluate(classifier, images, heatmaps, labels, columns=("msi",), value_step=0.02)
    leaked = leak(classifier, images, heatmaps, labels)
    return f"MSI {scores.mean()['msi']:.3f}, leak ratio {leaked.ratio:.2f}"


def main(folder: Path, device: str = "cpu") -> None:
    """Train, score on the held-out digits, save."""
    classifier = Classifier.load("sufficit:digits").to(device)
    shown = synthetic_digits(PICTURES, seed=SEED + 1, held_out=False)
    judging = synthetic_digits(512, seed=SEED + 2, held_out=False)
    with tempfile.TemporaryDirectory() as checkpoints:
        lax = train_lax(
            classifier,
            loader_of(shown),
            epochs=EPOCHS,
            seed=SEED,
            validation=loader_of(judging),
            out=checkpoints,
            about={"data": f"{PICTURES} synthetic digits"},
            fabric=fabric_for(torch.device(device), precision="bf16"),
        )
    held_out = synthetic_digits(500, seed=SEED)
    for name, method in {"lax": lax, "gradcam": "gradcam"}.items():
        print(f"{name}, 500 pictures of held-out digits: {told(classifier, held_out, method)}")
    lax.save_pretrained(folder)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("device", nargs="?", default="cpu")
    asked = options.parse_args()
    main(asked.folder, asked.device)
