"""What stands in for hidden pixels in training: drawn anew for each image and step."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from sufficit.errors import UserError, unknown
from sufficit.fills import blur


def _black(images: Tensor, others: Tensor, generator: Generator) -> Tensor:
    return torch.zeros_like(images)


def _colour(images: Tensor, others: Tensor, generator: Generator) -> Tensor:
    n, c = images.shape[:2]
    drawn = torch.rand(n, c, 1, 1, generator=generator, device=images.device)
    return drawn.expand_as(images)


def _noise(images: Tensor, others: Tensor, generator: Generator) -> Tensor:
    return torch.rand(images.shape, generator=generator, device=images.device)


def _other(images: Tensor, others: Tensor, generator: Generator) -> Tensor:
    return others


def _blurred(images: Tensor, others: Tensor, generator: Generator) -> Tensor:
    return blur(others)


TRAINING_FILLS: dict[str, Callable[[Tensor, Tensor, Generator], Tensor]] = {
    "black": _black,
    "colour": _colour,
    "noise": _noise,
    "other": _other,
    "blurred": _blurred,
}


def random_fills(images: Tensor, kinds: tuple[str, ...], generator: Generator) -> Tensor:
    """One fill an image, each kind for an equal share of them, which is random: like images."""
    if len(kinds) == 1 and kinds[0] != "other":
        return TRAINING_FILLS[kinds[0]](images, images.roll(1, 0), generator)
    n = len(images)
    order = torch.randperm(n, generator=generator, device=images.device)
    others = images.roll(1, 0)
    found = torch.empty_like(images)
    for kind, part in zip(kinds, order.tensor_split(len(kinds)), strict=True):
        if len(part):
            found[part] = TRAINING_FILLS[kind](images[part], others[part], generator).to(found)
    return found


def check_fills(kinds: tuple[str, ...]) -> None:
    """Raise unless every kind is known."""
    if not kinds:
        raise UserError(f"give at least one fill of {', '.join(TRAINING_FILLS)}")
    for kind in kinds:
        if kind not in TRAINING_FILLS:
            raise unknown("fill", kind, TRAINING_FILLS)
