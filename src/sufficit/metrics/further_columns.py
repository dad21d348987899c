"""Columns beyond the paper's: of the percentage masks, of the heatmap alone, of image masks.

MSI by rank is sufficiency less area, whatever the scale of a map's values. At a share k of the
pixels, highest values first: the score with these pixels alone, less the score without them, less
k. `pooled.py` says which k is read.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sufficit.metrics.metric import (
    CURVES,
    AnyMetric,
    CellMetric,
    Metric,
    Schedule,
    curve_weights,
    of_map,
    weighted,
)
from sufficit.perturbation.bands import EVERYTHING, Band
from sufficit.perturbation.image_masks import ImageMask
from sufficit.perturbation.predictions import Predictions
from sufficit.similarity import rank_correlation

CELLS = tuple(ImageMask(4, cell) for cell in range(16))
SUBSETS = tuple(ImageMask(8, number, drawn=13) for number in range(50))  # a fifth of the cells


def sparseness(heatmaps: Tensor, truth: Tensor | None = None) -> Tensor:
    """Return the Gini index of each map's values, NaN where all are 0: [N,H,W] -> [N].

    >>> sparseness(torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.5, 0.5], [0.5, 0.5]]]))
    tensor([0.7500, 0.0000], dtype=torch.float64)
    """
    values = heatmaps.double().flatten(1).sort(dim=1).values
    n = values.shape[1]
    places = 2 * torch.arange(1, n + 1, dtype=torch.float64, device=values.device) - n - 1
    return (values * places).sum(1) / (n * values.sum(1))


def complexity(heatmaps: Tensor, truth: Tensor | None = None) -> Tensor:
    """Return the entropy of each map as shares of its sum, NaN where that is 0: [N,H,W] -> [N].

    >>> complexity(torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.5, 0.5], [0.5, 0.5]]])).exp()
    tensor([1., 4.], dtype=torch.float64)
    """
    shares = heatmaps.double().flatten(1)
    shares = shares / shares.sum(1, keepdim=True)
    return -torch.xlogy(shares, shares).sum(1)


def _srg_weights(schedule: Schedule) -> dict[Band, float]:
    """Insertion less deletion by percentage, of probabilities (Blücher et al. 2024)."""
    kept, left = (curve_weights(f"{kind}_percent")(schedule) for kind in ("insertion", "deletion"))
    return {band: kept.get(band, 0.0) - left.get(band, 0.0) for band in [*kept, *left]}


def _deletion_means(schedule: Schedule) -> dict[Band, float]:
    """The weight of each point of the percentage deletion curve in its plain mean."""
    asked = CURVES["deletion_percent"](schedule).values()
    return dict.fromkeys(asked, 1 / len(asked))


def aopc(predictions: Predictions, schedule: Schedule) -> Tensor:
    """Mean fall of the target's probability over the percentage deletions (Samek 2017): [N]."""
    whole = predictions.of([EVERYTHING], "confidence")[:, 0]
    return whole - predictions.total(_deletion_means(schedule), "confidence")


def _insertions(schedule: Schedule) -> list[Band]:
    return [*CURVES["insertion_percent"](schedule).values()]


def sufficient_share(predictions: Predictions, schedule: Schedule) -> Tensor:
    """The smallest share of the pixels, by rank, that gives the target; 1 if none does: [N]."""
    scores = predictions.of(_insertions(schedule), "accuracy")
    right = torch.cat([scores == 1, torch.ones_like(scores[:, :1], dtype=torch.bool)], dim=1)
    shares = torch.tensor([*schedule.shares, 1.0], dtype=torch.float64, device="cpu")
    return shares[right.byte().argmax(1)].masked_fill(scores.isnan().any(1), torch.nan)


def single_deletion(sums: Tensor, falls: Tensor) -> Tensor:
    """Rank correlation of each cell's sum with the fall in probability without it: twice -> [N]."""
    found = torch.full((len(sums),), torch.nan, dtype=torch.float64, device="cpu")
    known = (~falls.isnan().any(1)).nonzero()[:, 0]
    if len(known):
        found[known] = rank_correlation(sums[known, None], falls[known, None])
    return found


def faithfulness_correlation(sums: Tensor, falls: Tensor) -> Tensor:
    """Pearson's correlation of a map's sum over random cells with the fall without them: -> [N]."""
    x = sums - sums.mean(1, keepdim=True)
    y = falls - falls.mean(1, keepdim=True)
    spreads = x.square().sum(1) * y.square().sum(1)
    # Where all values are one, rounding leaves a spread that is none.
    flat = (x.abs().amax(1) <= 1e-9 * sums.abs().amax(1)) | (spreads == 0)
    return ((x * y).sum(1) / spreads.sqrt()).masked_fill(flat, torch.nan)


def infidelity(sums: Tensor, falls: Tensor) -> Tensor:
    """Mean squared error of a map's sum over random cells, at its best scale, as the fall: -> [N].

    A map in 0..1 has no unit, so the sums are scaled by the factor with the least error.
    """
    product = (sums * falls).mean(1)
    square = (sums * sums).mean(1)
    gain = torch.where(square > 0, product.square() / square, 0.0)
    return falls.square().mean(1) - gain


FURTHER: Mapping[str, AnyMetric] = {
    "srg": weighted(higher_is_better=True, weights=_srg_weights, kind="confidence"),
    "aopc": Metric(
        higher_is_better=True, asks=lambda _: [EVERYTHING], formula=aopc, weights=_deletion_means
    ),
    "sufficient_share": Metric(higher_is_better=False, asks=_insertions, formula=sufficient_share),
    "sparseness": of_map(higher_is_better=True, measure=sparseness),
    "complexity": of_map(higher_is_better=False, measure=complexity),
    "single_deletion": CellMetric(higher_is_better=True, masks=CELLS, formula=single_deletion),
    "faithfulness_correlation": CellMetric(
        higher_is_better=True, masks=SUBSETS, formula=faithfulness_correlation
    ),
    "infidelity": CellMetric(higher_is_better=False, masks=SUBSETS, formula=infidelity),
}
WHOLE_CURVES = ("sufficient_share",)
"""Columns that are no weighted sum of scores: they need all masks of a curve for every image."""
COARSE = (0.04, 0.1, 0.2, 0.3, 0.5)
"""Shares that are asked for every image, where the others are drawn; to the nearest of the grid."""


def coarse_shares(schedule: Schedule) -> list[float]:
    """Return the points of the grid that are nearest to COARSE, each once.

    >>> coarse_shares(Schedule(0.5, percent_step=0.25))
    [0.0, 0.25, 0.5]
    """
    shares = schedule.shares
    return sorted({min(shares, key=lambda k: (abs(k - wanted), k)) for wanted in COARSE})


def _rank_pairs(schedule: Schedule) -> dict[float, tuple[Band, Band]]:
    """The bands that keep the first share of the pixels, and the others, by share."""
    kept, left = (CURVES[f"{kind}_percent"](schedule) for kind in ("insertion", "deletion"))
    return {share: (kept[share], left[share]) for share in schedule.shares}


def rank_curve(predictions: Predictions, schedule: Schedule) -> Tensor:
    """Return kept less left less k at every share, NaN where not all images were asked: [N,P]."""
    pairs = _rank_pairs(schedule)
    kept, left = ([pair[side] for pair in pairs.values()] for side in (0, 1))
    curve = predictions.of(kept, schedule.score) - predictions.of(left, schedule.score)
    curve -= torch.tensor([*pairs], dtype=torch.float64, device="cpu")
    if predictions.counts is not None:
        place = {band: i for i, band in enumerate(predictions.bands)}
        asked = [[place[band] for band in pair] for pair in pairs.values()]
        places = torch.tensor(asked, device="cpu")
        curve[:, (predictions.counts[places] < 1).any(1)] = torch.nan
    return curve


def _rank_asks(schedule: Schedule) -> list[Band]:
    pairs = _rank_pairs(schedule)
    return [band for share in coarse_shares(schedule) for band in pairs[share]]


def _rank_weights(schedule: Schedule) -> Mapping[Band, float]:
    """All bands of both curves, without a weight: where bands are drawn, none is for these."""
    return {band: 0.0 for pair in _rank_pairs(schedule).values() for band in pair}


def _not_of_one_image(predictions: Predictions, schedule: Schedule) -> Tensor:
    """`msi_rank` reads an image at a share that other images chose: see `pooled.RankShares`."""
    return torch.full_like(predictions.calls, torch.nan, dtype=torch.float64)


RANK = Metric(
    higher_is_better=True, asks=_rank_asks, formula=_not_of_one_image, weights=_rank_weights
)
