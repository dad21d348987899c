"""What replaces hidden pixels in training: a random fill per image and step."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from sufficit.perturbation.fills import blur, mean


def _noise(others: Tensor, generator: Generator) -> Tensor:
    h, w = others.shape[2:]
    order = torch.randperm(h * w, generator=generator, device=others.device)
    return others.flatten(2)[:, :, order].view_as(others)


TRAINING_FILLS: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "black": lambda others, _: torch.zeros_like(others),
    "colour": lambda others, _: mean(others).expand_as(others),
    "noise": _noise,
    "blurred": lambda others, _: blur(others),
    "other": lambda others, _: others,
}
"""Black, or made from another image of the batch: its mean colour, its pixels in random order, the
blurred image, the image itself. These stay close to what the classifier knows."""


def random_fills(images: Tensor, kinds: tuple[str, ...], generator: Generator) -> Tensor:
    """One fill per image, each kind for an equal random share of them: like images."""
    if len(images) == 1:  # there is no other image
        return torch.zeros_like(images)
    others = images.roll(1, 0)
    order = torch.randperm(len(images), generator=generator, device=images.device)
    found = torch.empty_like(images)
    for kind, part in zip(kinds, order.tensor_split(len(kinds)), strict=True):
        if len(part):
            found[part] = TRAINING_FILLS[kind](others[part], generator).to(found)
    return found
