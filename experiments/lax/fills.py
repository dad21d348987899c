"""What is put where pixels are hidden.

`black`, `blur`, `mean` and `noise` give the same numbers as the fills of the package. `patches` and
`checker` are never used in training, nor by a fit: they are there to be scored with.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

ASKED = ("black", "blur")
SCORED = ("black", "blur", "mean", "noise", "patches")


def _blur_matrix(side: int, sigma: float) -> Tensor:
    """Return the matrix that blurs a line of pixels by a Gaussian, edges mirrored: [side,side]."""
    radius = min(math.ceil(3 * sigma), side - 1)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    place = (torch.arange(side)[:, None] + offsets).abs()
    place = torch.where(place < side, place, 2 * (side - 1) - place)
    found = torch.zeros(side, side, dtype=torch.float64)
    found.scatter_add_(1, place, weights.expand(side, -1))
    return (found / weights.sum()).float()


def gaussian(images: Tensor, sigma: float) -> Tensor:
    """Blur [...,H,W] by a Gaussian of `sigma` pixels."""
    matrix = _blur_matrix(images.shape[-1], sigma).to(images.device)
    return matrix @ images @ matrix.mT


@lru_cache
def bilinear_matrix(small: int, large: int, device: str) -> Tensor:
    """Return the matrix that resizes a line of pixels as `F.interpolate` does: [large,small]."""
    line = torch.eye(small)[:, None]
    resized = F.interpolate(line, size=large, mode="linear")[:, 0]
    return resized.T.contiguous().to(device)


def enlarged(x: Tensor, side: int = 224) -> Tensor:
    """Resize [...,h,h] bilinearly; two matrix products, far faster on a GPU than interpolation."""
    matrix = bilinear_matrix(x.shape[-1], side, str(x.device))
    return matrix @ x.float() @ matrix.mT


def noise(images: Tensor) -> Tensor:
    """Return one image of uniform noise, the same for every photograph: like images."""
    drawn = torch.rand((1, *images.shape[1:]), generator=torch.Generator().manual_seed(0))
    return drawn.to(images).expand_as(images)


def patches(images: Tensor, donors: Tensor) -> Tensor:
    """Return the donors with their 49 patches of 32 px in another order: like images."""
    n = len(images)
    generator = torch.Generator().manual_seed(1)
    cells = F.unfold(donors, kernel_size=32, stride=32)
    shuffled = cells[:, :, torch.randperm(cells.shape[2], generator=generator).to(images.device)]
    return F.fold(shuffled, images.shape[2:], kernel_size=32, stride=32).view(n, *images.shape[1:])


def checker(images: Tensor) -> Tensor:
    """Return a board of black and white squares of 16 px: like images."""
    cells = torch.arange(images.shape[-1], device=images.device) // 16
    board = ((cells[:, None] + cells) % 2).to(images)
    return board.expand_as(images)


def fill_of(name: str, images: Tensor, donors: Tensor) -> Tensor:
    """Return one fill of a batch of images in 0..1: [N,3,H,W]."""
    if name == "black":
        return torch.zeros_like(images)
    if name == "blur":
        return gaussian(images, images.shape[-1] / 10)
    if name == "mean":
        return images.mean((2, 3), keepdim=True).expand_as(images)
    if name == "noise":
        return noise(images)
    if name == "checker":
        return checker(images)
    if name == "patches":
        return patches(images, donors)
    raise ValueError(f"unknown fill {name!r}")


def _smooth_noise(images: Tensor) -> Tensor:
    coarse = torch.rand(len(images), 3, 28, 28, device=images.device)
    return enlarged(coarse, images.shape[-1])


def _other_colours(images: Tensor) -> Tensor:
    others = images[torch.randperm(len(images), device=images.device)]
    return enlarged(F.interpolate(others, size=12, mode="area"), images.shape[-1])


def _flat(images: Tensor) -> Tensor:
    return torch.rand(len(images), 3, 1, 1, device=images.device).expand_as(images)


def _own_blur(images: Tensor) -> Tensor:
    """Blur each image by 8 to 40 px, one width per batch."""
    sigma = 8 * 5 ** torch.rand(()).item()
    return gaussian(images, round(sigma, 1))


def _pixel_noise(images: Tensor) -> Tensor:
    """Return uniform noise of one pixel, or of cells of 2 to 8 px: one grain per batch."""
    grain = (1, 1, 2, 4, 8)[int(torch.randint(5, ()))]
    side = images.shape[-1] // grain
    drawn = torch.rand(len(images), 3, side, side, device=images.device)
    return F.interpolate(drawn, size=images.shape[-1], mode="nearest")


TRAINING = {
    # As handed over: black, a flat colour, smooth noise, another photograph's colours at 12 px.
    "handed": (
        (torch.zeros_like, 0.30),
        (_flat, 0.20),
        (_smooth_noise, 0.15),
        (_other_colours, 0.35),
    ),
    # With the photograph's own blur and noise of single pixels.
    "wide": (
        (torch.zeros_like, 0.25),
        (_flat, 0.15),
        (_other_colours, 0.20),
        (_own_blur, 0.20),
        (_pixel_noise, 0.20),
    ),
}


def training_fill(images: Tensor, kind: str) -> Tensor:
    """Return a random fill for each image: [N,3,H,W]."""
    draws, shares = zip(*TRAINING[kind], strict=True)
    ends = torch.tensor(shares, device=images.device).cumsum(0)
    chosen = torch.bucketize(torch.rand(len(images), device=images.device), ends[:-1])
    found = torch.empty_like(images)
    for number, draw in enumerate(draws):
        found = torch.where((chosen == number).view(-1, 1, 1, 1), draw(images), found)
    return found
