"""Images of two digits side by side: does the map of a class lie on its own digit?"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sufficit.data.digits import chances, compose, draw_digits, salt_of, wholes
from sufficit.data.truth import BOX, OBJECT, with_boxes
from sufficit.metrics.localization import pointing

CHUNK = 2000  # images composed at a time
_PAIRS = 1 << 32  # added to the salt of pairs


@dataclass(frozen=True)
class DigitPairs:
    """Images with a digit in the left half and one in the right half."""

    images: Tensor  # [N,3,H,W] in 0..1; those made in bulk as bytes, uint8
    labels: Tensor  # [N,2] left, right
    masks: Tensor  # [N,2,H,W] 1 on each digit's own pixels


def digit_pairs(n: int, *, seed: int = 0, same: bool = False) -> DigitPairs:
    """Make n images by seed with two held-out digits of different classes side by side.

    With `same` it is the same digit twice, as with two copies of `synthetic_digits`.
    """
    second = None if same else others  # by a chance that two copies leave over
    images, labels, ink = draw_digits(n, seed, 2, held_out=True, second=second)
    return DigitPairs(images, labels, (ink > 0.5).float())


def compose_pairs(
    strokes: Tensor, labels: Tensor, n: int, key: tuple[int, str], *, same: bool = False
) -> DigitPairs:
    """Make n pairs by (seed, part) on the strokes' device; digit i, modulo them, is on the left.

    On the right is a digit of another class or, with `same`, the same digit.
    """
    images, masks, shown = [], [], []
    salt = salt_of(key) + _PAIRS
    for some in torch.arange(n, device=labels.device).split(CHUNK):
        left = some % len(labels)
        right = left if same else others(labels, left, chances(some, 1, salt)[:, 0])
        both = torch.stack([left, right], 1)
        made, ink = compose(strokes[both], some, salt)
        images.append((made * 255).round().to(torch.uint8))
        masks.append(ink > 0.5)
        shown.append(labels[both])
    return DigitPairs(torch.cat(images), torch.cat(shown), torch.cat(masks))


def others(labels: Tensor, chosen: Tensor, chance: Tensor) -> Tensor:
    """Choose, by chances in 0..1, digits of other classes than those chosen: [D], [N], [N] -> [N].

    >>> others(torch.tensor([4, 2, 4, 2]), torch.tensor([0, 0, 3]), torch.tensor([0.0, 0.9, 0.9]))
    tensor([1, 3, 2])
    """
    order = labels.argsort(stable=True)
    ordered, own = labels[order].contiguous(), labels[chosen].contiguous()
    first, end = (torch.searchsorted(ordered, own, right=right) for right in (False, True))
    assert not bool((end - first == len(labels)).any()), "pairs need digits of two classes"
    place = wholes(chance, 0, len(labels) - (end - first))
    return order[torch.where(place < first, place, place + end - first)]


def pointing_by_class(heatmaps: Tensor, masks: Tensor, *, box: bool = False) -> Tensor:
    """Return the pointing game of the map for each class and its own object: [N,C,H,W] -> [N,C].

    With `box` a peak anywhere in the object's box is a hit, as it is between the strokes of a 0.

    >>> maps = torch.tensor([[[[0.9, 0.1, 0.2]], [[0.8, 0.1, 0.2]]]])
    >>> pointing_by_class(maps, torch.tensor([[[[1, 0, 0]], [[0, 0, 1]]]]))
    tensor([[1., 0.]], dtype=torch.float64)
    """
    assert heatmaps.shape == masks.shape, "one map and one mask per class"
    truth = with_boxes(masks.flatten(0, 1) > 0)
    truth = truth.masked_fill(truth == BOX, OBJECT) if box else truth
    return pointing(heatmaps.flatten(0, 1), truth).view(masks.shape[:2])
