"""Finer-CAM's score: how far the target's logit is from those of the classes nearest to it."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from sufficit.errors import UserError, unknown

Score = Callable[[Tensor, Tensor], Tensor]
"""What a method differentiates: (logits [N,C], targets [N]) -> [N]."""


def target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """The logit of each image's target: [N,C], [N] -> [N]."""
    return logits.gather(1, targets[:, None])[:, 0]


def contrast_score(reading: str, strength: float | None, nearest: int) -> Score:
    """The score of a reading of Finer-CAM, with the reading's own strength if that is None."""
    readings = {"weighted": (weighted_contrast, 1.0), "mean": (mean_contrast, 0.6)}
    if reading not in readings:
        raise unknown("reading of Finer-CAM", reading, readings)
    if nearest < 1:
        raise UserError(f"nearest must be 1 or more classes, got {nearest}")
    contrast, usual = readings[reading]
    return partial(contrast, strength=usual if strength is None else strength, nearest=nearest)


def weighted_contrast(
    logits: Tensor, targets: Tensor, strength: float = 1.0, nearest: int = 3
) -> Tensor:
    """Mean of y - strength * y_j, weighted by the softmax of class j: [N,C], [N] -> [N]."""
    others = nearest_classes(logits, targets, nearest)
    weights = logits.softmax(1).gather(1, others)
    gaps = target_logits(logits, targets)[:, None] - strength * logits.gather(1, others)
    return (weights * gaps).sum(1) / (weights.sum(1) + 1e-9)  # grad-cam's epsilon


def mean_contrast(
    logits: Tensor, targets: Tensor, strength: float = 0.6, nearest: int = 3
) -> Tensor:
    """The target's logit minus strength times the mean of y_j: [N,C], [N] -> [N].

    >>> import torch
    >>> mean_contrast(torch.tensor([[5.0, 1.0, 2.0, 3.0, -9.0]]), torch.tensor([0]))  # 5 - 0.6 * 2
    tensor([3.8000])
    """
    others = logits.gather(1, nearest_classes(logits, targets, nearest))
    return target_logits(logits, targets) - strength * others.mean(1)


def nearest_classes(logits: Tensor, targets: Tensor, count: int = 3) -> Tensor:
    """The other classes, by the distance of their logit to the target's: [N,C], [N] -> [N,count].

    >>> import torch
    >>> nearest_classes(torch.tensor([[5.0, 1.0, 2.0, 6.0]]), torch.tensor([0]), 2)
    tensor([[3, 2]])
    """
    distances = (logits.detach() - target_logits(logits.detach(), targets)[:, None]).abs()
    distances = distances.scatter(1, targets[:, None], -1)  # the target comes first, also in a tie
    return distances.sort(dim=1, stable=True).indices[:, 1 : count + 1]
