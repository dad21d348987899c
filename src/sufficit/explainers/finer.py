"""Finer-CAM: Grad-CAM of what sets the target apart from the classes nearest to it."""

from functools import partial
from typing import Literal

from torch import Tensor

from sufficit.errors import UserError, unknown
from sufficit.explainers.cams import gradcam
from sufficit.explainers.entry import Explainer, target_logits

Reading = Literal["weighted", "mean"]
STRENGTHS: dict[str, float] = {"weighted": 1.0, "mean": 0.6}


def finer_cam(
    reading: Reading = "weighted", strength: float | None = None, nearest: int = 3
) -> Explainer:
    """Finer-CAM as the grad-cam package computes it, or ("mean") as its paper writes it.

    Both compare the target's logit y with the logits y_j nearest to it, three or as many as there
    are. "weighted": the mean of y - 1.0 * y_j, weighed by the softmax of class j, which is
    differentiated too. "mean": y - 0.6 * the plain mean of y_j. `strength` stands for the 1.0 or
    0.6. Use it as `explain(classifier, images, method=finer_cam("mean"))`.
    """
    if reading not in STRENGTHS:
        raise unknown("reading of Finer-CAM", reading, STRENGTHS)
    if nearest < 1:
        raise UserError(f"nearest must be 1 or more classes, got {nearest}")
    alpha = STRENGTHS[reading] if strength is None else strength
    contrast = weighted_contrast if reading == "weighted" else mean_contrast
    score = partial(contrast, strength=alpha, nearest=nearest)
    line = f"Grad-CAM of the target's logit against those of the {nearest} nearest classes"
    return Explainer(line, "gradients", gradcam, score)


def weighted_contrast(
    logits: Tensor, targets: Tensor, strength: float = 1.0, nearest: int = 3
) -> Tensor:
    """Mean of y - strength * y_j, weighed by the softmax of class j: [N,C], [N] -> [N]."""
    others = nearest_classes(logits, targets, nearest)
    weights = logits.softmax(1).gather(1, others)
    gaps = target_logits(logits, targets)[:, None] - strength * logits.gather(1, others)
    return (weights * gaps).sum(1) / (weights.sum(1) + 1e-9)  # grad-cam's epsilon


def mean_contrast(
    logits: Tensor, targets: Tensor, strength: float = 0.6, nearest: int = 3
) -> Tensor:
    """The target's logit less strength times the mean of y_j: [N,C], [N] -> [N].

    >>> import torch
    >>> mean_contrast(torch.tensor([[5.0, 1.0, 2.0, 3.0, -9.0]]), torch.tensor([0]))  # 5 - 0.6 * 2
    tensor([3.8000])
    """
    others = logits.gather(1, nearest_classes(logits, targets, nearest))
    return target_logits(logits, targets) - strength * others.mean(1)


def nearest_classes(logits: Tensor, targets: Tensor, count: int = 3) -> Tensor:
    """The other classes by distance of their logit to the target's: [N,C], [N] -> [N,count].

    >>> import torch
    >>> nearest_classes(torch.tensor([[5.0, 1.0, 2.0, 6.0]]), torch.tensor([0]), 2)
    tensor([[3, 2]])
    """
    distances = (logits.detach() - target_logits(logits.detach(), targets)[:, None]).abs()
    distances = distances.scatter(1, targets[:, None], -1)  # the target itself, first also in a tie
    return distances.sort(dim=1, stable=True).indices[:, 1 : count + 1]
