"""Similarity of heatmaps: rank correlation, structural similarity, overlap of regions.

And of rankings: does one hold under another fill, or for a twin of the model? Spearman and SSIM are
written here, and compared with scipy and torchmetrics in the tests: scipy ranks on the CPU only,
and torchmetrics' SSIM takes 14 times as long in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sufficit.errors import UserError
from sufficit.perturbation.fills import blur_matrix
from sufficit.statistics import Estimate, Standing, estimates_of
from sufficit.sums import sums_of

Compare = Callable[[Tensor, Tensor], Tensor]
_GROUP_ELEMENTS = 2**22  # pixels compared at once
# SSIM's constants for values in 0..1.
_C1 = 0.01**2
_C2 = 0.03**2


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return Spearman's rank correlation of each image's pixels: [N,H,W], [N,H,W] -> [N].

    Ties share their average rank. NaN where a map is constant.

    >>> ramp = torch.tensor([[[0.0, 0.1], [0.2, 0.9]]])
    >>> rank_correlation(ramp, ramp.square()), rank_correlation(ramp, 1 - ramp)
    (tensor([1.], dtype=torch.float64), tensor([-1.], dtype=torch.float64))
    """
    _check_pair(first, second)
    return _in_groups(_spearman, first, second)


def structural_similarity(first: Tensor, second: Tensor) -> Tensor:
    """Return SSIM of each pair of maps in 0..1, Gaussian window of 11 pixels: [N,H,W] twice -> [N].

    NaN where a side is shorter than six pixels, so that the window does not fit.

    >>> ramp = torch.linspace(0, 1, 64).view(1, 8, 8)
    >>> structural_similarity(ramp, ramp)
    tensor([1.], dtype=torch.float64)
    """
    _check_pair(first, second)
    if min(first.shape[1:]) < 6:
        return torch.full((len(first),), torch.nan, dtype=torch.float64)
    return _in_groups(_ssim, first, second)


def region_overlap(
    first: Tensor, second: Tensor, alpha_min: float = 0.5, *, empty: float = 1.0
) -> Tensor:
    """Return intersection over union of the regions above alpha_min: [N,H,W] twice -> [N].

    `empty` is the value where both regions are empty.

    >>> maps = torch.tensor([[[0.9, 0.9, 0.1]], [[0.1, 0.9, 0.1]]])
    >>> region_overlap(maps[:1], maps[1:])
    tensor([0.5000], dtype=torch.float64)
    """
    _check_pair(first, second)
    ours = first > alpha_min
    theirs = second > alpha_min
    common = (ours & theirs).sum((1, 2)).cpu().double()
    union = (ours | theirs).sum((1, 2)).cpu().double()
    return torch.where(union == 0, empty, common / union.clamp(min=1))


@dataclass(frozen=True)
class Agreement:
    """How similar several maps of each image are, averaged over pairs of maps: each [N]."""

    rank_correlation: Tensor
    ssim: Tensor
    iou: Tensor
    maps: int  # per image
    alpha_min: float

    def summary(self, *, seed: int = 0) -> dict[str, Estimate]:
        """Return means over images with 95 % intervals; NaN is ignored and counted."""
        columns = ("rank_correlation", "ssim", "iou")
        return {name: estimate(getattr(self, name), seed=seed) for name in columns}


def agreement(maps: Sequence[Tensor] | Tensor, alpha_min: float = 0.5) -> Agreement:
    """Return how repeatable heatmaps are over S seeds: S times [N,H,W] in 0..1, or [S,N,H,W].

    An image has NaN if one of its pairs of maps has NaN.

    >>> hill = torch.linspace(0, 1, 64).view(1, 8, 8)
    >>> agreement([hill, hill, 1 - hill]).rank_correlation       # pairs: 1, -1, -1
    tensor([-0.3333], dtype=torch.float64)
    """
    if isinstance(maps, Tensor) and maps.ndim != 4:
        raise UserError(
            f"maps must be [S,N,H,W], or a list of [N,H,W], one per seed, got {list(maps.shape)}"
        )
    if len(maps) < 2:
        raise UserError(f"agreement needs the maps of two seeds or more, got {len(maps)}")
    pairs = list(combinations(maps, 2))

    def mean(compare: Compare) -> Tensor:
        return torch.stack([compare(a, b) for a, b in pairs]).mean(0)

    return Agreement(
        rank_correlation=mean(rank_correlation),
        ssim=mean(structural_similarity),
        iou=mean(lambda a, b: region_overlap(a, b, alpha_min)),
        maps=len(maps),
        alpha_min=alpha_min,
    )


def estimate(values: Tensor, *, seed: int = 0) -> Estimate:
    """Return the mean of one value in -1..1 per image with its 95 % interval: [N]."""
    column = np.asarray(values.double().cpu())
    sums = sums_of({"": column}, seed=seed)
    return estimates_of(sums, {"": True}, limits=lambda _: (-1.0, 1.0))[""]


def _ranks(maps: Tensor) -> Tensor:
    """Return each pixel's rank minus the mean rank, ties at their average: [N,H,W] -> [N,HW]."""
    values = maps.flatten(1).contiguous()
    ordered = values.sort(dim=1).values
    below = torch.searchsorted(ordered, values, right=False)
    upto = torch.searchsorted(ordered, values, right=True)
    return _exact(below + upto - values.shape[1]) / 2


def _spearman(first: Tensor, second: Tensor) -> Tensor:
    """Return Pearson's correlation of the ranks: [N,H,W] twice -> [N]."""
    x = _ranks(first)
    y = _ranks(second)
    # Sums of squared halves are exact in float64, so that equal maps correlate to exactly 1.
    return (x * y).sum(1) / (x.square().sum(1) * y.square().sum(1)).sqrt()


def _ssim(first: Tensor, second: Tensor) -> Tensor:
    """Return SSIM (Wang et al. 2004, equation 13), averaged over pixels: [N,H,W] twice -> [N]."""
    # In float64: a GPU may multiply float32 in TF32, too coarse for differences of squares.
    x = _exact(first)
    y = _exact(second)
    down, across = (blur_matrix(side, 1.5, x.device, x.dtype) for side in x.shape[1:])
    mean_x, mean_y, square_x, square_y, product = (
        down @ maps @ across.T for maps in (x, y, x * x, y * y, x * y)
    )
    variances = square_x + square_y - mean_x.square() - mean_y.square()
    covariance = product - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x.square() + mean_y.square() + _C1)
    return (luminance * (2 * covariance + _C2) / (variances + _C2)).mean((1, 2))


def _exact(values: Tensor) -> Tensor:
    """Return float64, on the CPU where the device has none."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def _in_groups(compare: Compare, first: Tensor, second: Tensor) -> Tensor:
    """Compare a few images at a time: what is made of many maps would not fit into memory."""
    size = max(1, _GROUP_ELEMENTS // first[0].numel())
    pairs = zip(first.split(size), second.split(size), strict=True)
    return torch.cat([compare(a, b).cpu() for a, b in pairs])


def _check_pair(first: Tensor, second: Tensor) -> None:
    """Raise unless both are finite maps of one shape."""
    for maps in (first, second):
        if not isinstance(maps, Tensor) or maps.ndim != 3 or 0 in maps.shape:
            came = list(maps.shape) if isinstance(maps, Tensor) else type(maps).__name__
            raise UserError(
                f"heatmaps must be [N,H,W] of one image or more, got {came}: pass such a tensor"
            )
        if not maps.isfinite().all():
            raise UserError("heatmaps must be finite, got NaN or infinite values: leave these out")
    if first.shape != second.shape:
        raise UserError(
            f"heatmaps must have one shape to be compared, got {list(first.shape)} and"
            f" {list(second.shape)}: call sufficit.resize"
        )


@dataclass(frozen=True)
class RankedCondition:
    """How methods rank by MSI under one condition."""

    key: str  # the end of its columns' names; empty for the first condition
    fill: str
    twin: bool
    masks: int  # asked per image and method, at most
    model_calls: int
    clean_accuracy: float  # share of whole images that get their target; NaN where unknown
    standing: Standing

    @property
    def words(self) -> str:
        """The condition in words.

        >>> from sufficit.statistics import compare_values
        >>> standing = compare_values({"a": [1.0], "b": [0.0]})
        >>> RankedCondition("twin_blur", "blur", True, 8, 80, 0.9, standing).words
        'for the twin with the fill blur'
        """
        return f"{'for the twin ' * self.twin}with the fill {self.fill}"


def correlations(ranked: Sequence[RankedCondition]) -> list[dict[str, Any]]:
    """Return how far every two conditions, named by key, rank the methods alike, by their means.

    1 is the same order, -1 the reverse; NaN where either ranks all methods equally.
    """
    rows = []
    for one, two in combinations(ranked, 2):
        methods = one.standing.ranking
        first = [one.standing.means[method] for method in methods]
        second = [two.standing.means[method] for method in methods]
        rows.append(
            {
                "first": one.key,
                "second": two.key,
                "spearman": spearman(first, second),
                "kendall": kendall(first, second),
            }
        )
    return rows


def spearman(one: npt.ArrayLike, two: npt.ArrayLike) -> float:
    """Return the correlation of ranks, equal values sharing their mean rank: [M], [M].

    >>> spearman([1, 2, 3, 4], [1, 3, 2, 4])
    0.8
    """

    def as_map(values: npt.ArrayLike) -> Tensor:
        # A method without a value ranks last.
        return torch.tensor(np.asarray(values, np.float64)).nan_to_num(-torch.inf)[None, None]

    return round(_spearman(as_map(one), as_map(two)).item(), 12)


def kendall(one: npt.ArrayLike, two: npt.ArrayLike) -> float:
    """Return Kendall's tau-b: pairs in the same order less pairs in the other, ties allowed.

    >>> kendall([1, 2, 3, 4], [1, 3, 2, 4])
    0.666666666667
    """
    from scipy.stats import kendalltau  # slow to import

    first = np.asarray(one, np.float64)
    second = np.asarray(two, np.float64)
    if len(first) < 2:  # scipy warns
        return float("nan")
    return round(float(kendalltau(first, second).statistic), 12)


def lost_leads(first: Standing, other: Standing) -> dict[str, list[str]]:
    """Return the leads that the paired tests find under the first condition and not under another.

    By method, those it no longer leads; first those that are significantly better there. A lead of
    A over B is a significant difference. It survives if A is significantly better there too. Both
    tests are Holm-corrected for all pairs of methods of their condition.
    """
    lost = {}
    for method in first.ranking:
        behind = [rival for rival in first.ranking if first.beats(method, rival)]
        turned = [rival for rival in behind if other.beats(rival, method)]
        gone = [rival for rival in behind if not other.beats(method, rival)]
        leads = [*turned, *(rival for rival in gone if rival not in turned)]
        if leads:
            lost[method] = leads
    return lost


def best_changes(first: Standing, other: Standing) -> bool:
    """Return whether another method is best there, significantly better than the first's best."""
    return first.best in other.means and other.beats(other.best, first.best)
