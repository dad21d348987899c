"""Masks laid over images of other classes: what the classifier then says, method by method."""

from collections.abc import Mapping
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from sufficit import Classifier, figures
from sufficit.data.cifar import CLASSES

DONORS = 5
FOOLED, HONEST = "#c2410c", "#1f2937"


def draw_trust(
    path: Path,
    classifier: Classifier,
    images: Tensor,
    labels: Tensor,
    heatmaps: Mapping[str, Tensor],
    rows: list[int],
    alpha_min: float = 0.5,
) -> None:
    """A row an image and method: the image, its mask, and other images under the same mask.

    Where the classifier gives an image of another class the mask's class, the words are red.
    """
    height = len(rows) * len(heatmaps)
    figure = Figure(figsize=(1.25 * (DONORS + 2), 1.55 * height))
    axes = figure.subplots(height, DONORS + 2, squeeze=False)
    for number, (row, (name, maps)) in enumerate((r, m) for r in rows for m in heatmaps.items()):
        mask = (maps[row] > alpha_min).float()
        own = int(labels[row])
        donors = _donors(labels, own, row)
        shown = images[donors] * mask
        with torch.no_grad():
            said = classifier(shown).argmax(1).tolist()
        line = axes[number]
        _picture(line[0], images[row], CLASSES[own], HONEST)
        _picture(line[1], images[row] * mask, f"{name}, {mask.mean():.0%}", HONEST)
        for axis, picture, word in zip(line[2:], shown, said, strict=True):
            _picture(axis, picture, CLASSES[word], FOOLED if word == own else HONEST)
    figure.tight_layout(pad=0.4)
    figures.save(figure, path)


def _donors(labels: Tensor, own: int, row: int) -> Tensor:
    """Images of other classes, drawn by the row's number."""
    others = (labels != own).nonzero()[:, 0].cpu()
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(row))
    return others[order[:DONORS]]


def _picture(axis: object, image: Tensor, words: str, colour: str) -> None:
    axis.imshow(image.permute(1, 2, 0).cpu().numpy())  # type: ignore[attr-defined]
    axis.set_title(words, fontsize=7, color=colour, pad=2)  # type: ignore[attr-defined]
    axis.set_axis_off()  # type: ignore[attr-defined]
