"""Recipes: the weights of the loss terms, the fills, the learning rate and the number of epochs."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from sufficit.errors import UserError, unknown
from sufficit.training.losses import temperature_for
from sufficit.training.random_fills import check_fills


@dataclass(frozen=True)
class LaxRecipe:
    """The loss is the sum of the terms, each times its weight; a weight of 0 drops a term."""

    keep: float = 1.0  # cross-entropy of the image inside the mask
    drop: float = 0.0  # -log(1 - p_y) of the image outside the mask
    donors: float = 0.0  # -log(1 - p_y) of another class's image inside the same mask
    power: float = 0.0  # q > 0 replaces -log p by (1 - p^q) / q in these three
    entropy: float = 0.0  # of softmax(M / temperature)
    temperature: float = 0.5
    size: float = 0.0  # mean mask, the l1 norm
    area: float | None = None  # wanted mean mask: `size` then weights the distance to it
    decide: float = 0.0  # 4 M (1 - M); the weight grows from 0 to this
    fills: tuple[str, ...] = ("black",)
    alpha_min: float = 0.5
    upsample: int = 1  # times the features' height and width
    bias: float = 0.0  # of the last layer, before training
    lr: float = 1e-3
    schedule: Literal["constant", "one-cycle"] = "one-cycle"
    epochs: int = 10

    def rate(self, done: float) -> float:
        """The learning rate after a share `done` of the training: linear rise, then half a cosine.

        torch's OneCycleLR joins no linear rise to a cosine, and needs the number of steps, which a
        loader without a length does not have.
        """
        if self.schedule == "constant":
            return self.lr
        if done < WARM_UP:
            return self.lr * (0.04 + 0.96 * done / WARM_UP)
        return self.lr * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


WARM_UP = 0.1  # share of the training
_PAPER = LaxRecipe(entropy=5, schedule="constant", epochs=500)

RECIPES: dict[str, LaxRecipe] = {
    "robust": LaxRecipe(
        drop=0.5,
        donors=1.0,
        power=0.5,
        size=2,
        decide=0.5,
        fills=("black", "colour", "noise", "blurred"),
        upsample=4,
    ),
    "paper": LaxRecipe(entropy=5),
    "paper-synthetic-mnist": _PAPER,
    "paper-cub200": replace(_PAPER, lr=1e-4),
    "paper-cifar10": replace(_PAPER, entropy=2, upsample=2),
    "paper-cifar10-vit": replace(_PAPER, entropy=2, epochs=350),
    "l1": LaxRecipe(size=5),
}


def recipe_of(
    recipe: str | LaxRecipe, epochs: int | None, area: float | None, alpha_min: float | None
) -> LaxRecipe:
    """A recipe, by name or as given, with the caller's epochs, area and alpha_min; checked."""
    if isinstance(recipe, str) and recipe not in RECIPES:
        raise unknown("recipe", recipe, RECIPES)
    chosen = RECIPES[recipe] if isinstance(recipe, str) else recipe
    if not isinstance(chosen, LaxRecipe):
        raise UserError(f"recipe must be a name or a LaxRecipe, got {type(recipe).__name__}")
    if epochs is not None:
        chosen = replace(chosen, epochs=epochs)
    if alpha_min is not None:
        chosen = replace(chosen, alpha_min=alpha_min)
    if area is not None:
        chosen = _with_area(chosen, area)
    _check(chosen)
    return chosen


def _with_area(recipe: LaxRecipe, area: float) -> LaxRecipe:
    """The entropy term gets the area through its temperature, the size term as a target."""
    if not 0 < area < 1:
        raise UserError(f"area must be between 0 and 1, got {area:g}: it is a mean heatmap value")
    if recipe.entropy:
        return replace(recipe, temperature=temperature_for(area))
    if not recipe.size:
        raise UserError("area needs a weight for `entropy` or `size`: use another recipe")
    return replace(recipe, area=area)


_WEIGHTS = ("keep", "drop", "donors", "power", "entropy", "size", "decide")
_SCHEDULES = ("constant", "one-cycle")


def _check(recipe: LaxRecipe) -> None:
    check_fills(recipe.fills)
    for name in _WEIGHTS:
        value = getattr(recipe, name)
        if not 0 <= value < math.inf:
            raise UserError(f"the recipe's {name} must be a number, 0 or more, got {value!r}")
    if recipe.schedule not in _SCHEDULES:
        raise unknown("schedule", recipe.schedule, _SCHEDULES)
    if recipe.area is not None and not 0 < recipe.area < 1:
        raise UserError(f"the recipe's area must be between 0 and 1, got {recipe.area!r}")
    if not isinstance(recipe.epochs, int) or recipe.epochs < 1:
        raise UserError(f"epochs must be a whole number, 1 or more, got {recipe.epochs!r}")
    if not 0 <= recipe.alpha_min < 1:
        raise UserError(f"alpha_min must be in 0..1, 1 excluded, got {recipe.alpha_min:g}")
    if recipe.temperature <= 0 or recipe.lr <= 0:
        given = f"{recipe.temperature:g}, {recipe.lr:g}"
        raise UserError(f"temperature and lr must be above 0, got {given}")
