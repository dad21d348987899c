"""Every mask is a band of a heatmap, and every band is a run of ranks.

Sort an image's pixels by heatmap value, largest first, ties in pixel order. The pixels with
low < value <= high are then the ranks from #(value > high) up to #(value > low), so value bands and
rank bands are the same thing, and two masks are equal exactly when their runs are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sufficit.errors import UserError


@dataclass(frozen=True, slots=True)
class Band:
    """The pixels a mask keeps: low < value <= high, or low <= rank / HW < high."""

    axis: Literal["value", "rank"]
    low: float
    high: float


_STEP_ELEMENTS = 2**25  # of heatmaps copied to the device at a time
_MASK_ELEMENTS = 2**32  # of masks, one byte each, kept on the device
EVERYTHING = Band("rank", 0.0, 1.0)
NOTHING = Band("rank", 0.0, 0.0)


def show(alpha: float) -> Band:
    """Return Show(>alpha): the pixels above alpha."""
    return Band("value", alpha, math.inf)


def rest(alpha: float) -> Band:
    """Return Show(<=alpha): the pixels at or below alpha."""
    return Band("value", -math.inf, alpha)


def hide(alpha_min: float, alpha: float) -> Band:
    """Return Hide(>alpha): the pixels above alpha_min that are not above alpha."""
    return Band("value", alpha_min, alpha)


def at_least(alpha: float) -> Band:
    """Return the pixels at or above alpha, which the mask penalty counts."""
    if alpha <= 0:
        return Band("value", -math.inf, math.inf)
    # The next smaller float32: bands leave out their lower edge.
    at = torch.tensor(alpha, dtype=torch.float32, device="cpu")
    return Band("value", at.nextafter(at - 1).item(), math.inf)


def top(share: float) -> Band:
    """Return the first share of the pixels by rank."""
    return Band("rank", 0.0, share)


def all_but_top(share: float) -> Band:
    """Return the pixels after the first share by rank."""
    return Band("rank", share, 1.0)


def family(band: Band) -> tuple[str, bool, bool]:
    """Return what the bands of a curve have in common: the axis, and which ends are open.

    >>> family(show(0.1)) == family(show(0.9)), family(show(0.1)) == family(rest(0.1))
    (True, False)
    """
    lowest, highest = (-math.inf, math.inf) if band.axis == "value" else (0.0, 1.0)
    return band.axis, band.low == lowest, band.high == highest


def grid(step: float) -> tuple[float, ...]:
    """Return the points 0, step, 2 step, ..., 1.

    >>> grid(0.25)
    (0.0, 0.25, 0.5, 0.75, 1.0)
    >>> grid(0.4)
    (0.0, 0.4, 0.8, 1.0)
    """
    if not isinstance(step, int | float) or not 1e-4 <= step <= 1:
        raise UserError(
            f"a step must lie in 0..1, at least 0.0001, got {step!r:.50}: the defaults are 0.01 and"
            " 0.02"
        )
    points = round(1 / step)
    if math.isclose(points * step, 1, abs_tol=1e-9):
        return tuple(i / points for i in range(points + 1))
    return (*(i * step for i in range(math.ceil(1 / step))), 1.0)


def ranks(heatmaps: Tensor) -> Tensor:
    """Return each pixel's rank, largest value first, ties in pixel order: [N,H,W] -> [N,H,W].

    Ranks are floats because comparing floats is what CPUs and GPUs do fastest; float32 counts
    exactly up to 2**24 pixels.

    >>> ranks(torch.tensor([[[0.1, 0.9], [0.9, 0.5]]]))
    tensor([[[3., 0.],
             [1., 2.]]])
    """
    _, order = _falling(heatmaps)
    return _places(order).view_as(heatmaps)


def _falling(heatmaps: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and pixels, largest value first, ties in pixel order: [N,HW] twice."""
    values, order = heatmaps.flatten(1).sort(dim=1, descending=True, stable=True)
    return values, order


def _places(order: Tensor) -> Tensor:
    """Return the place of each pixel in an order: [N,HW] -> [N,HW]."""
    pixels = order.shape[1]
    dtype = torch.float32 if pixels <= 2**24 else torch.float64
    places = torch.arange(pixels, dtype=dtype, device=order.device).expand_as(order)
    return torch.empty_like(order, dtype=dtype).scatter_(1, order, places)


def runs(heatmaps: Tensor, bands: Sequence[Band]) -> Tensor:
    """Return the run of ranks [start, stop) that each band keeps: [N,H,W] -> [N,B,2].

    A band that keeps nothing is (0, 0).

    >>> runs(torch.tensor([[[0.1, 0.9], [0.9, 0.5]]]), [show(0.2), hide(0.2, 0.5), top(0.5)])
    tensor([[[0, 3],
             [2, 3],
             [0, 2]]])
    """
    return _runs(heatmaps.flatten(1).sort(dim=1).values, bands)


def ranks_and_runs(heatmaps: Tensor, bands: Sequence[Band]) -> tuple[Tensor, Tensor]:
    """Return what `ranks` and `runs` return, by one sort: [N,H,W] -> [N,H,W], [N,B,2].

    Edges of bands are float32, so that the values of float64 maps are compared in it.
    """
    values, order = _falling(heatmaps)
    return _places(order).view_as(heatmaps), _runs(values.float().flip(1), bands)


def _runs(values: Tensor, bands: Sequence[Band]) -> Tensor:
    """Return the run of each band from the values in rising order: [N,HW] -> [N,B,2]."""
    n, pixels = values.shape
    spans = torch.empty(n, len(bands), 2, dtype=torch.long, device=values.device)
    by_value = [i for i, band in enumerate(bands) if band.axis == "value"]
    by_rank = [i for i, band in enumerate(bands) if band.axis == "rank"]
    if by_value:
        # Ranks count from the highest value: one sort answers all bands by bisection.
        edges = [[bands[i].high, bands[i].low] for i in by_value]
        wanted = torch.tensor(edges, dtype=torch.float32, device=values.device).to(values)
        wanted = wanted.flatten().expand(n, -1).contiguous()
        above = pixels - torch.searchsorted(values, wanted, right=True)
        spans[:, by_value] = above.view(n, -1, 2)
    if by_rank:
        # To the nearest whole pixel, halves up; round(..., 6) because 0.29 * 50 is below a half.
        edges = [[bands[i].low, bands[i].high] for i in by_rank]
        counts = [[math.floor(round(share * pixels, 6) + 0.5) for share in pair] for pair in edges]
        spans[:, by_rank] = torch.tensor(counts, device=values.device)
    empty = spans[..., 0] >= spans[..., 1]
    return spans.masked_fill(empty[..., None], 0)


def distinct_masks(spans: Tensor, pixels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the distinct runs of all images, and the place of each band's run among them.

    [N,B,2] -> the image, the first rank that is kept and the first after it that is hidden, each
    [T], sorted by image; [N,B].
    """
    width = pixels + 1
    image = torch.arange(len(spans), device=spans.device)[:, None]
    # One number for image, start and stop, because `unique` of numbers is far faster than of rows.
    codes = (image * width + spans[..., 0]) * width + spans[..., 1]
    distinct, place = codes.unique(return_inverse=True)
    dtype = torch.float32 if pixels <= 2**24 else torch.float64  # that of the ranks
    starts = distinct // width % width
    stops = distinct % width
    return distinct // width**2, starts.to(dtype), stops.to(dtype), place


def inside(heatmaps: Tensor, band: Band) -> Tensor:
    """Return which pixels a band of values keeps; its edges are float32, as heatmaps are.

    >>> inside(torch.tensor([0.1, 0.5, 0.9]), show(0.5))
    tensor([False, False,  True])
    """
    edges = torch.tensor([band.low, band.high], dtype=torch.float32, device=heatmaps.device)
    edges = edges.to(heatmaps.dtype)
    return (heatmaps > edges[0]).logical_and(heatmaps <= edges[1])


def masks_of(heatmaps: Tensor, band: Band, device: torch.device) -> Tensor:
    """Return which pixels a band keeps, on the device if they fit: [N,H,W] -> bool [N,H,W]."""
    # A mask of bytes is a quarter of its heatmap: heatmaps are sent in parts, masks stay.
    there = device if heatmaps.numel() <= _MASK_ELEMENTS else heatmaps.device
    step = max(1, _STEP_ELEMENTS // heatmaps[0].numel())
    parts = heatmaps.split(step)
    return torch.cat([inside(part.to(there, torch.float32), band) for part in parts])
