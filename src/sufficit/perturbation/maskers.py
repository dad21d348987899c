"""Masked inputs, a batch at a time: of runs of ranks, or of masks of pixels."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sufficit.perturbation.imputation import impute


@dataclass
class Masker:
    """Makes masked inputs in its own buffers, from inputs that are already normalised.

    Masking after normalising gives the same numbers as normalising after masking, and reads the
    memory once per mask.
    """

    inputs: Tensor  # [N,C,H,W]
    hidden: Tensor  # [N,C,H,W], or [1,...] where all images have one fill
    ranks: Tensor  # [N,H,W]
    owners: list[int]  # which image each mask is of, in order
    starts: Tensor  # [T] the first rank that is kept
    stops: Tensor  # [T] the first rank after it that is hidden
    layout: torch.memory_format
    imputes: bool = False  # hidden pixels from their neighbours
    buffers: tuple[Tensor, Tensor, Tensor] | None = None

    def batch(self, start: int, stop: int) -> Tensor:
        """Keep each mask's run of ranks, fill the rest: masks start..stop -> [T,C,H,W]."""
        if self.buffers is None or len(self.buffers[0]) < stop - start:
            self.buffers = None
            c, h, w = self.inputs.shape[1:]
            size, empty = stop - start, self.inputs.new_empty
            batch = torch.empty_like(empty(size, c, h, w), memory_format=self.layout)
            self.buffers = (batch, empty(size, h, w), empty(size, h, w))
        batch, keep, below = (buffer[: stop - start] for buffer in self.buffers)
        cuts = [i for i in range(start + 1, stop) if self.owners[i] != self.owners[i - 1]]
        for first, last in pairwise([start, *cuts, stop]):  # the masks of one image
            image, here = self.owners[first], slice(first - start, last - start)
            torch.ge(self.ranks[image], self.starts[first:last, None, None], out=keep[here])
            torch.lt(self.ranks[image], self.stops[first:last, None, None], out=below[here])
            mask = keep[here].mul_(below[here])[:, None]
            hidden = self.hidden[image if len(self.hidden) > 1 else 0]
            # At weights 0 and 1 lerp returns its ends to the bit, and is far faster than where.
            torch.lerp(hidden, self.inputs[image], mask, out=batch[here])
        if self.imputes:
            return impute(batch, keep, self.hidden).contiguous(memory_format=self.layout)
        return batch

    def drop_buffers(self) -> None:
        """Free the buffers, so that smaller ones can be allocated."""
        self.buffers = None


@dataclass(frozen=True)
class ViewMasker:
    """Makes any image seen through any mask, from inputs that are already normalised."""

    inputs: Tensor  # [N,C,H,W]
    hidden: Tensor  # [N,C,H,W], or [1,...] where all images have one fill
    masks: Tensor  # [M,H,W] bool, or the share of the image in 0..1
    seen: Tensor  # [T] the image of each view
    through: Tensor  # [T] the mask of each view
    layout: torch.memory_format
    imputes: bool = False

    def batch(self, start: int, stop: int) -> Tensor:
        """Views start..stop: [T,C,H,W]."""
        rows = self.seen[start:stop].to(self.inputs.device)
        inputs, hidden = self.inputs[rows], self.hidden
        mask = self.masks[self.through[start:stop].to(self.masks.device)].to(inputs)[:, None]
        if self.imputes:
            batch = impute(inputs, mask[:, 0], hidden)
        else:  # at weights 0 and 1 lerp returns its ends to the bit
            batch = torch.lerp(hidden[rows] if len(hidden) > 1 else hidden, inputs, mask)
        return batch.contiguous(memory_format=self.layout)
