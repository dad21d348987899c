"""The terms of the loss of an adapter; each is a pure function of masks or logits."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.errors import UserError


def entropy(masks: Tensor, temperature: float) -> Tensor:
    """Entropy of softmax(M / t) over the cells, mean over images: [N,h,w] -> scalar.

    >>> entropy(torch.ones(1, 2, 2), 0.5)  # log 4
    tensor(1.3863)
    """
    logs = (masks.flatten(1).clamp(min=0) / temperature).log_softmax(1)
    return -(logs.exp() * logs).sum(1).mean()


def preferred_area(temperature: float) -> float:
    """The share of ones at which the entropy of a binary mask is lowest.

    With A = e^s, s = 1/t it is (A s / (A - 1) - 1) / (A - 1), written so that it does not overflow.
    Near s = 0 that loses its digits, and the series 1/2 - s/6 replaces it.

    >>> [round(preferred_area(t), 4) for t in (0.25, 0.3, 0.4, 0.5, 0.8)]
    [0.0574, 0.0909, 0.1541, 0.2055, 0.3019]
    """
    sharpness = 1 / temperature
    if sharpness < 1e-3:
        return 0.5 - sharpness / 6
    small = math.exp(-sharpness)
    return (sharpness / (1 - small) - 1) * small / (1 - small)


def temperature_for(area: float) -> float:
    """The temperature whose preferred area is `area`, by bisection.

    >>> round(temperature_for(0.2055), 3)
    0.5
    """
    if not 0 < area < 0.5:
        raise UserError(
            f"with the entropy term, area must be between 0 and 0.5, got {area:g}: use the recipe"
            " robust for a larger one"
        )
    low, high = 1e-3, 1e4
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if preferred_area(middle) < area else (low, middle)
    return math.sqrt(low * high)


def kept(logits: Tensor, targets: Tensor, power: float = 0.0) -> Tensor:
    """(1 - p_y^q) / q, cross-entropy at q = 0, mean over images: [N,C], [N] -> scalar.

    At q > 0 it is bounded, so images that no mask can save do not outweigh the others (Zhang and
    Sabuncu 2018, generalised cross-entropy).

    >>> kept(torch.zeros(1, 4), torch.tensor([0])), kept(torch.zeros(1, 4), torch.tensor([0]), 0.5)
    (tensor(1.3863), tensor(1.))
    """
    logs = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
    return _bounded(logs, power).mean()


def unlike(
    logits: Tensor, targets: Tensor, counted: Tensor | None = None, power: float = 0.0
) -> Tensor:
    """The same for 1 - p_y, mean over the images that are counted: [N,C], [N] -> scalar.

    >>> unlike(torch.zeros(1, 4), torch.tensor([0]))  # -log 3/4
    tensor(0.2877)
    """
    own = F.one_hot(targets, logits.shape[1]).bool()
    logs = logits.masked_fill(own, -torch.inf).logsumexp(1) - logits.logsumexp(1)
    values = _bounded(logs, power)
    if counted is None:
        return values.mean()
    return (values * counted).sum() / counted.sum().clamp(min=1)


def _bounded(logs: Tensor, power: float) -> Tensor:
    """(1 - p^q) / q for log p; -log p at q = 0."""
    return -(power * logs).expm1() / power if power else -logs


def size(masks: Tensor, area: float | None = None) -> Tensor:
    """The mean mask; with a wanted area its distance, log(mean / area)^2: [N,h,w] -> scalar.

    The mean is over all images, so single images may differ.

    >>> size(torch.tensor([[[0.1, 0.2]]])), size(torch.tensor([[[0.1, 0.2]]]), area=0.1)
    (tensor(0.1500), tensor(0.1644))
    """
    mean = masks.mean()
    return mean if area is None else (mean.clamp(min=1e-6) / area).log().square()


def undecided(masks: Tensor) -> Tensor:
    """Mean of 4 M (1 - M): 0 for a mask of zeros and ones, 1 for one of halves.

    >>> undecided(torch.tensor([[[0.5, 1.0]]]))
    tensor(0.5000)
    """
    return 4 * (masks * (1 - masks)).mean()
