"""The fill `road`: hidden pixels are imputed from their neighbours (Rong et al. 2022).

Each hidden pixel is the weighted mean of its eight neighbours, 1/6 for direct ones and 1/12 for
diagonal ones, over those inside the image, plus Gaussian noise. Neighbours may be hidden too, so
that all hidden pixels of a mask are the solution of one sparse linear system. It is solved for a
batch of masks by conjugate gradients, preconditioned by a multigrid cycle: on coarser grids a cell
is unknown if all of its pixels are. The preconditioned residual estimates the error.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROAD = "road"
NOISE = 0.01  # standard deviation, as in the paper
TOLERANCE = 2e-4  # of a pixel, in units of the images' spread: far below the noise
MOST = 60  # iterations; 5 to 10 are usual
COARSEST = 8  # pixels of the shorter side at which no coarser grid is made
DAMPING, SMOOTHINGS, LAST = 0.8, 2, 12


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
        values, grey = images.float(), grey.float()
        sure = (known[:, None] >= 0.5).float()
        middle = grey.mean((2, 3), keepdim=True)
        solved = _solve(values, sure, middle)
        return torch.lerp(solved + (grey - middle), values, known[:, None].float()).to(images)


def _solve(values: Tensor, known: Tensor, middle: Tensor) -> Tensor:
    """Return values with the solution where known is 0: [T,C,H,W], [T,1,H,W], [1,C,1,1]."""
    (h, w), factor = values.shape[2:], 1
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
    step = better = _cycle(residual, levels)
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
        residual, size = left, _sum(left * better)
    return x[..., :h, :w]


def _neighbours(x: Tensor) -> Tensor:
    """Return the sum of weight x neighbour, nothing beyond the edges: [...,H,W]."""
    wide = F.pad(x, (1, 1, 1, 1))
    rows = wide[..., :-2, :] + 2 * wide[..., 1:-1, :] + wide[..., 2:, :]
    return (rows[..., :-2] + 2 * rows[..., 1:-1] + rows[..., 2:] - 4 * x) / 12


def _levels(hidden: Tensor, inside: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return what is hidden, and the sum of each pixel's weights, from fine to coarse."""
    found = [(hidden, _neighbours(inside).clamp(min=1 / 12))]
    while min(hidden.shape[2:]) > COARSEST and not any(side % 2 for side in hidden.shape[2:]):
        hidden, inside = (F.avg_pool2d(hidden, 2) == 1).float(), F.max_pool2d(inside, 2)
        found.append((hidden, _neighbours(inside).clamp(min=1 / 12)))
    return found


def _cycle(residual: Tensor, levels: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return about the error that has this residual: one V-cycle of damped Jacobi steps."""
    (hidden, degrees), coarser = levels[0], levels[1:]
    weight = DAMPING * hidden / degrees
    error = weight * residual
    for _ in range(SMOOTHINGS - 1 if coarser else LAST):
        error = error + weight * (residual - degrees * error + _neighbours(error))
    if coarser:
        left = hidden * (residual - degrees * error + _neighbours(error))
        below = _cycle(coarser[0][0] * 4 * F.avg_pool2d(left, 2), coarser)
        error = error + hidden * F.interpolate(below, scale_factor=2, mode="bilinear")
    for _ in range(SMOOTHINGS):
        error = error + weight * (residual - degrees * error + _neighbours(error))
    return error


def _sum(x: Tensor) -> Tensor:
    return x.sum((2, 3), keepdim=True)


def _ratio(over: Tensor, under: Tensor) -> Tensor:
    """Return the ratio; 0 where nothing is left to solve."""
    return torch.where(under > 1e-20, over / under.clamp(min=1e-20), 0.0)
