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
    images, device = split.part(slice(0, 1))[0], classifier.device
    layers = classifier.stage_layers(images)
    stages, _ = classifier.stages(images, layers)
    free = SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else MEMORY
    order = (len(split), split.labels.device, batch_size, limit)
    if sum(stage.nbytes for stage in stages) * len(split) > free:
        return Shuffled(split.part, *order)
    every = [stage.new_empty(len(split), *stage.shape[1:]) for stage in stages]
    first = torch.empty(len(split), 2, dtype=torch.long, device=device)
    for start in range(0, len(split), batch_size):
        rows = slice(start, start + batch_size)
        found, logits = classifier.stages(split.part(rows)[0], layers)
        first[rows] = logits.topk(2, dim=1).indices
        for whole, part in zip(every, found, strict=True):
            whole[rows] = part

    def take(rows: Tensor) -> Batch:
        features = tuple(stage[rows].float() for stage in every)
        return Batch(*split.part(rows), features, first[rows], layers)

    return Shuffled(take, *order)
