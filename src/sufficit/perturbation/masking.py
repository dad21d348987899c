"""Masked images for a model, made on its device a batch at a time."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sufficit.perturbation.bands import inside
from sufficit.perturbation.types import Band

_STEP_ELEMENTS = 2**25  # of heatmaps brought to the device at a time
_MASK_ELEMENTS = 2**32  # of masks, a byte each, that may lie on the device


@dataclass(frozen=True)
class Tasks:
    """Masks to ask the model for, sorted by image."""

    images: list[int]  # [T] which image
    starts: Tensor  # [T] on the device
    stops: Tensor  # [T] on the device


class Masker:
    """Makes masked inputs in a buffer of its own, from inputs that are already normalised.

    Normalising first and masking after gives the same numbers as the other way round, and leaves
    one pass over memory for each mask.
    """

    def __init__(
        self, inputs: Tensor, hidden: Tensor, rank: Tensor, layout: torch.memory_format
    ) -> None:
        self.inputs = inputs.contiguous(memory_format=layout)
        self.hidden = hidden
        self.rank = rank
        self.layout = layout
        self.buffers: tuple[Tensor, Tensor, Tensor] | None = None

    def masked(self, tasks: Tasks, start: int, stop: int) -> Tensor:
        """Keep each task's run of ranks, fill the rest: tasks start..stop -> [T,C,H,W]."""
        batch, keep, below = (buffer[: stop - start] for buffer in self._buffers(stop - start))
        for image, first, last in _stretches(tasks.images, start, stop):
            here = slice(first - start, last - start)
            rank = self.rank[image]
            torch.ge(rank, tasks.starts[first:last, None, None], out=keep[here])
            torch.lt(rank, tasks.stops[first:last, None, None], out=below[here])
            mask = keep[here].mul_(below[here])[:, None]
            hidden = self.hidden[image if len(self.hidden) > 1 else 0]
            # At weights 0 and 1 lerp gives its ends to the bit, and is far faster than where.
            torch.lerp(hidden, self.inputs[image], mask, out=batch[here])
        return batch

    def drop(self) -> None:
        """Let the buffers go, so that smaller ones can be made."""
        self.buffers = None

    def _buffers(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        if self.buffers is None or len(self.buffers[0]) < size:
            self.buffers = None
            c, h, w = self.inputs.shape[1:]
            empty = self.inputs.new_empty
            batch = torch.empty_like(empty(size, c, h, w), memory_format=self.layout)
            self.buffers = (batch, empty(size, h, w), empty(size, h, w))
        return self.buffers


def masks_of(heatmaps: Tensor, band: Band, device: torch.device) -> Tensor:
    """Which pixels of every heatmap a band keeps, on the device unless they are too many."""
    there = device if heatmaps.numel() <= _MASK_ELEMENTS else heatmaps.device
    step = max(1, _STEP_ELEMENTS // heatmaps[0].numel())
    parts = [
        inside(heatmaps[k : k + step].to(there, torch.float32), band)
        for k in range(0, len(heatmaps), step)
    ]
    return torch.cat(parts)


def _stretches(images: list[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """The stretches of one image in a batch of tasks: (image, first, last)."""
    cuts = [i for i in range(start + 1, stop) if images[i] != images[i - 1]]
    edges = [start, *cuts, stop]
    return [(images[a], a, b) for a, b in pairwise(edges)]
