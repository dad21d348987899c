"""MSI by rank: sufficiency less area, whatever the scale of a map's values.

At a share k of the pixels, highest values first: the score with these pixels alone, less the score
without them, less k. k is the share with the best mean of the method, chosen on other images than
those it is read at: the images are split in two halves, by seed and name, and each half is read at
the k that is best for the other.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sufficit.metrics.metric import CURVES, Heading, Metric, Schedule
from sufficit.perturbation.bands import Band
from sufficit.perturbation.predictions import Predictions
from sufficit.perturbation.sampling import uniforms

COARSE = (0.04, 0.1, 0.2, 0.3, 0.5)
"""Shares that are asked for every image, where the others are drawn; to the nearest of the grid."""
Shares = tuple[
    float, float
]  # at which the images of either half are read; NaN if the other is empty


def coarse_shares(schedule: Schedule) -> list[float]:
    """Return the points of the grid that are nearest to COARSE, each once.

    >>> coarse_shares(Schedule(0.5, percent_step=0.25))
    [0.0, 0.25, 0.5]
    """
    shares = schedule.shares
    return sorted({min(shares, key=lambda k: (abs(k - wanted), k)) for wanted in COARSE})


def _pairs(schedule: Schedule) -> dict[float, tuple[Band, Band]]:
    """The bands that keep the first share of the pixels, and the others, by share."""
    kept, left = (CURVES[f"{kind}_percent"][0](schedule) for kind in ("insertion", "deletion"))
    return dict(zip(schedule.shares, zip(kept, left, strict=True), strict=True))


def halves_of(names: Sequence[str], seed: int) -> Tensor:
    """Return the half that each image is in, 0 or 1: [N]."""
    found = [int(uniforms(seed, f"half/{name}", 1)[0] < 0.5) for name in names]
    return torch.tensor(found, dtype=torch.uint8, device="cpu")


def rank_curve(predictions: Predictions, schedule: Schedule) -> Tensor:
    """Return kept less left less k at every share, NaN where not all images were asked: [N,P]."""
    pairs = _pairs(schedule)
    kept, left = ([pair[side] for pair in pairs.values()] for side in (0, 1))
    curve = predictions.of(kept, schedule.score) - predictions.of(left, schedule.score)
    curve -= torch.tensor([*pairs], dtype=torch.float64)
    if predictions.counts is not None:
        place = {band: i for i, band in enumerate(predictions.bands)}
        places = torch.tensor([[place[band] for band in pair] for pair in pairs.values()])
        curve[:, (predictions.counts[places] < 1).any(1)] = torch.nan
    return curve


def half_sums(predictions: Predictions, schedule: Schedule) -> Tensor:
    """Return sums and counts of the curve over the images of either half: [2,2,P]."""
    assert predictions.halves is not None  # the plan has msi_rank
    found = torch.zeros(2, 2, len(schedule.shares), dtype=torch.float64)
    for some in predictions.pieces():
        curve = rank_curve(some, schedule)
        for half in (0, 1):
            own = curve[some.halves == half]
            found[half] += torch.stack([own.nansum(0), (~own.isnan()).sum(0).double()])
    return found


def best_shares(sums: Tensor, schedule: Schedule) -> Shares:
    """Return the share at which either half is read: the best of the other, the smaller of two."""
    found = []
    for half in (0, 1):
        total, count = sums[1 - half]
        means = (total / count).nan_to_num(-torch.inf)
        known = bool((count > 0).any())
        found.append(schedule.shares[int(means.argmax())] if known else float("nan"))
    return found[0], found[1]


def msi_rank(predictions: Predictions, schedule: Schedule) -> Tensor:
    """The curve of each image at the share that was chosen on the other half: [N]."""
    assert predictions.halves is not None  # the plan has msi_rank
    assert schedule.best_shares is not None  # `read` finds them
    curve, places = rank_curve(predictions, schedule), list(schedule.shares)
    at = [places.index(k) if k in places else -1 for k in schedule.best_shares]
    own = torch.stack([curve[:, k] if k >= 0 else curve[:, 0] * torch.nan for k in at], dim=1)
    return own.gather(1, predictions.halves.long()[:, None])[:, 0]


def _asks(schedule: Schedule) -> list[Band]:
    pairs = _pairs(schedule)
    return [band for share in coarse_shares(schedule) for band in pairs[share]]


def _weights(schedule: Schedule) -> Mapping[Band, float]:
    """All bands of both curves, without a weight: a plan that draws bands draws none for these."""
    return {band: 0.0 for pair in _pairs(schedule).values() for band in pair}


_WORDS = (
    "MSI by rank: the score with the best share of the pixels alone, minus that without them, minus"
    " the share. It does not depend on how values are scaled."
)
RANK = Metric(
    True, _asks, msi_rank, heading=Heading("by rank", "MSI by rank", _WORDS), weights=_weights
)
