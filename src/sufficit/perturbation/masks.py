"""Masked images, made on the model's device one batch at a time."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sufficit.perturbation.bands import Band, inside

_STEP_ELEMENTS = 2**25  # of heatmaps copied to the device at a time
_MASK_ELEMENTS = 2**32  # of masks, one byte each, kept on the device


@dataclass(frozen=True)
class Masks:
    """Masks as runs of ranks, sorted by image."""

    images: Tensor  # [T] which image
    starts: Tensor  # [T] the first rank that is kept
    stops: Tensor  # [T] the first rank after it that is hidden

    def rows(self, some: Tensor) -> "Masks":
        """Return some of the masks."""
        return Masks(self.images[some], self.starts[some], self.stops[some])


def distinct_masks(spans: Tensor, pixels: int) -> tuple[Masks, Tensor]:
    """Return the distinct runs of each image, and the place of each band's run among them.

    [N,B,2] -> T masks, [N,B]
    """
    width = pixels + 1
    image = torch.arange(len(spans), device=spans.device)[:, None]
    codes = (image * width + spans[..., 0]) * width + spans[..., 1]
    distinct, place = codes.unique(return_inverse=True)
    dtype = torch.float32 if pixels <= 2**24 else torch.float64  # that of the ranks
    starts, stops = distinct // width % width, distinct % width
    return Masks(distinct // width**2, starts.to(dtype), stops.to(dtype)), place


class Masker:
    """Makes masked inputs in its own buffers, from inputs that are already normalised.

    Masking after normalising gives the same numbers as normalising after masking, and reads the
    memory once per mask.
    """

    def __init__(
        self,
        inputs: Tensor,
        hidden: Tensor,
        ranks: Tensor,
        masks: Masks,
        layout: torch.memory_format,
    ) -> None:
        self.inputs = inputs.contiguous(memory_format=layout)
        self.hidden = hidden
        self.ranks = ranks
        self.owners: list[int] = masks.images.tolist()
        self.starts = masks.starts[:, None, None]
        self.stops = masks.stops[:, None, None]
        self.layout = layout
        self.buffers: tuple[Tensor, Tensor, Tensor] | None = None

    def batch(self, start: int, stop: int) -> Tensor:
        """Keep each mask's run of ranks, fill the rest: masks start..stop -> [T,C,H,W]."""
        batch, keep, below = (buffer[: stop - start] for buffer in self._buffers(stop - start))
        cuts = [i for i in range(start + 1, stop) if self.owners[i] != self.owners[i - 1]]
        for first, last in pairwise([start, *cuts, stop]):  # the masks of one image
            image, here = self.owners[first], slice(first - start, last - start)
            torch.ge(self.ranks[image], self.starts[first:last], out=keep[here])
            torch.lt(self.ranks[image], self.stops[first:last], out=below[here])
            mask = keep[here].mul_(below[here])[:, None]
            hidden = self.hidden[image if len(self.hidden) > 1 else 0]
            # At weights 0 and 1 lerp returns its ends to the bit, and is far faster than where.
            torch.lerp(hidden, self.inputs[image], mask, out=batch[here])
        return batch

    def drop_buffers(self) -> None:
        """Free the buffers, so that smaller ones can be allocated."""
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
    """Return which pixels a band keeps, on the device if they fit: [N,H,W] -> bool [N,H,W]."""
    there = device if heatmaps.numel() <= _MASK_ELEMENTS else heatmaps.device
    step = max(1, _STEP_ELEMENTS // heatmaps[0].numel())
    parts = heatmaps.split(step)
    return torch.cat([inside(part.to(there, torch.float32), band) for part in parts])
