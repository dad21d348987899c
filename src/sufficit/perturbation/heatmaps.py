"""Heatmaps [N,H,W] in 0..1: resize, normalise and check them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.errors import UserError, unknown

NORMALIZATIONS = ("none", "minmax", "percentile", "rank")


def normalize(heatmaps: Tensor, how: str = "minmax") -> Tensor:
    """Bring each map to 0..1; a constant map becomes zeros: [N,H,W] -> [N,H,W].

    `minmax` stretches the lowest value to 0 and the highest to 1. `percentile` does so after values
    above the 99th percentile were lowered to it, so that a few high pixels do not make all others
    small. `rank` replaces each value by the number of pixels with a lower one, then stretches that:
    only the order counts. `none` returns the maps as they are.

    >>> import torch
    >>> maps = torch.tensor([[[-1.0, 0.0], [2.0, 3.0]], [[7.0, 7.0], [7.0, 7.0]]])
    >>> normalize(maps)
    tensor([[[0.0000, 0.2500],
             [0.7500, 1.0000]],
    <BLANKLINE>
            [[0.0000, 0.0000],
             [0.0000, 0.0000]]])
    >>> normalize(maps[:1], "rank")
    tensor([[[0.0000, 0.3333],
             [0.6667, 1.0000]]])
    """
    _check_maps(heatmaps)
    if how not in NORMALIZATIONS:
        raise unknown("normalisation", str(how), NORMALIZATIONS)
    if how == "none":
        return heatmaps
    maps = heatmaps if heatmaps.is_floating_point() else heatmaps.float()
    if how == "rank":
        values = maps.flatten(1).contiguous()
        lower = torch.searchsorted(values.sort(dim=1).values, values)  # pixels that are lower
        maps = lower.view(maps.shape).to(maps.dtype if maps.element_size() > 2 else torch.float32)
    if how == "percentile":
        place = min(maps[0].numel(), math.ceil(0.99 * maps[0].numel())) - 1  # 1 % are above it
        edge = maps.flatten(1).sort(dim=1).values[:, place]
        low = maps.amin((1, 2))
        # A map with fewer pixels above its lowest value than that keeps them all.
        edge = torch.where(edge > low, edge, torch.inf)[:, None, None]
        maps = torch.minimum(maps, edge.to(maps))
    low = maps.amin((1, 2), keepdim=True)
    spread = maps.amax((1, 2), keepdim=True) - low
    flat = spread <= 0
    return ((maps - low) / spread.masked_fill(flat, 1)).masked_fill(flat, 0)


def resize(heatmaps: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize maps, bilinear, corners not aligned: [N,h,w] -> [N,H,W]."""
    _check_maps(heatmaps)
    if tuple(heatmaps.shape[-2:]) == tuple(size):
        return heatmaps
    maps = heatmaps.float()
    grown = F.interpolate(maps[:, None], size=size, mode="bilinear")[:, 0]
    # Bilinear weights never exceed the range of a map, but rounding may.
    low, high = (edge[:, None, None] for edge in maps.flatten(1).aminmax(dim=1))
    return grown.clamp(low, high) if grown.requires_grad else grown.clamp_(low, high)


def _check_maps(heatmaps: Tensor) -> None:
    """Raise unless these are maps of three axes."""
    if not isinstance(heatmaps, Tensor) or heatmaps.ndim != 3:
        came = list(heatmaps.shape) if isinstance(heatmaps, Tensor) else type(heatmaps).__name__
        raise UserError(f"heatmaps must be [N,h,w], got {came}: pass a tensor of three axes")


def check_heatmaps(heatmaps: Tensor, images: Tensor, names: Sequence[object] | None = None) -> None:
    """Raise unless there is one heatmap per image, of its size, finite and in 0..1."""
    if not isinstance(heatmaps, Tensor):
        came = type(heatmaps).__name__
        raise UserError(f"heatmaps must be a torch.Tensor, got {came}: call torch.as_tensor")
    # A user's function may return any kind of tensor; most operations below fail on these.
    if heatmaps.is_meta or heatmaps.layout is not torch.strided:
        came = "meta" if heatmaps.is_meta else str(heatmaps.layout).removeprefix("torch.")
        raise UserError(
            f"heatmaps must be a dense tensor with values, got a {came} one: make it so"
        )
    n, _, h, w = images.shape
    if tuple(heatmaps.shape) != (n, h, w):
        raise UserError(
            f"heatmaps must be [N,H,W] = {[n, h, w]}, got {list(heatmaps.shape)}: "
            f"{_shape_advice(heatmaps, (n, h, w))}"
        )
    if not heatmaps.is_floating_point():
        raise UserError(f"heatmaps must be floats in 0..1, got {heatmaps.dtype}: call .float()")
    check_range(heatmaps, names)


def check_range(heatmaps: Tensor, names: Sequence[object] | None = None, more: str = "") -> None:
    """Raise unless all values are finite and in 0..1, and name the images where they are not.

    `more` is a further remedy for values outside.
    """
    low, high = heatmaps.flatten(1).aminmax(dim=1)
    if heatmaps.shape[0] and not (low.isfinite() & high.isfinite()).all():
        broken = (~heatmaps.flatten(1).isfinite()).any(1).nonzero().flatten().tolist()
        raise UserError(
            "heatmaps must be finite, got NaN or infinite values: replace them, or leave out"
            f" {_named(broken, names)}"
        )
    outside = ((low < 0) | (high > 1)).nonzero().flatten().tolist()
    if outside:
        first = outside[0]
        raise UserError(
            f"heatmaps must lie in 0..1, got {low[first]:.9g}..{high[first]:.9g} in"
            f" {_named(outside, names)}: call sufficit.normalize(heatmaps){more}"
        )


def _named(indices: list[int], names: Sequence[object] | None) -> str:
    """Return the first of some images by name or number, and how many more there are."""
    words = [str(names[i] if names else i) for i in indices[:5]]
    more = f" and {len(indices) - 5} more" if len(indices) > 5 else ""
    return f"image{'s' if len(indices) > 1 else ''} {', '.join(words)}{more}"


def _shape_advice(heatmaps: Tensor, wanted: tuple[int, int, int]) -> str:
    """Return how to give heatmaps the wanted shape."""
    if heatmaps.ndim == 4 and heatmaps.shape[1] == 1:
        return "drop the channel axis with heatmaps[:, 0]"
    if heatmaps.ndim == 4:
        return "reduce the channel axis, for example heatmaps.abs().sum(1), and normalise"
    if heatmaps.ndim == 2 and wanted[0] == 1:
        return "add the batch axis with heatmaps[None]"
    if heatmaps.ndim == 3 and heatmaps.shape[0] == wanted[0]:
        return f"call sufficit.resize(heatmaps, {wanted[1:]})"
    return "pass one heatmap for each image, of the image's size"
