"""How alike heatmaps are: by the order of their pixels, by structure, by the region they mark."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.errors import UserError
from sufficit.intervals import Estimate, estimates

_GROUP_ELEMENTS = 2**22  # pixels compared at once
_REACH = 5  # pixels from the middle of SSIM's window to its edge
_C1, _C2 = 0.01**2, 0.03**2  # SSIM's constants for values in 0..1


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's rank correlation of each image's pixels: [N,H,W], [N,H,W] -> [N].

    Ties share their average rank. NaN where either map has no spread.

    >>> ramp = torch.tensor([[[0.0, 0.1], [0.2, 0.9]]])
    >>> rank_correlation(ramp, ramp.square()), rank_correlation(ramp, 1 - ramp)
    (tensor([1.], dtype=torch.float64), tensor([-1.], dtype=torch.float64))
    """
    _check_pair(first, second)
    return _in_groups(
        lambda a, b: _correlation(_centred_ranks(a), _centred_ranks(b)), first, second
    )


def structural_similarity(first: Tensor, second: Tensor) -> Tensor:
    """SSIM of each pair of maps in 0..1, a Gaussian window of 11 pixels: [N,H,W] twice -> [N].

    NaN where a side is shorter than six pixels: the window does not fit.

    >>> ramp = torch.linspace(0, 1, 64).view(1, 8, 8)
    >>> structural_similarity(ramp, ramp)
    tensor([1.], dtype=torch.float64)
    """
    _check_pair(first, second)
    if min(first.shape[1:]) <= _REACH:
        return torch.full((len(first),), torch.nan, dtype=torch.float64)
    return _in_groups(_ssim, first, second)


def region_overlap(
    first: Tensor, second: Tensor, alpha_min: float = 0.5, *, empty: float = 1.0
) -> Tensor:
    """Intersection over union of the regions above alpha_min: [N,H,W] twice -> [N].

    `empty` is the value where both regions are empty.

    >>> maps = torch.tensor([[[0.9, 0.9, 0.1]], [[0.1, 0.9, 0.1]]])
    >>> region_overlap(maps[:1], maps[1:])
    tensor([0.5000], dtype=torch.float64)
    """
    _check_pair(first, second)
    ours, theirs = first > alpha_min, second > alpha_min
    union = (ours | theirs).sum((1, 2)).cpu().double()
    both = (ours & theirs).sum((1, 2)).cpu().double()
    return torch.where(union == 0, empty, both / union.clamp(min=1))


@dataclass(frozen=True)
class Agreement:
    """How alike several maps of each image are, each value the mean over pairs of maps: [N]."""

    rank_correlation: Tensor
    ssim: Tensor
    iou: Tensor
    maps: int  # of each image
    alpha_min: float

    def summary(self, *, seed: int = 0) -> dict[str, Estimate]:
        """Means over images with 95 % intervals; NaN is left out of them, and counted."""
        columns = ("rank_correlation", "ssim", "iou")
        return {name: estimate(getattr(self, name), seed=seed) for name in columns}


def agreement(maps: Sequence[Tensor] | Tensor, alpha_min: float = 0.5) -> Agreement:
    """How repeatable heatmaps are, one set a seed: S times [N,H,W] in 0..1, or [S,N,H,W].

    An image whose value is NaN for one pair of maps has NaN for its mean.

    >>> hill = torch.linspace(0, 1, 64).view(1, 8, 8)
    >>> agreement([hill, hill, 1 - hill]).rank_correlation       # pairs: 1, -1, -1
    tensor([-0.3333], dtype=torch.float64)
    """
    _check_several(maps)
    parts = [_agree([m[part] for m in maps], alpha_min) for part in _groups(maps[0])]
    rank, ssim, iou = (torch.cat(column) for column in zip(*parts, strict=True))
    return Agreement(rank, ssim, iou, len(maps), alpha_min)


def estimate(values: Tensor, *, seed: int = 0, higher_is_better: bool = True) -> Estimate:
    """The mean of one value an image, its 95 % interval, and how many are NaN: [N]."""
    column = np.asarray(values.double().cpu())
    return estimates({"": column}, {"": higher_is_better}, seed=seed)[""]


def _agree(maps: list[Tensor], alpha_min: float) -> tuple[Tensor, Tensor, Tensor]:
    """The means over pairs of S maps of a group of images: each [N]."""
    ranks = [_centred_ranks(m) for m in maps]  # sorted once, however many pairs there are
    pairs = list(combinations(range(len(maps)), 2))
    found = [
        (
            _correlation(ranks[i], ranks[j]).cpu(),
            structural_similarity(maps[i], maps[j]),
            region_overlap(maps[i], maps[j], alpha_min),
        )
        for i, j in pairs
    ]
    rank, ssim, iou = (torch.stack(column).mean(0) for column in zip(*found, strict=True))
    return rank, ssim, iou


def _centred_ranks(maps: Tensor) -> Tensor:
    """The ranks of each map's pixels less their mean, ties at their average: [N,H,W] -> [N,HW]."""
    values = maps.flatten(1).contiguous()
    ordered = values.sort(dim=1).values
    below = torch.searchsorted(ordered, values, right=False)
    upto = torch.searchsorted(ordered, values, right=True)
    return _exact(below + upto - values.shape[1]) / 2


def _correlation(first: Tensor, second: Tensor) -> Tensor:
    """Pearson's correlation of centred rows: [N,P], [N,P] -> [N]."""
    product = (first * second).sum(1)
    # Sums of halves squared are exact in float64, so that equal maps correlate to 1 exactly.
    return product / (first.square().sum(1) * second.square().sum(1)).sqrt()


def _ssim(first: Tensor, second: Tensor) -> Tensor:
    """Wang et al. 2004, equation 13, averaged over the pixels: [N,H,W], [N,H,W] -> [N]."""
    # In float64: a GPU may multiply float32 in TF32, too coarse for differences of squares.
    x, y = _exact(first), _exact(second)
    down, across = (_blur(side).to(x.device) for side in x.shape[1:])
    mean_x, mean_y, square_x, square_y, product = (
        down @ maps @ across.T for maps in (x, y, x * x, y * y, x * y)
    )
    variances = square_x + square_y - mean_x.square() - mean_y.square()
    covariance = product - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x.square() + mean_y.square() + _C1)
    return (luminance * (2 * covariance + _C2) / (variances + _C2)).mean((1, 2))


def _blur(side: int) -> Tensor:
    """SSIM's Gaussian window along one side, reflected at the ends, as a matrix [side,side]."""
    places = torch.arange(-_REACH, _REACH + 1, dtype=torch.float64)
    weights = torch.exp(-(places / 1.5).square() / 2)
    pixels = torch.eye(side, dtype=torch.float64)
    windows = F.pad(pixels[None], (_REACH, _REACH), mode="reflect")[0].unfold(1, len(weights), 1)
    return (windows @ (weights / weights.sum())).T


def _exact(values: Tensor) -> Tensor:
    """In float64; on the CPU where the device has none."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def _groups(maps: Tensor) -> list[slice]:
    """Stretches of images that are compared at once."""
    size = max(1, _GROUP_ELEMENTS // maps[0].numel())
    return [slice(start, start + size) for start in range(0, len(maps), size)]


def _in_groups(
    compare: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor
) -> Tensor:
    return torch.cat([compare(first[part], second[part]).cpu() for part in _groups(first)])


def _check_pair(first: Tensor, second: Tensor) -> None:
    for maps in (first, second):
        if not isinstance(maps, Tensor) or maps.ndim != 3 or 0 in maps.shape:
            came = list(maps.shape) if isinstance(maps, Tensor) else type(maps).__name__
            raise UserError(f"heatmaps must be a tensor [N,H,W] of one image or more, got {came}")
        if not maps.isfinite().all():
            raise UserError("heatmaps must be finite to be compared, got NaN or infinite values")
    if first.shape != second.shape:
        raise UserError(
            f"heatmaps must be of one shape to be compared, got {list(first.shape)} and"
            f" {list(second.shape)}: bring them to one size with sufficit.resize"
        )


def _check_several(maps: Sequence[Tensor] | Tensor) -> None:
    if isinstance(maps, Tensor) and maps.ndim != 4:
        raise UserError(
            f"maps must be [S,N,H,W], or a list of [N,H,W], one a seed, got {list(maps.shape)}"
        )
    if len(maps) < 2:
        raise UserError(f"agreement needs the maps of two seeds or more, got {len(maps)}")
    for other in maps[1:]:
        _check_pair(maps[0], other)
