"""Batches from pictures that lie as bytes on the device, with or without their features."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.data.splits import Split
from sufficit.training.step import Batch

SHARE = 0.4  # of the memory that is free, for features
MEMORY = 2 * 2**30  # of it where that is not known


@dataclass(frozen=True)
class Shuffled:
    """A loader over a split: batches in a new order each time, from torch's own generator.

    With a limit it gives so many pictures, others each time.
    """

    split: Split
    batch_size: int
    limit: int | None = None

    def __len__(self) -> int:
        return math.ceil(self._n / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in self._rows():
            yield self.split.part(rows)

    @property
    def _n(self) -> int:
        return min(self.limit or len(self.split), len(self.split))

    def _rows(self) -> Iterator[Tensor]:
        order = torch.randperm(len(self.split))[: self._n].to(self.split.labels.device)
        yield from order.split(self.batch_size)


@dataclass(frozen=True)
class Featured(Shuffled):
    """The same with features that were computed once; the pictures stay bytes."""

    features: Tensor | None = None  # [N,K,h,w]

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # train_lax takes both
        assert self.features is not None
        for rows in self._rows():
            images, labels = self.split.part(rows)
            yield Batch(images, labels, self.features[rows].float())


def loader_for(
    classifier: Classifier, split: Split, batch_size: int, limit: int | None = None
) -> Shuffled:
    """Batches with features that are computed once, where these fit into the device's memory."""
    with torch.no_grad():
        first, _ = classifier.features(split.part(slice(0, 1))[0])
    if first.numel() * first.element_size() * len(split) > room(classifier.device):
        return Shuffled(split, batch_size, limit)
    found = torch.empty(len(split), *first.shape[1:], dtype=first.dtype, device=first.device)
    with torch.no_grad():
        for start in range(0, len(split), batch_size):
            rows = slice(start, start + batch_size)
            found[rows] = classifier.features(split.part(rows)[0])[0]
    return Featured(split, batch_size, limit, found)


def room(device: torch.device) -> float:
    """Bytes that features may take on a device."""
    if device.type != "cuda":
        return MEMORY
    return SHARE * torch.cuda.mem_get_info(device)[0]
