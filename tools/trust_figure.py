"""Masks laid over images of other classes: what the classifier then says, method by method.

    sufficit reproduce cifar10 --data ROOT --out runs/cifar10
    python tools/trust_figure.py runs/cifar10 docs/trust.png

Shown are Grad-CAM and the run's first adapter of each recipe, over five images of other classes,
grey and noise. The images are those in which the paper's masks leak most, or `--rows`.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from sufficit import Classifier, Lax, explain
from sufficit import plots as figures
from sufficit.data.images import list_images, read_image
from sufficit.reproduce.datasets import CIFAR_CLASSES as CLASSES
from sufficit.reproduce.table_plan import read_plan

DONORS = 5
SHOWN = 4  # images, where none are named
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
    """A row an image and method: the image, its mask, and other things under the same mask.

    Where the classifier gives what is not of the mask's class that class, the words are red.
    """
    height = len(rows) * len(heatmaps)
    figure = Figure(figsize=(1.25 * (DONORS + 4), 1.55 * height))
    axes = figure.subplots(height, DONORS + 4, squeeze=False)
    for number, (row, (name, maps)) in enumerate((r, m) for r in rows for m in heatmaps.items()):
        mask = (maps[row] > alpha_min).float()
        own = int(labels[row])
        shown = _under(images, labels, row) * mask
        said = _said(classifier, shown).tolist()
        line = axes[number]
        _picture(line[0], images[row], CLASSES[own], HONEST)
        _picture(line[1], images[row] * mask, f"{name}, {mask.mean():.0%}", HONEST)
        for axis, picture, word in zip(line[2:], shown, said, strict=True):
            _picture(axis, picture, CLASSES[word], FOOLED if word == own else HONEST)
    figure.tight_layout(pad=0.4)
    figures.save(figure, path)


def _under(images: Tensor, labels: Tensor, row: int) -> Tensor:
    """What a mask is laid over: images of other classes, grey, noise."""
    donors = images[_donors(labels, int(labels[row]), row)]
    noise = torch.rand(donors[:1].shape, generator=torch.Generator().manual_seed(0))
    return torch.cat([donors, torch.full_like(noise, 0.5), noise])


def _said(classifier: Classifier, images: Tensor) -> Tensor:
    with torch.no_grad():
        return classifier(images).argmax(1)


def worst(
    classifier: Classifier, images: Tensor, labels: Tensor, maps: Tensor, alpha_min: float
) -> list[int]:
    """The images whose masks are called by their own class most often over what is not of it."""
    masks = (maps > alpha_min).float()
    fooled = [
        int((_said(classifier, _under(images, labels, row) * masks[row]) == labels[row]).sum())
        for row in range(len(labels))
    ]
    return torch.tensor(fooled).argsort(descending=True, stable=True)[:SHOWN].tolist()


def _donors(labels: Tensor, own: int, row: int) -> Tensor:
    """Images of other classes, drawn by the row's number."""
    others = (labels != own).nonzero()[:, 0].cpu()
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(row))
    return others[order[:DONORS]]


def _picture(axis: object, image: Tensor, words: str, colour: str) -> None:
    axis.imshow(image.permute(1, 2, 0).cpu().numpy())  # type: ignore[attr-defined]
    axis.set_title(words, fontsize=7, color=colour, pad=2)  # type: ignore[attr-defined]
    axis.set_axis_off()  # type: ignore[attr-defined]


def main() -> None:
    """A few test images of a run, in an order drawn once."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("run", type=Path)
    words.add_argument("out", type=Path)
    words.add_argument("--rows", type=int, nargs="+")
    words.add_argument("--images", type=int, default=200)
    asked = words.parse_args()
    classifier = Classifier.load(asked.run / "classifier")
    pictures = list_images(asked.run / "test")
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))
    chosen = [pictures[i] for i in order[: asked.images].tolist()]
    images = torch.stack([read_image(picture.path, classifier.view) for picture in chosen])
    labels = torch.tensor([CLASSES.index(str(picture.folder)) for picture in chosen])
    methods: dict[str, Lax | str] = {"Grad-CAM": "gradcam"}
    for recipe in ("paper", "robust"):
        folder = min((asked.run / "adapters").glob(f"lax-{recipe}-*"))
        methods[f"LAX {recipe}"] = Lax.from_pretrained(folder)
    heatmaps = {name: explain(classifier, images, labels, m) for name, m in methods.items()}
    alpha = read_plan(asked.run).paper.alpha_min
    rows = asked.rows or worst(classifier, images, labels, heatmaps["LAX paper"], alpha)
    draw_trust(asked.out, classifier, images, labels, heatmaps, rows, alpha)


if __name__ == "__main__":
    main()
