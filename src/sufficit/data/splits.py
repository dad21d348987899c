"""The images of a folder split in two: those to train on, and those held out for validation."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.data.images import ImageSource, open_images
from sufficit.data.loader import Entry, labels_for
from sufficit.errors import UserError

FEWEST = 8  # images in a folder to train on


Part = tuple[Entry, ...]
"""Images to train on or to hold out, with class numbers if labels are the targets."""


@dataclass(frozen=True)
class Folder:
    """The images of a folder: those to train on, and those held out for validation."""

    training: Part
    validation: Part
    target: Literal["label", "prediction"]

    def digest(self) -> str:
        """Return a short hash of exactly these images, labels and parts."""
        facts = ("name", "size", "version")
        parts = []
        for part in (self.training, self.validation):
            images = [[getattr(entry.image, fact, "") for fact in facts] for entry in part]
            labels = tuple(entry.label for entry in part) if self.target == "label" else None
            parts.append([images, labels])
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def read_folder(
    classifier: Classifier,
    data: str | Path,
    target: Literal["auto", "label", "prediction"] = "auto",
    share: float = 0.1,
    seed: int = 0,
    **columns: str | None,
) -> Folder:
    """Find the images below a folder, label them by class folder, hold out a share of them."""
    source = open_images(data, **columns)
    images = list(source)
    if len(images) < FEWEST:
        enough = f"training needs {FEWEST} or more, hundreds to be of use"
        raise UserError(f"{len(images)} images in {data}: {enough}")
    labels = labels_for(classifier, ImageSource(images, source.classes), target)
    if labels is not None and len(set(labels)) < 2:
        raise UserError(
            f"{data} is a folder with one class ({images[0].folder}): training needs two classes"
            " or more. Add images of other classes"
        )
    n = how_many(len(images), share)
    held = set(evenly(labels or [0] * len(images), n, seed, spare_half=True).tolist())
    parts: tuple[list[Entry], list[Entry]] = ([], [])
    for row, image in enumerate(images):
        part = parts[row in held]
        part.append(Entry(len(part), image, None if labels is None else labels[row]))
    target = "prediction" if labels is None else "label"
    return Folder(tuple(parts[0]), tuple(parts[1]), target)


def how_many(n: int, share: float) -> int:
    """Return how many of n images to hold out: the share up to 256; 8 or a quarter of few images.

    >>> how_many(8, 0.1), how_many(32, 0.1), how_many(1000, 0.1), how_many(9000, 0.1)
    (2, 8, 100, 256)
    """
    if not 0 < share <= 0.5:
        raise UserError(f"the share held out for validation must lie in 0..0.5, got {share:g}")
    return min(256, max(int(share * n), min(8, n // 4)))


def evenly(
    labels: Sequence[int] | Tensor, n: int, seed: int, *, spare_half: bool = False
) -> Tensor:
    """Return the rows of n images, evenly over the classes, drawn by the seed; in rising order.

    Scikit-learn's stratified splits draw in proportion to the class sizes, not evenly. With
    `spare_half`, no class gives more than half of its images as long as others are left.

    >>> evenly([0, 0, 0, 1, 1, 1], 2, seed=0).tolist()
    [2, 5]
    """
    classes = labels.tolist() if isinstance(labels, Tensor) else labels
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    sizes = Counter(classes)
    drawn = Counter[int]()
    keys = []
    # By rank in the class first: the first image of every class, then the second of every class.
    for place, row in enumerate(order.tolist()):
        label = classes[row]
        rank = drawn[label]
        drawn[label] += 1
        late = spare_half and rank >= sizes[label] // 2
        keys.append((late, rank, place, row))
    return torch.tensor(sorted(row for *_, row in sorted(keys)[:n]), dtype=torch.long)
