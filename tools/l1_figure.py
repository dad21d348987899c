"""Does entropy give sharper masks than l1? Both on the shipped digits net, at about the same area.

python tools/l1_figure.py docs/l1.png
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from sufficit import Classifier, evaluate, explain, train_lax
from sufficit import plots as figures
from sufficit.data.digits import synthetic_digits
from sufficit.training import RECIPES

IMAGES, TESTED, EPOCHS, SHOWN = 1024, 200, 6, 5
WORDS = {"entropy": "entropy, the paper's", "l1": "l1", "l1 + decide": "l1, and pushed to 0 and 1"}


def main(path: Path) -> None:
    """Train, draw the maps and how their values are spread, print the scores."""
    classifier = Classifier.load("sufficit:digits")
    shown = synthetic_digits(IMAGES, seed=1, held_out=False)
    loader = DataLoader(TensorDataset(shown.images, shown.labels), 32, shuffle=True)
    held = synthetic_digits(TESTED, seed=2)
    recipes = {
        "entropy": RECIPES["paper"],
        "l1": RECIPES["l1"],
        "l1 + decide": replace(RECIPES["l1"], decide=1),
    }
    maps: dict[str, Tensor] = {}
    for name, recipe in recipes.items():
        lax = train_lax(classifier, loader, recipe=recipe, epochs=EPOCHS, validation_images=64)
        maps[name] = explain(classifier, held.images, held.labels, lax)
        columns = ("base_score", "mask_penalty", "msi")
        scores = evaluate(classifier, held.images, maps[name], held.labels, columns=columns)
        means = {column: round(value, 3) for column, value in scores.mean().items()}
        between = float(((maps[name] > 0.1) & (maps[name] < 0.9)).float().mean())
        print(name, means, f"share of pixels between 0.1 and 0.9: {between:.3f}", flush=True)
    figures.save(_figure(held.images, maps), path)


def _figure(images: Tensor, maps: dict[str, Tensor]) -> Figure:
    figure = Figure(figsize=(1.3 * (SHOWN + 2.2), 1.45 * len(maps)))
    grid = figure.add_gridspec(len(maps), SHOWN + 1, width_ratios=[*[1] * SHOWN, 1.9])
    for row, (name, found) in enumerate(maps.items()):
        for column in range(SHOWN):
            axis = figure.add_subplot(grid[row, column])
            axis.imshow(figures.blend(images[column], found[column]).numpy())
            axis.set_axis_off()
            if column == 0:
                axis.set_title(WORDS[name], fontsize=8, loc="left")
        axis = figure.add_subplot(grid[row, SHOWN])
        axis.hist(found.flatten().numpy(), bins=torch.linspace(0, 1, 41).tolist(), color="#0f766e")
        axis.set_yscale("log")
        axis.tick_params(labelsize=6)
        axis.set_title("values of the masks", fontsize=7)
    figure.tight_layout(pad=0.5)
    return figure


if __name__ == "__main__":
    main(Path(sys.argv[1]))
