"""Batches of what stays in memory: images as bytes on a device, with or without their features."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.data.splits import Split
from sufficit.explainers.step import Batch

SHARE = 0.4  # of the free memory of a GPU, for features
MEMORY = 2 * 2**30  # bytes for features on other devices


@dataclass
class Shuffled:
    """A loader: `take(rows)`, the batch of some rows, in a new order each time.

    The order comes from torch's own generator. With a limit it gives that many rows, others each
    time.
    """

    take: Callable[[Tensor], Any]
    rows: int
    device: torch.device  # of the rows
    batch_size: int
    limit: int | None = None

    def __len__(self) -> int:
        return math.ceil(min(self.limit or self.rows, self.rows) / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.rows)[: self.limit or None]
        yield from map(self.take, order.to(self.device).split(self.batch_size))


@torch.no_grad()
def loader_for(
    classifier: Classifier, split: Split, batch_size: int, limit: int | None = None
) -> Shuffled:
    """Batches with features that are computed once, where these fit into the device's memory."""
    first, device = classifier.features(split.part(slice(0, 1))[0])[0], classifier.device
    free = SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else MEMORY
    order = (len(split), split.labels.device, batch_size, limit)
    if first.nbytes * len(split) > free:
        return Shuffled(split.part, *order)
    found = torch.empty(len(split), *first.shape[1:], dtype=first.dtype, device=first.device)
    for start in range(0, len(split), batch_size):
        rows = slice(start, start + batch_size)
        found[rows] = classifier.features(split.part(rows)[0])[0]
    return Shuffled(lambda rows: Batch(*split.part(rows), found[rows].float()), *order)
