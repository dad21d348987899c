"""Batches of images that stay on the device as bytes, with or without their features."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.data.splits import Split
from sufficit.training.step import Batch

SHARE = 0.4  # of the free memory of a GPU, for features
MEMORY = 2 * 2**30  # bytes for features on other devices


@dataclass(frozen=True)
class Shuffled:
    """A loader over a split: batches in a new order each time, from torch's own generator.

    With a limit it gives that many images, others each time. With features that were computed
    once it gives these too.
    """

    split: Split
    batch_size: int
    limit: int | None = None
    features: Tensor | None = None  # [N,K,h,w]

    def __len__(self) -> int:
        return math.ceil(min(self.limit or len(self.split), len(self.split)) / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for rows in self._rows():
            images, labels = self.split.part(rows)
            if self.features is None:
                yield images, labels
            else:
                yield Batch(images, labels, self.features[rows].float())

    def _rows(self) -> Iterator[Tensor]:
        order = torch.randperm(len(self.split))[: self.limit or None]
        yield from order.to(self.split.labels.device).split(self.batch_size)


@torch.no_grad()
def loader_for(
    classifier: Classifier, split: Split, batch_size: int, limit: int | None = None
) -> Shuffled:
    """Batches with features that are computed once, where these fit into the device's memory."""
    first, device = classifier.features(split.part(slice(0, 1))[0])[0], classifier.device
    free = SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else MEMORY
    if first.nbytes * len(split) > free:
        return Shuffled(split, batch_size, limit)
    found = torch.empty(len(split), *first.shape[1:], dtype=first.dtype, device=first.device)
    for start in range(0, len(split), batch_size):
        rows = slice(start, start + batch_size)
        found[rows] = classifier.features(split.part(rows)[0])[0]
    return Shuffled(split, batch_size, limit, found)
