"""A labelled set of pictures as bytes on a device, and what the model sees of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Split:
    """Pictures as bytes, their labels, and at what size the model sees them."""

    images: Tensor  # [N,3,h,w] uint8
    labels: Tensor  # [N]
    side: int  # of what the model sees: the middle of a larger picture, or a smaller one enlarged
    masks: Tensor | None = None  # [N,h,w] bool, where the object is, if that is known

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """What the model sees of some, in 0..1, and their labels: [n,3,side,side], [n]."""
        return seen(self.images[rows], self.side), self.labels[rows]

    def pick(self, rows: Tensor) -> "Split":
        """Some of the pictures as a split of their own."""
        here = rows.to(self.labels.device)
        masks = None if self.masks is None else self.masks[here]
        return replace(self, images=self.images[here], labels=self.labels[here], masks=masks)

    def to(self, device: torch.device | str) -> "Split":
        """The same on another device."""
        masks = None if self.masks is None else self.masks.to(device)
        images, labels = self.images.to(device), self.labels.to(device)
        return replace(self, images=images, labels=labels, masks=masks)


@dataclass(frozen=True)
class Sets:
    """What a data set is made of: pictures to train on, pictures to test on, names of classes."""

    train: Split
    test: Split
    classes: tuple[str, ...]
    source: str  # where the pictures come from, in words


def seen(images: Tensor, side: int) -> Tensor:
    """The middle of larger pictures, smaller ones enlarged: [N,3,h,w] bytes -> [N,3,side,side]."""
    cropped = middle(images, side).float() / 255
    if cropped.shape[-1] == side:
        return cropped
    return F.interpolate(cropped, size=(side, side), mode="bilinear", align_corners=False)


def middle(images: Tensor, side: int) -> Tensor:
    """The middle square of this side, or all where they are smaller: [N,3,h,w]."""
    top, left = (max(0, (length - side) // 2) for length in images.shape[-2:])
    return images[..., top : top + side, left : left + side]


def evenly(labels: Sequence[int] | Tensor, n: int, seed: int) -> Tensor:
    """Which n pictures to take, as many of each class as can be, by the seed; in rising order.

    >>> evenly([0, 0, 0, 1, 1, 1], 2, seed=0).tolist()
    [2, 5]
    """
    known = torch.as_tensor(labels).cpu()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(known), generator=generator)
    ranks = torch.empty(len(known), dtype=torch.long)
    for label in known.unique():
        own = order[known[order] == label]
        ranks[own] = torch.arange(len(own))
    place = torch.empty(len(known), dtype=torch.long)
    place[order] = torch.arange(len(known))
    chosen = (ranks * len(known) + place).argsort()[:n]
    return chosen.sort().values


def held_out(split: Split, n: int, seed: int) -> tuple[Split, Split]:
    """A split without n pictures drawn evenly over its classes, and those."""
    away = evenly(split.labels, n, seed)
    stays = torch.ones(len(split), dtype=torch.bool)
    stays[away] = False
    return split.pick(stays.nonzero().flatten()), split.pick(away)
