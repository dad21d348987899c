"""The terms of the loss of a `LaxRecipe`; each is a pure function of masks or logits.

The default recipe, `robust`, has none of them: its loss is `order_loss` in `order_step`.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.errors import UserError

_NEVER = 1e-4  # a probability that counts as none


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


@torch.no_grad()
def excess(logits: Tensor, targets: Tensor, shown: Tensor) -> Tensor:
    """How hard to push masks off their class: 1 at chance, up to 2 above it, to -1 below: scalar.

    `logits` [N,C] are of images of the classes `shown` [N] under masks for the `targets` [N]. The
    leakage ratio r is the mean probability of a mask's class over that of the same class under
    masks for others; where the mask's or the other mask's class is shown, nothing counts. The
    result is 2 r^4 / (1 + r^4), and below chance (3 r^4 - 1) / (1 + r^4), which is 0 at r = 0.76.
    So a term with this weight comes to rest near chance: a mask that its class never comes from
    tells as much as one that it always does.

    >>> every = torch.eye(2)[[0, 0, 1, 1]].repeat(2, 1)  # what the model says: what is shown
    >>> excess(50 * every, torch.tensor([0, 1] * 4), torch.tensor([0, 0, 1, 1] * 2))
    tensor(1.)
    """
    known = logits.softmax(1)
    own = known.gather(1, targets[:, None])[:, 0]
    apart = targets != shown
    # [N,N]: the class of mask i in view k, which shows another class under a mask for another.
    other = (targets[:, None] != targets) & (targets[:, None] != shown)
    said = known[:, targets].T
    chance = (said * other).sum(1) / other.sum(1).clamp(min=1)
    counted = apart & other.any(1)
    means = [(values * counted).sum() / counted.sum().clamp(min=1) for values in (own, chance)]
    fourth = ((means[0] + _NEVER) / (means[1] + _NEVER)) ** 4
    return torch.where(fourth < 1, 3 * fourth - 1, 2 * fourth) / (1 + fourth)


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


def apart(maps: Tensor, wanted: Tensor, counted: Tensor) -> Tensor:
    """Mean cross-entropy of maps and the wanted ones over the cells that are counted.

    [N,A,h,w], [N,A,h,w], [N,1,h,w] -> scalar.

    >>> half, one = torch.full((1, 1, 1, 2), 0.5), torch.ones(1, 1, 1, 2)
    >>> apart(half, one, one)  # log 2
    tensor(0.6931)
    """
    logs, rest = (part.clamp(min=_NEVER).log() for part in (maps, 1 - maps))
    values = -torch.lerp(rest, logs, wanted) * counted
    return values.sum() / counted.expand_as(values).sum().clamp(min=1)
