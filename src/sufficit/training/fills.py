"""What stands in for hidden pixels in training: drawn anew for each image and step."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from sufficit.errors import UserError, unknown
from sufficit.perturbation.fills import blur, mean


def _black(others: Tensor, generator: Generator) -> Tensor:
    return torch.zeros_like(others)


def _colour(others: Tensor, generator: Generator) -> Tensor:
    return mean(others).expand_as(others)


def _noise(others: Tensor, generator: Generator) -> Tensor:
    h, w = others.shape[2:]
    order = torch.randperm(h * w, generator=generator, device=others.device)
    return others.flatten(2)[:, :, order].view_as(others)


def _blurred(others: Tensor, generator: Generator) -> Tensor:
    return blur(others)


def _other(others: Tensor, generator: Generator) -> Tensor:
    return others


TRAINING_FILLS: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "black": _black,
    "colour": _colour,
    "noise": _noise,
    "blurred": _blurred,
    "other": _other,
}
"""Black, and what another image of the batch lends: its mean colour, its pixels in random order,
its blurred self, itself. So a fill is never stranger to the classifier than it must be."""


def random_fills(images: Tensor, kinds: tuple[str, ...], generator: Generator) -> Tensor:
    """One fill an image, each kind for an equal share of them, which is random: like images."""
    if len(images) == 1:  # nobody can lend it anything
        return torch.zeros_like(images)
    others = images.roll(1, 0)
    order = torch.randperm(len(images), generator=generator, device=images.device)
    found = torch.empty_like(images)
    for kind, part in zip(kinds, order.tensor_split(len(kinds)), strict=True):
        if len(part):
            found[part] = TRAINING_FILLS[kind](others[part], generator).to(found)
    return found


def check_fills(kinds: tuple[str, ...]) -> None:
    """Raise unless every kind is known."""
    if not kinds:
        raise UserError(f"give at least one fill of {', '.join(TRAINING_FILLS)}")
    for kind in kinds:
        if kind not in TRAINING_FILLS:
            raise unknown("fill", kind, TRAINING_FILLS)
