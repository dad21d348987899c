"""Recipes: the weights of the loss terms, the fills, the learning rate and the number of epochs.

The terms themselves are in `order_step` for the default, `robust`, and in `losses` for the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from sufficit.errors import UserError, unknown
from sufficit.explainers.order_net import BLOCKS, CELLS, WIDTH, resized
from sufficit.perturbation.fills import blur, mean
from sufficit.training.losses import temperature_for

WARM_UP = 0.1  # share of the training
USUAL_EPOCHS = 10  # of a loader that does not say how many batches it has


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


@dataclass(frozen=True)
class OrderRecipe:
    """Train an order of the pixels, each of whose level sets is to suffice at its size.

    Every step cuts each image's order at a random size. The region alone must give the class, and
    the rest must not: (1 - p^power) / power of the region, plus `rest` times p of what is left.
    """

    steps: int = 400  # of the training, unless epochs are given
    epochs: int | None = None
    sizes: tuple[float, float] = (0.03, 0.85)  # of the regions, log-uniform
    softness: tuple[float, float] = (0.5, 0.1)  # of their edges, from the first step to the last
    power: float = 0.5
    rest: float = 0.5
    fills: tuple[tuple[str, float], ...] = (
        ("black", 0.3),
        ("colour", 0.2),
        ("smooth noise", 0.15),
        ("others", 0.35),
    )  # and the share of the images that get each
    crops: float = 0.6  # share of the images that are cropped, to 0.6 to 1 of their side
    flips: float = 0.5  # share that is mirrored, where the classifier does not mind
    cells: int = CELLS  # along the order, at most
    width: int = WIDTH  # channels of the net
    block: str = "separable"  # or full, its convolutions
    size: float | None = None  # share of the image that the map marks; None: calibrated
    alpha_min: float = 0.5
    lr: float = 1e-3
    warm_up: float = 0.05  # share of the training
    weight_decay: float = 0.02
    clip: float = 1.0  # norm of the gradients, at most

    def rate(self, done: float) -> float:
        """The learning rate after a share `done` of the training: linear rise times a cosine."""
        rise = min(1.0, (done + 1e-3) / self.warm_up)
        return self.lr * rise * 0.5 * (1 + math.cos(math.pi * done))

    def softness_after(self, done: float) -> float:
        """The softness of edges after a share `done` of the training; it falls geometrically."""
        first, last = self.softness
        return float(first * (last / first) ** done)


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

RECIPES: dict[str, LaxRecipe | OrderRecipe] = {
    "robust": OrderRecipe(),
    "crisp": LaxRecipe(
        drop=1,
        donors=1.4,
        power=0.5,
        size=2.5,
        decide=2,
        absent=1,
        mosaics=0.25,
        fills=("black", "colour", "noise", "blurred"),
        stages=3,
        contrast=4,
    ),
    "paper": LaxRecipe(entropy=5),
    "l1": LaxRecipe(size=5),
}


def recipe_of(
    recipe: str | LaxRecipe | OrderRecipe,
    epochs: int | None = None,
    area: float | None = None,
    alpha_min: float | None = None,
    class_free: bool = False,
) -> LaxRecipe | OrderRecipe:
    """A recipe, by name or as given, with what the caller wants of it; checked.

    The area is the size at which an order is cut. The entropy term gets it through its temperature,
    the size term as a target.
    """
    if isinstance(recipe, str) and recipe not in RECIPES:
        raise unknown("recipe", recipe, RECIPES)
    chosen = RECIPES[recipe] if isinstance(recipe, str) else recipe
    if not isinstance(chosen, LaxRecipe | OrderRecipe):
        came = type(recipe).__name__
        raise UserError(f"recipe must be a name, a LaxRecipe or an OrderRecipe, got {came}")
    changes: dict[str, Any] = {"epochs": epochs, "alpha_min": alpha_min}
    if isinstance(chosen, OrderRecipe):
        if class_free:
            raise UserError(
                "the recipe robust draws for a class, by the classifier's own head: leave out"
                " class_free, or use the recipe crisp"
            )
        changes |= {"size": area}
    else:
        changes |= {"absent": 0.0} if class_free else {}
        if area is not None:
            if not (chosen.entropy or chosen.size):
                raise UserError("area needs a weight for `entropy` or `size`: use another recipe")
            changes |= {"temperature": temperature_for(area)} if chosen.entropy else {"area": area}
    chosen = replace(chosen, **{k: value for k, value in changes.items() if value is not None})
    if isinstance(chosen, OrderRecipe):
        _check_order(chosen)
    else:
        _check(chosen)
    return chosen


def _check_order(recipe: OrderRecipe) -> None:
    if (size := recipe.size) is not None and not 0 < size < 1:
        raise UserError(f"area must be between 0 and 1, got {size:g}: it is a share of the image")
    least, most = recipe.sizes
    if not 0 < least <= most < 1:
        raise UserError(f"the recipe's sizes must rise in 0..1, got {recipe.sizes}")
    for name, low, high in (
        *(("steps", 1, 10**9), ("cells", 2, 256), ("width", 1, 2**12)),
        *([] if recipe.epochs is None else [("epochs", 1, 10**9)]),
    ):
        value = getattr(recipe, name)
        if type(value) is not int or not low <= value <= high:
            raise UserError(f"{name} must be a whole number in {low}..{high}, got {value!r}")
    if recipe.block not in BLOCKS:
        raise unknown("block", recipe.block, BLOCKS)
    if not 0 <= recipe.alpha_min < 1:
        raise UserError(f"alpha_min must be in 0..1, 1 excluded, got {recipe.alpha_min:g}")
    above = {name: getattr(recipe, name) for name in ("lr", "power", "clip", "warm_up")}
    above |= {f"share of the fill {kind}": share for kind, share in recipe.fills}
    for name, value in above.items():
        if not 0 < value < math.inf:
            raise UserError(f"the recipe's {name} must be a finite number above 0, got {value:g}")
    several = ("rest", "weight_decay", "crops", "flips")
    wrong = [name for name in several if not 0 <= getattr(recipe, name) < math.inf]
    if wrong:
        raise UserError(f"the recipe's {wrong[0]} must be a number, 0 or more")
    if not recipe.fills:
        raise UserError(f"a recipe needs at least one fill: give {', '.join(ORDER_FILLS)}")
    for kind, _ in recipe.fills:
        if kind not in ORDER_FILLS:
            raise unknown("fill", kind, ORDER_FILLS)


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


def _flat(images: Tensor, generator: Generator) -> Tensor:
    shape = (*images.shape[:2], 1, 1)
    return torch.rand(shape, generator=generator, device=images.device)


def _smooth_noise(images: Tensor, generator: Generator) -> Tensor:
    h, w = images.shape[2:]
    shape = (*images.shape[:2], max(2, h // 8), max(2, w // 8))
    return torch.rand(shape, generator=generator, device=images.device)


def _others(images: Tensor, generator: Generator) -> Tensor:
    """The coarse colours of another image: 12 cells along 224 pixels."""
    order = torch.randperm(len(images), generator=generator, device=images.device)
    rows, columns = (max(2, round(12 * side / 224)) for side in images.shape[2:])
    return F.adaptive_avg_pool2d(images, (rows, columns))[order]


ORDER_FILLS: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "black": lambda images, _: images.new_zeros(*images.shape[:2], 1, 1),
    "colour": _flat,
    "smooth noise": _smooth_noise,
    "others": _others,
}
"""Black, a random colour, noise of 28 cells along 224 pixels, another image's coarse colours: each
as few cells, which are enlarged to the image."""


def mixed_fills(
    images: Tensor, shares: tuple[tuple[str, float], ...], generator: Generator
) -> Tensor:
    """One random fill per image, of each kind with its share: like images."""
    total = sum(share for _, share in shares)
    drawn = torch.rand(len(images), generator=generator, device=images.device) * total
    found = torch.zeros_like(images)
    end = 0.0
    for number, (kind, share) in enumerate(shares):
        start, end = end, end + share
        last = number == len(shares) - 1
        chosen = (drawn >= start) if last else (drawn >= start) & (drawn < end)
        cells = ORDER_FILLS[kind](images, generator) * chosen.view(-1, 1, 1, 1)
        # Fills that an image does not get are zeros there, so that a sum chooses.
        found += cells if cells.shape[2:] == (1, 1) else resized(cells, images.shape[2:])
    return found


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
