"""Fills for hidden pixels: images [N,C,H,W] in 0..1 -> a tensor that broadcasts to them."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from sufficit.errors import UserError, unknown
from sufficit.perturbation.imputation import ROAD, grey_noise, impute


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
    generator = torch.Generator(device="cpu").manual_seed(0)
    shape = (1, *images.shape[1:])
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").to(images)


# `drop` fills nothing, it leaves tokens out (tokens.py); pictures show hidden pixels as black.
# `road` depends on the mask (imputation.py); what is here is for a mask that keeps nothing.
FILLS = {
    "black": black,
    "mean": mean,
    "blur": blur,
    "noise": noise,
    "road": grey_noise,
    "drop": black,
}


def fill_for(images: Tensor, fill: str | Tensor, part: slice | list[int] = slice(None)) -> Tensor:
    """Return the named fill of a batch, or the part of a given tensor that belongs to it."""
    if isinstance(fill, str):
        return FILLS[fill](images)
    if fill.ndim <= 1:
        return fill.reshape(1, -1, 1, 1).to(images)
    if fill.ndim == 4 and fill.shape[0] > 1:
        return fill[part].to(images)
    return fill.reshape(1, *fill.shape[-3:]).to(images)


def rows_of(fill: str | Tensor, rows: Tensor) -> str | Tensor:
    """Return the fill of some of the images, by their numbers: [n]."""
    if isinstance(fill, str) or fill.ndim < 4 or len(fill) == 1:
        return fill
    return fill[rows.to(fill.device)]


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
            f" {list(fill.shape)}: reshape it"
        )
    if not torch.isfinite(fill).all():
        raise UserError("a fill tensor must be finite, got NaN or infinite values: replace them")
    if fill.min() < 0 or fill.max() > 1:
        raise UserError(
            f"a fill tensor must lie in 0..1 as images do, got {fill.min():.3g}..{fill.max():.3g}: "
            "pass it before normalisation"
        )


# Written by hand because torchvision's gaussian_blur is not separable, and slow at this width.
@lru_cache(maxsize=16)  # each copy to a GPU would wait for the GPU
@torch.inference_mode(False)
def blur_matrix(side: int, sigma: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the matrix that blurs a line of pixels, edges mirrored: [side,side]."""
    radius = min(math.ceil(3 * sigma), side - 1)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    place = (torch.arange(side)[:, None] + offsets).abs()
    place = torch.where(place < side, place, 2 * (side - 1) - place)
    found = torch.zeros(side, side, dtype=torch.float64)
    found.scatter_add_(1, place, weights.expand(side, -1))
    found /= weights.sum()
    return found.to(torch.promote_types(dtype, torch.float32)).to(device, dtype)
