"""A folder of pictures in two parts: one to train on, one to judge by."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from sufficit.classifier.classifier import Classifier
from sufficit.data.finding import ImageSource
from sufficit.data.images import ImageFile, list_images
from sufficit.data.loader import labels_for
from sufficit.errors import UserError
from sufficit.training.feed import Target
from sufficit.training.pictures import Part

FEWEST = 8  # pictures of a folder
MOST_HELD_OUT = 256
FEW_HELD_OUT = 8  # of a small folder, whatever the share; but no more than a quarter


@dataclass(frozen=True)
class Folder:
    """The pictures below a folder: those to train on, and those held out to judge by."""

    training: Part
    validation: Part
    target: Target

    def digest(self) -> str:
        """A short name for exactly these pictures, labels and parts."""
        told = [[[p.name for p in part.pictures], part.labels] for part in self.parts]
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    @property
    def parts(self) -> tuple[Part, Part]:
        """Training, then validation."""
        return self.training, self.validation


def read_folder(
    classifier: Classifier,
    data: Path,
    target: Literal["auto", "label", "prediction"] = "auto",
    share: float = 0.1,
    seed: int = 0,
) -> Folder:
    """Find the pictures below a folder, label them by class folder, hold a share of them out."""
    pictures = list_images(data)
    if len(pictures) < FEWEST:
        raise UserError(
            f"{len(pictures)} images in {data}: an adapter needs {FEWEST} or more, hundreds to be"
            " of use"
        )
    told = labels_for(classifier, ImageSource.of(pictures), target)
    numbers = (told.number(picture) for picture in pictures)
    labels = [number for number in numbers if number is not None] or None
    if labels is not None and len(set(labels)) < 2:
        raise UserError(
            f"{data} is a folder with one class ({pictures[0].folder}): an adapter learns what"
            " tells classes apart, so give images of two classes or more, or explain what the"
            " model says of these with --target prediction"
        )
    held = set(held_out(labels or [0] * len(pictures), how_many(len(pictures), share), seed))
    rows = range(len(pictures))
    training = _part(pictures, labels, [i for i in rows if i not in held])
    validation = _part(pictures, labels, [i for i in rows if i in held])
    return Folder(training, validation, told.kind)


def how_many(n: int, share: float) -> int:
    """How many of n pictures to hold out: the share, or a few of a small folder.

    >>> how_many(8, 0.1), how_many(32, 0.1), how_many(1000, 0.1), how_many(9000, 0.1)
    (2, 8, 100, 256)
    """
    if not 0 < share <= 0.5:
        raise UserError(f"the share held out for validation must lie in 0..0.5, got {share:g}")
    return min(MOST_HELD_OUT, max(int(share * n), min(FEW_HELD_OUT, n // 4)))


def held_out(labels: Sequence[int], n: int, seed: int) -> list[int]:
    """Which pictures to hold out: one of each class, then a second of each, and so on, by chance.

    As long as others are left, no class gives more than half of its pictures.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator).tolist()
    counts = Counter(labels)
    seen: Counter[int] = Counter()
    ranks: list[tuple[bool, int, int, int]] = []
    for number in order:
        label = labels[number]
        ranks.append((seen[label] >= counts[label] // 2, seen[label], len(ranks), number))
        seen[label] += 1
    return [number for *_, number in sorted(ranks)[:n]]


def _part(pictures: Sequence[ImageFile], labels: Sequence[int] | None, which: list[int]) -> Part:
    known = None if labels is None else tuple(labels[i] for i in which)
    return Part(tuple(pictures[i] for i in which), known)
