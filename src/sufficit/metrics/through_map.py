"""Columns that are usual for CAMs: the image through the heatmap, each pixel times its value.

Average Drop and Increase in Confidence (Chattopadhay et al. 2018) ask the model about the image
through the map. Coherency (Poppi et al. 2021) draws the heatmap of that image again. ADCC and ARCC
(2605.14641) are harmonic means of three such values, each in 0..1 and better if higher.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sufficit.metrics.metric import (
    AnyMetric,
    DerivedMetric,
    Metric,
    RedrawnMetric,
    Schedule,
    SeenMetric,
    no_bands,
    of_map,
)
from sufficit.perturbation.bands import Band, all_but_top, top
from sufficit.perturbation.fills import ROAD
from sufficit.perturbation.predictions import Predictions

ROAD_SHARES = (0.2, 0.4, 0.6, 0.8)  # of the pixels, as the paper of ARCC has them


def average_drop(whole: Tensor, seen: Tensor) -> Tensor:
    """Return the share of the probability that is lost through the map: [N], [N] -> [N].

    >>> average_drop(torch.tensor([0.8, 0.5, 0.0]), torch.tensor([0.2, 0.9, 0.0]))
    tensor([0.7500, 0.0000, 0.0000])
    """
    # What is 0 for the whole image cannot be lost. NaN stays NaN.
    return torch.where(whole == 0, torch.zeros_like(seen) * seen, (whole - seen).relu() / whole)


def increase_in_confidence(whole: Tensor, seen: Tensor) -> Tensor:
    """Return 1 where the probability is higher through the map, else 0: [N], [N] -> [N].

    >>> increase_in_confidence(torch.tensor([0.8, 0.5]), torch.tensor([0.2, 0.9]))
    tensor([0., 1.])
    """
    return (seen > whole).to(seen).masked_fill(seen.isnan() | whole.isnan(), torch.nan)


def coherency(heatmaps: Tensor, again: Tensor) -> Tensor:
    """Return Pearson's correlation of two maps, moved to 0..1: [N,H,W] twice -> [N].

    NaN where a map is constant.

    >>> ramp = torch.tensor([[[0.0, 0.5, 1.0]]])
    >>> coherency(ramp, 0.5 * ramp), coherency(ramp, 1 - ramp)
    (tensor([1.], dtype=torch.float64), tensor([0.], dtype=torch.float64))
    """
    x, y = (maps.double().flatten(1) for maps in (heatmaps, again))
    constant = (x == x[:, :1]).all(1) | (y == y[:, :1]).all(1)
    x = x - x.mean(1, keepdim=True)
    y = y - y.mean(1, keepdim=True)
    correlation = (x * y).sum(1) / (x.square().sum(1) * y.square().sum(1)).sqrt()
    return ((correlation.clamp(-1, 1) + 1) / 2).masked_fill(constant, torch.nan)


def mean_value(heatmaps: Tensor, truth: Tensor | None = None) -> Tensor:
    """Return the mean of each map's values, which ADCC calls complexity: [N,H,W] -> [N].

    >>> mean_value(torch.tensor([[[1.0, 0.0], [0.5, 0.5]]]))
    tensor([0.5000], dtype=torch.float64)
    """
    return heatmaps.double().mean((1, 2))


def harmonic_mean(values: Tensor) -> Tensor:
    """Return the harmonic mean over the last axis, 0 where a value is 0: [N,K] -> [N].

    >>> harmonic_mean(torch.tensor([[1.0, 0.5, 0.5], [1.0, 1.0, 0.0]]))
    tensor([0.6000, 0.0000])
    """
    return values.shape[-1] / (1 / values).sum(-1)


def adcc(parts: Tensor) -> Tensor:
    """Return ADCC from Average Drop, coherency and mean value: [N,3] -> [N].

    >>> adcc(torch.tensor([[0.5, 1.0, 0.5]]))
    tensor([0.6000])
    """
    drop, similar, mean = parts.unbind(-1)
    return harmonic_mean(torch.stack([1 - drop, similar, 1 - mean], dim=-1))


def arcc(parts: Tensor) -> Tensor:
    """Return ARCC from the ROAD score, coherency and mean value: [N,3] -> [N].

    >>> arcc(torch.tensor([[0.25, 1.0, 0.5]]))
    tensor([0.6000])
    """
    road, similar, mean = parts.unbind(-1)
    return harmonic_mean(torch.stack([(2 * road).clamp(0, 1), similar, 1 - mean], dim=-1))


def _road_weights(_: Schedule) -> dict[Band, float]:
    """Half the mean, over shares, of the score with the first k less that with the last k."""
    half = 1 / 2 / len(ROAD_SHARES)
    kept = {top(share): half for share in ROAD_SHARES}
    return kept | {all_but_top(1 - share): -half for share in ROAD_SHARES}


def road_score(predictions: Predictions, schedule: Schedule) -> Tensor:
    """Return half the mean of p(first k pixels) - p(last k) over k of 20, 40, 60, 80 %: [N]."""
    return predictions.total(_road_weights(schedule), "confidence")


THROUGH_MAP: Mapping[str, AnyMetric] = {
    "average_drop": SeenMetric(higher_is_better=False, formula=average_drop),
    "increase_in_confidence": SeenMetric(higher_is_better=True, formula=increase_in_confidence),
    "coherency": RedrawnMetric(higher_is_better=True, measure=coherency),
    "mean_value": of_map(higher_is_better=False, measure=mean_value),
    "road_score": Metric(
        higher_is_better=True,
        asks=no_bands,
        formula=road_score,
        weights=_road_weights,
        fill=ROAD,
    ),
    "adcc": DerivedMetric(
        higher_is_better=True, of=("average_drop", "coherency", "mean_value"), formula=adcc
    ),
    "arcc": DerivedMetric(
        higher_is_better=True, of=("road_score", "coherency", "mean_value"), formula=arcc
    ),
}
