"""Recipes: the weights of the loss terms, the fills, the learning rate and the number of epochs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from sufficit.errors import UserError, unknown
from sufficit.perturbation.fills import blur, mean
from sufficit.training.losses import temperature_for

WARM_UP = 0.1  # share of the training


@dataclass(frozen=True)
class LaxRecipe:
    """The loss is the sum of the terms, each times its weight; a weight of 0 drops a term."""

    keep: float = 1.0  # cross-entropy of the image inside the mask
    drop: float = 0.0  # -log(1 - p_y) of the image outside the mask; the weight doubles to this
    donors: float = 0.0  # -log(1 - p_y) of another class's image inside the same mask; its weight
    # changes its sign where masks tell their class far less often than chance: losses.excess
    absent: float = 0.0  # mean mask for a class that is not there; 0: the adapter takes no class
    mosaics: float = 0.0  # cross-entropy of maps of mosaics and those of their tiles, per class
    power: float = 0.0  # q > 0 replaces -log p by (1 - p^q) / q in these three
    entropy: float = 0.0  # of softmax(M / temperature)
    temperature: float = 0.5
    size: float = 0.0  # mean mask, the l1 norm
    area: float | None = None  # wanted mean mask: `size` then weights the distance to it
    decide: float = 0.0  # 4 M (1 - M); the weight grows from 0 to this
    fills: tuple[str, ...] = ("black",)
    alpha_min: float = 0.5
    stages: int = 1  # layers that the adapter reads; 1: the paper's convnet
    upsample: int = 1  # times the features' height and width, of the paper's convnet
    bias: float = 0.0  # of the last layer, before training
    contrast: float = 1.0  # factor of the logits after training, around that of alpha_min
    lr: float = 1e-3
    schedule: Literal["constant", "one-cycle"] = "one-cycle"
    epochs: int = 10

    def rate(self, done: float) -> float:
        """The learning rate after a share `done` of the training."""
        return self.lr * (1 if self.schedule == "constant" else one_cycle(done))


def one_cycle(done: float) -> float:
    """The share of the learning rate after a share `done`: linear rise, then half a cosine.

    torch's OneCycleLR joins no linear rise to a cosine, and needs the number of steps, which a
    loader without a length does not have.
    """
    if done < WARM_UP:
        return 0.04 + 0.96 * done / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


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

_FILLS = ("black", "colour", "noise", "blurred")
_ROBUST = LaxRecipe(
    drop=1,
    donors=2.0,
    power=0.5,
    size=2,
    decide=0.5,
    absent=1,
    mosaics=0.25,
    fills=_FILLS,
    stages=3,
)
RECIPES: dict[str, LaxRecipe] = {
    "robust": _ROBUST,
    "crisp": replace(_ROBUST, donors=1.4, size=2.5, decide=2, contrast=4),
    "paper": LaxRecipe(entropy=5),
    "l1": LaxRecipe(size=5),
}


def recipe_of(
    recipe: str | LaxRecipe,
    epochs: int | None = None,
    area: float | None = None,
    alpha_min: float | None = None,
    class_free: bool = False,
) -> LaxRecipe:
    """A recipe, by name or as given, with what the caller wants of it; checked.

    The entropy term gets the area through its temperature, the size term as a target.
    """
    if isinstance(recipe, str) and recipe not in RECIPES:
        raise unknown("recipe", recipe, RECIPES)
    chosen = RECIPES[recipe] if isinstance(recipe, str) else recipe
    if not isinstance(chosen, LaxRecipe):
        raise UserError(f"recipe must be a name or a LaxRecipe, got {type(recipe).__name__}")
    changes: dict[str, Any] = {"epochs": epochs, "alpha_min": alpha_min}
    changes |= {"absent": 0.0} if class_free else {}
    if area is not None:
        if not (chosen.entropy or chosen.size):
            raise UserError("area needs a weight for `entropy` or `size`: use another recipe")
        changes |= {"temperature": temperature_for(area)} if chosen.entropy else {"area": area}
    chosen = replace(chosen, **{k: value for k, value in changes.items() if value is not None})
    _check(chosen)
    return chosen


def _check(recipe: LaxRecipe) -> None:
    if not recipe.fills:
        raise UserError(f"a recipe needs at least one fill: give {', '.join(TRAINING_FILLS)}")
    for kind in recipe.fills:
        if kind not in TRAINING_FILLS:
            raise unknown("fill", kind, TRAINING_FILLS)
    terms = ("keep", "drop", "donors", "absent", "mosaics", "entropy", "size", "decide")
    for name in (*terms, "power"):
        value = getattr(recipe, name)
        if not 0 <= value < math.inf:
            raise UserError(f"the recipe's {name} must be a number, 0 or more, got {value!r}")
    if recipe.schedule not in ("constant", "one-cycle"):
        raise unknown("schedule", recipe.schedule, ("constant", "one-cycle"))
    _check_numbers(recipe)


def _check_numbers(recipe: LaxRecipe) -> None:
    if (area := recipe.area) is not None and not 0 < area < 1:
        raise UserError(f"area must be between 0 and 1, got {area:g}: it is a mean heatmap value")
    for name in ("epochs", "stages"):
        if type(value := getattr(recipe, name)) is not int or value < 1:
            raise UserError(f"{name} must be a whole number, 1 or more, got {value!r}")
    if recipe.stages == 1 and (recipe.absent or recipe.contrast != 1):
        raise UserError(
            "a class as input (absent) and contrast need an adapter of several stages: set stages"
            " to 3, or use the recipe robust or crisp"
        )
    if not 0 <= recipe.alpha_min < 1:
        raise UserError(f"alpha_min must be in 0..1, 1 excluded, got {recipe.alpha_min:g}")
    for name in ("temperature", "lr", "contrast"):
        if not 0 < (value := getattr(recipe, name)) < math.inf:
            raise UserError(f"the recipe's {name} must be a finite number above 0, got {value:g}")


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
