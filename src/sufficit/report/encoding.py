"""Images and heatmaps as data addresses for a page."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from sufficit.perturbation.fills import fill_for

IMAGE_ROOM = 900_000  # bytes that all images of a page may take together
MAP_ROOM = 1_200_000  # and all heatmaps
QUALITIES = (88, 75, 60, 40, 20)
SIDES = (112, 84, 56, 42)
SMALL = 96  # images up to this side are stored without loss
BLUR_SIDE = 64  # a blurred image has no finer detail than this


def encode_images(images: Tensor) -> list[str]:
    """Data addresses of WebP, in the best quality that fits: [N,C,H,W] in 0..1 -> N."""
    found = [_rgb(image) for image in images]
    if max(images.shape[-2:]) <= SMALL:
        return [_webp(image) for image in found]
    return _fitting(
        lambda quality: [_webp(image, quality) for image in found], QUALITIES, IMAGE_ROOM
    )


def encode_heatmaps(
    heatmaps: Mapping[str, Tensor], grid: Sequence[float], sides: Sequence[int] = SIDES
) -> dict[str, list[str]]:
    """Data addresses of 8-bit PNG that hold `steps` of the maps: [N,H,W] -> N per method."""
    maps = torch.cat([found.detach().cpu().float() for found in heatmaps.values()])
    found = _fitting(lambda side: _steps_png(maps, side, grid), sides, MAP_ROOM)
    n = len(found) // len(heatmaps)
    return {method: found[i * n : (i + 1) * n] for i, method in enumerate(heatmaps)}


def steps(heatmaps: Tensor, grid: Sequence[float]) -> Tensor:
    """The number of grid points below each value, so that M > grid[i] where steps > i.

    >>> steps(torch.tensor([0.0, 0.5, 0.51, 1.0]), (0.0, 0.5, 1.0))
    tensor([0, 1, 2, 2], dtype=torch.uint8)
    """
    edges = torch.tensor(grid, dtype=torch.float32)
    return torch.searchsorted(edges, heatmaps.float().contiguous()).to(torch.uint8)


def encode_fill(images: Tensor, fill: str | Tensor) -> list[str]:
    """The fill of hidden pixels: a colour or an image, one for all images or one per image."""
    filled = fill_for(images.detach().cpu().float(), fill)
    if filled.shape[-2:] == (1, 1):
        colours = _three(filled)[:, :, 0, 0].clamp(0, 1).mul(255).round().int().tolist()
        return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in colours]
    filled = filled.expand(-1, -1, *images.shape[-2:])
    if isinstance(fill, str) and fill == "blur":
        filled = reduced(filled, BLUR_SIDE)
    return [_webp(_rgb(image), 80) for image in filled]


def reduced(images: Tensor, side: int) -> Tensor:
    """Images averaged down to at most this side: [N,C,H,W] -> [N,C,h,w]."""
    longest = max(images.shape[-2:])
    if longest <= side:
        return images
    size = [max(1, round(length * side / longest)) for length in images.shape[-2:]]
    return F.interpolate(images, size, mode="area")


def _fitting(make: Callable[[int], list[str]], tries: Sequence[int], room: int) -> list[str]:
    """The result of the first try that fits into the room, else of the last try."""
    found: list[str] = []
    for attempt in tries:
        found = make(attempt)
        if sum(map(len, found)) <= room:
            break
    return found


def _steps_png(maps: Tensor, side: int, grid: Sequence[float]) -> list[str]:
    coded = steps(reduced(maps[:, None], side)[:, 0], grid)
    return [_address(Image.fromarray(code.numpy()), "png", optimize=True) for code in coded]


def _webp(image: Image.Image, quality: int | None = None) -> str:
    if quality is None:
        return _address(image, "webp", lossless=True, quality=80)
    return _address(image, "webp", quality=quality)


def _address(image: Image.Image, kind: str, **options: int | bool) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def _rgb(image: Tensor) -> Image.Image:
    """[C,H,W] in 0..1 -> RGB."""
    pixels = _three(image.detach().cpu().float()[None])[0].clamp(0, 1).mul(255).round()
    return Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).to(torch.uint8).numpy()))


def _three(images: Tensor) -> Tensor:
    """Three channels, grey where there are more or fewer: [N,C,H,W] -> [N,3,H,W]."""
    return images if images.shape[1] == 3 else images.mean(1, keepdim=True).expand(-1, 3, -1, -1)
