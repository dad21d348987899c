"""What MSI can be made to say: methods and searched boxes, scored on a model and on its twin.

    python experiments/gaming.py --out gaming

A box that was searched by MSI with one fill scores high with that fill. What is left under a fill
that the search never asked, and on a twin of the model, is what the box is worth. The subject is
the model `sufficit:digits` with its adapter; `table` takes any other.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from sufficit import Classifier, Lax, evaluate, explain, leak, train_twin
from sufficit.data.digits import synthetic_digits

SEARCHES = {  # name -> fills, score; blur is never searched with
    "search: black, accuracy": ("black", "accuracy"),
    "search: black, confidence": ("black", "confidence"),
    "search: black+mean+noise, confidence": ("black+mean+noise", "confidence"),
}
METHODS = ("gradcam", "kpca-cam", "finer-cam", "center", "random")
HELD_OUT = "blur"
HEADINGS = {
    "model_black": "model, black",
    f"model_{HELD_OUT}": f"model, {HELD_OUT} (held out)",
    "twin_black": "twin, black",
    f"twin_{HELD_OUT}": f"twin, {HELD_OUT}",
    "mask_penalty": "area",
    "leak_ratio": "leak ratio",
}
Row = dict[str, float]


def table(
    model: Classifier,
    twin: Classifier,
    images: Tensor,
    labels: Tensor,
    adapters: Mapping[str, Lax],
    *,
    calls: int = 500,
    step: float = 0.05,
) -> dict[str, Row]:
    """MSI of methods, adapters and searches under two fills, by model and twin: rows by name."""
    methods: dict[str, Any] = {name: name for name in METHODS} | dict(adapters)
    for name, (fills, score) in SEARCHES.items():
        budget = calls * len(fills.split("+"))
        methods[name] = f"region-search:calls={budget}:fills={fills}:score={score}"
    rows = {}
    for name, method in methods.items():
        heatmaps = explain(model, images, labels, method, progress=False)
        rows[name] = scored(model, twin, images, heatmaps, labels, step)
    return rows


def scored(
    model: Classifier,
    twin: Classifier,
    images: Tensor,
    heatmaps: Tensor,
    labels: Tensor,
    step: float,
) -> Row:
    """MSI on model and twin with black and with the held-out fill; area and leakage."""
    row: Row = {}
    for who, judge in (("model", model), ("twin", twin)):
        for fill in ("black", HELD_OUT):
            means = evaluate(
                judge,
                images,
                heatmaps,
                labels,
                fill=fill,
                columns=("msi", "mask_penalty"),
                value_step=step,
                progress=False,
            ).mean()
            row |= {f"{who}_{fill}": means["msi"], "mask_penalty": means["mask_penalty"]}
    row["leak_ratio"] = leak(model, images, heatmaps, labels, progress=False).ratio
    return row


def in_markdown(rows: Mapping[str, Row]) -> str:
    """The rows as a table."""
    lines = [f"| maps | {' | '.join(HEADINGS.values())} |", f"|---|{'---:|' * len(HEADINGS)}"]
    for name, row in rows.items():
        cells = " | ".join(f"{row[key]:.3f}" for key in HEADINGS)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train the twin, score, write."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--images", type=int, default=32, help="that are scored")
    words.add_argument("--train-images", type=int, default=768, help="of the twin")
    words.add_argument("--epochs", type=int, default=5, help="of the twin")
    words.add_argument("--calls", type=int, default=500, help="per image and fill, of a search")
    words.add_argument("--step", type=float, default=0.05, help="of the curves")
    asked = words.parse_args()
    model, lax = Classifier.load("sufficit:digits"), Lax.from_pretrained("sufficit:digits")
    shown = synthetic_digits(asked.train_images, seed=1, held_out=False)
    loader = DataLoader(TensorDataset(shown.images, shown.labels), 32, shuffle=True)
    held, test = synthetic_digits(128, seed=3), synthetic_digits(asked.images, seed=2)
    twin = train_twin(
        model,
        loader,
        epochs=asked.epochs,
        validation=[(held.images, held.labels)],
        out=asked.out / "twin",
    )
    rows = table(
        model,
        twin,
        test.images,
        test.labels,
        {"LAX": lax},
        calls=asked.calls,
        step=asked.step,
    )
    (asked.out / "gaming.json").write_text(json.dumps(rows, indent=1) + "\n")
    (asked.out / "gaming.md").write_text(in_markdown(rows))
    print(in_markdown(rows))


if __name__ == "__main__":
    main()
