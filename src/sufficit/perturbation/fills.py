"""Fills for hidden pixels, and masked inputs made with them, a batch at a time.

A fill takes images [N,C,H,W] in 0..1 and returns a tensor that broadcasts to them. To add one,
write a function and a line in FILLS. Searches and fits use some of them, by lists of their own.

The fill `road` imputes hidden pixels from their neighbours (Rong et al. 2022): each is the weighted
mean of its eight neighbours, 1/6 for direct ones and 1/12 for diagonal ones, over those inside the
image, plus Gaussian noise. Neighbours may be hidden too, so that all hidden pixels of a mask are
the solution of one sparse linear system. It is solved for a batch of masks by conjugate gradients,
preconditioned by a multigrid cycle: on coarser grids a cell is unknown if all of its pixels are.
The preconditioned residual estimates the error.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from sufficit.classifier.layers import kept
from sufficit.errors import UserError, unknown

ROAD = "road"
NOISE = 0.01  # standard deviation, as in the paper
TOLERANCE = 2e-4  # of a pixel, in units of the images' spread: far below the noise
MOST = 60  # iterations; 5 to 10 are usual
COARSEST = 8  # pixels of the shorter side at which no coarser grid is made
DAMPING = 0.8  # of a Jacobi step
SMOOTHINGS = 2  # steps on each grid, before and after the coarser ones
LAST = 12  # steps on the coarsest grid


def grey_noise(images: Tensor) -> Tensor:
    """Return mid-grey with the noise, which a mask without a known pixel gets: [1,C,H,W].

    The noise is the same in every batch, and its mean is 0 in every channel.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    drawn = torch.randn(1, *images.shape[1:], generator=generator, device="cpu")
    return (0.5 + NOISE * (drawn - drawn.mean((2, 3), keepdim=True))).to(images)


def impute(images: Tensor, known: Tensor, grey: Tensor) -> Tensor:
    """Return images with unknown pixels imputed: [T,C,H,W], bool or 0..1 [T,H,W] -> [T,C,H,W].

    `grey` is `grey_noise`, normalised as the images are. A pixel that is known by half or more is
    taken as known; what is known is left as it is.
    """
    with torch.autocast(images.device.type, enabled=False):
        values = images.float()
        grey = grey.float()
        sure = (known[:, None] >= 0.5).float()
        middle = grey.mean((2, 3), keepdim=True)
        solved = _solve(values, sure, middle)
        return torch.lerp(solved + (grey - middle), values, known[:, None].float()).to(images)


def _solve(values: Tensor, known: Tensor, middle: Tensor) -> Tensor:
    """Return values with the solution where known is 0: [T,C,H,W], [T,1,H,W], [1,C,1,1]."""
    h, w = values.shape[2:]
    # Sides that halve down to the coarsest grid without a remainder.
    factor = 1
    while min(h, w) / factor > COARSEST:
        factor *= 2
    padding = (0, -w % factor, 0, -h % factor)  # known, and nobody's neighbour
    count = _sum(known)
    means = (_sum(values * known) / count.clamp(min=1)).where(count > 0, middle)
    x = F.pad(torch.lerp(means, values, known), padding)
    # Where nothing is known, the system has no solution and grey stays.
    open_pixels = F.pad((1 - known) * (count > 0), padding)
    levels = _levels(open_pixels, F.pad(torch.ones_like(known[:1]), padding))
    hidden, degrees = levels[0]
    spread = x[..., :h, :w].amax((1, 2, 3), True) - x[..., :h, :w].amin((1, 2, 3), True)
    residual = hidden * (_neighbours(x) - degrees * x)
    # Conjugate gradients: `step` is the direction, `better` the preconditioned residual.
    better = _cycle(residual, levels)
    step = better
    size = _sum(residual * better)
    for _ in range(MOST):
        # One mask's result does not depend on which others are in the batch.
        active = better.abs().amax((1, 2, 3), keepdim=True) > TOLERANCE * spread
        if not active.any():
            break
        change = hidden * (degrees * step - _neighbours(step))
        length = active * _ratio(size, _sum(step * change))
        x = x + length * step
        left = residual - length * change
        better = _cycle(left, levels)
        step = better + _ratio(_sum((left - residual) * better), size) * step
        residual = left
        size = _sum(left * better)
    return x[..., :h, :w]


def _neighbours(x: Tensor) -> Tensor:
    """Return the sum of weight x neighbour, nothing beyond the edges: [...,H,W]."""
    wide = F.pad(x, (1, 1, 1, 1))
    rows = wide[..., :-2, :] + 2 * wide[..., 1:-1, :] + wide[..., 2:, :]
    return (rows[..., :-2] + 2 * rows[..., 1:-1] + rows[..., 2:] - 4 * x) / 12


def _levels(hidden: Tensor, inside: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return what is hidden, and the sum of each pixel's weights, from fine to coarse."""
    levels = [(hidden, _neighbours(inside).clamp(min=1 / 12))]
    while min(hidden.shape[2:]) > COARSEST and not any(side % 2 for side in hidden.shape[2:]):
        hidden = (F.avg_pool2d(hidden, 2) == 1).float()  # all four pixels are unknown
        inside = F.max_pool2d(inside, 2)
        levels.append((hidden, _neighbours(inside).clamp(min=1 / 12)))
    return levels


def _cycle(residual: Tensor, levels: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return about the error that has this residual: one V-cycle of damped Jacobi steps."""
    hidden, degrees = levels[0]
    coarser = levels[1:]
    weight = DAMPING * hidden / degrees
    error = weight * residual
    for _ in range(SMOOTHINGS - 1 if coarser else LAST):
        error = error + weight * (residual - degrees * error + _neighbours(error))
    if coarser:
        left = hidden * (residual - degrees * error + _neighbours(error))
        # Four pixels become one: the coarse equation has the sum of their residuals.
        below = _cycle(coarser[0][0] * 4 * F.avg_pool2d(left, 2), coarser)
        error = error + hidden * F.interpolate(below, scale_factor=2, mode="bilinear")
    for _ in range(SMOOTHINGS):
        error = error + weight * (residual - degrees * error + _neighbours(error))
    return error


def _sum(x: Tensor) -> Tensor:
    """Return the sum over the pixels of each channel: [T,C,H,W] -> [T,C,1,1]."""
    return x.sum((2, 3), keepdim=True)


def _ratio(over: Tensor, under: Tensor) -> Tensor:
    """Return the ratio; 0 where nothing is left to solve."""
    return torch.where(under > 1e-20, over / under.clamp(min=1e-20), 0.0)


def black(images: Tensor) -> Tensor:
    """Return zeros: [1,C,1,1]."""
    return images.new_zeros(1, images.shape[1], 1, 1)


def mean(images: Tensor) -> Tensor:
    """Return the mean colour of each image: [N,C,1,1]."""
    return images.mean((2, 3), keepdim=True)


def blur(images: Tensor) -> Tensor:
    """Blur each image by a Gaussian of a tenth of its shorter side: [N,C,H,W]."""
    h, w = images.shape[2:]
    sigma = min(h, w) / 10
    down, across = (blur_matrix(s, sigma, images.device, images.dtype) for s in (h, w))
    with torch.autocast(images.device.type, enabled=False):
        return down @ images @ across.mT


def noise(images: Tensor) -> Tensor:
    """Return one image of uniform noise, the same in every batch: [1,C,H,W]."""
    return _noise(tuple(images.shape[1:]), images.device, images.dtype)


@kept
def _noise(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(0)
    drawn = torch.rand((1, *shape), generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(device, dtype)


# `drop` fills nothing, it leaves tokens out (tokens.py); pictures show hidden pixels as black.
# `road` depends on the mask (`impute`); what is here is for a mask that keeps nothing.
FILLS = {
    "black": black,
    "mean": mean,
    "blur": blur,
    "noise": noise,
    "road": grey_noise,
    "drop": black,
}


def fill_for(images: Tensor, fill: str | Tensor) -> Tensor:
    """Return the fill of a batch of images: [N or 1,C,H,W], or what broadcasts to that."""
    if isinstance(fill, str):
        return FILLS[fill](images)
    shape = (1, -1, 1, 1) if fill.ndim <= 1 else (-1, *fill.shape[-3:])
    return fill.reshape(shape).to(images)


def rows_of(fill: str | Tensor, rows: slice | list[int]) -> str | Tensor:
    """Return the fill of some of the images, by their numbers."""
    return fill if isinstance(fill, str) or fill.ndim < 4 or len(fill) == 1 else fill[rows]


def masked(images: Tensor, masks: Tensor, fill: str | Tensor) -> Tensor:
    """Return images through masks, as the model sees them: [N,C,H,W], bool [N,H,W] in 0..1."""
    hidden = fill_for(images, fill)
    if isinstance(fill, str) and fill == ROAD:
        return impute(images, masks, hidden)
    return images.where(masks[:, None], hidden)


def check_fill_name(fill: str | Tensor) -> None:
    """Raise for an unknown name of a fill."""
    if isinstance(fill, str) and fill not in FILLS:
        raise unknown("fill", fill, FILLS)


def check_fill(fill: str | Tensor, images: Tensor) -> None:
    """Raise unless the fill is a known name or a tensor that fits the images."""
    if isinstance(fill, str):
        check_fill_name(fill)
        return
    if not isinstance(fill, Tensor):
        raise UserError(
            f"fill must be one of {', '.join(FILLS)} or a tensor, got {type(fill).__name__}: pass"
            " such a name or tensor"
        )
    n, c, h, w = images.shape
    sides = list(zip(reversed(fill.shape), (w, h, c), strict=False))
    broadcasts = fill.ndim in (3, 4) and all(side in (1, whole) for side, whole in sides)
    one_each = fill.ndim < 4 or fill.shape[0] in (1, n)
    if not (fill.ndim == 0 or fill.shape == (c,) or (broadcasts and one_each)):
        raise UserError(
            f"a fill tensor must be a number, [C], [C,H,W] or [N,C,H,W] = {[n, c, h, w]}, got"
            f" {list(fill.shape)}"
        )
    if not torch.isfinite(fill).all():
        raise UserError("a fill tensor must be finite, got NaN or infinite values: replace them")
    if fill.min() < 0 or fill.max() > 1:
        raise UserError(
            f"a fill tensor must lie in 0..1 as images do, got {fill.min():.3g}..{fill.max():.3g}: "
            "pass it before normalisation"
        )


# Written by hand because torchvision's gaussian_blur is not separable, and slow at this width.
@kept
def blur_matrix(side: int, sigma: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the matrix that blurs a line of pixels, edges mirrored: [side,side]."""
    radius = min(math.ceil(3 * sigma), side - 1)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    place = (torch.arange(side)[:, None] + offsets).abs()
    place = torch.where(place < side, place, 2 * (side - 1) - place)
    matrix = torch.zeros(side, side, dtype=torch.float64)
    matrix.scatter_add_(1, place, weights.expand(side, -1))
    matrix /= weights.sum()
    # By way of float32, also to half precision: some devices have no doubles.
    return matrix.to(torch.promote_types(dtype, torch.float32)).to(device, dtype)


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
            self.buffers = None  # first, so that both need not fit at the same time
            c, h, w = self.inputs.shape[1:]
            size = stop - start
            empty = self.inputs.new_empty
            batch = torch.empty_like(empty(size, c, h, w), memory_format=self.layout)
            self.buffers = (batch, empty(size, h, w), empty(size, h, w))
        batch, keep, below = (buffer[: stop - start] for buffer in self.buffers)
        cuts = [i for i in range(start + 1, stop) if self.owners[i] != self.owners[i - 1]]
        for first, last in pairwise([start, *cuts, stop]):  # the masks of one image
            image = self.owners[first]
            here = slice(first - start, last - start)
            torch.ge(self.ranks[image], self.starts[first:last, None, None], out=keep[here])
            torch.lt(self.ranks[image], self.stops[first:last, None, None], out=below[here])
            mask = keep[here].mul_(below[here])[:, None]
            hidden = self.hidden[image if len(self.hidden) > 1 else 0]
            # At weights 0 and 1 lerp returns its ends to the bit, and is far faster than where.
            torch.lerp(hidden, self.inputs[image], mask, out=batch[here])
        if self.imputes:
            return impute(batch, keep, self.hidden).contiguous(memory_format=self.layout)
        return batch


@dataclass(frozen=True)
class ViewMasker:
    """Makes any image seen through any mask, from inputs that are already normalised."""

    inputs: Tensor  # [N,C,H,W]
    hidden: Tensor  # [N,C,H,W], or [1,...] where all images have one fill
    masks: Tensor  # [M,H,W] bool, or the share of the image in 0..1
    seen: Tensor  # [T] the image of each view, on the device of the inputs
    through: Tensor  # [T] the mask of each view, on that of the masks
    layout: torch.memory_format
    imputes: bool = False

    def batch(self, start: int, stop: int) -> Tensor:
        """Return views start..stop: [T,C,H,W]."""
        rows = self.seen[start:stop]
        inputs = self.inputs[rows]
        hidden = self.hidden
        mask = self.masks[self.through[start:stop]].to(inputs)[:, None]
        if self.imputes:
            batch = impute(inputs, mask[:, 0], hidden)
        else:  # at weights 0 and 1 lerp returns its ends to the bit
            batch = torch.lerp(hidden[rows] if len(hidden) > 1 else hidden, inputs, mask)
        return batch.contiguous(memory_format=self.layout)
