"""One step of training an adapter: features -> mask -> masked images -> loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from sufficit.classifier.classifier import Classifier
from sufficit.explainers import losses
from sufficit.explainers.recipes import LaxRecipe, random_fills


class Batch(NamedTuple):
    """Images in 0..1, the classes to explain, and the features the adapter reads."""

    images: Tensor  # [N,C,H,W]
    targets: Tensor  # [N]
    features: Tensor  # [N,K,h,w]

    def to(self, device: torch.device | str) -> "Batch":
        """The same on another device."""
        return Batch(*(part.to(device, non_blocking=True) for part in self))


@dataclass(frozen=True)
class Step:
    """The loss of a batch, and the numbers to report."""

    loss: Tensor
    terms: dict[str, Tensor]  # by the name of their weight in the recipe
    accuracy: Tensor  # on the images inside the masks
    area: Tensor  # mean mask
    share: Tensor  # of the pixels above alpha_min


def take_step(
    classifier: Classifier,
    lax: Callable[[Tensor], Tensor],
    batch: Batch,
    recipe: LaxRecipe,
    generator: Generator,
    done: float = 1.0,
) -> Step:
    """The loss of a batch by a recipe; the classifier must be frozen and in eval mode.

    `done` is the finished share of the training: the push of masks to 0 and 1 grows with it.
    """
    images, targets, power = batch.images, batch.targets, recipe.power
    cells = lax(batch.features)
    masks = upsampled(cells, images)
    inside = masks[:, None]

    def mixed(shown: Tensor, weights: Tensor) -> Tensor:
        if recipe.fills == ("black",):
            return shown * weights
        return torch.lerp(random_fills(shown, recipe.fills, generator), shown, weights)

    views = {"keep": mixed(images, inside)}
    if recipe.drop:
        views["drop"] = mixed(images, 1 - inside)
    if recipe.donors:
        views["donors"] = mixed(images.roll(1, 0), inside)
    every = classifier.logits_of(classifier.normalize(torch.cat(list(views.values())))).float()
    logits = dict(zip(views, every.split(len(images)), strict=True))
    terms = {"keep": losses.kept(logits["keep"], targets, power)}
    if recipe.drop:
        terms["drop"] = losses.unlike(logits["drop"], targets, power=power)
    if recipe.donors:
        other_class = targets != targets.roll(1, 0)
        terms["donors"] = losses.unlike(logits["donors"], targets, other_class, power)
    if recipe.entropy:
        terms["entropy"] = losses.entropy(cells, recipe.temperature)
    if recipe.size:
        terms["size"] = losses.size(cells, recipe.area)
    if recipe.decide:
        terms["decide"] = losses.undecided(cells)
    weights = {name: getattr(recipe, name) for name in terms} | {"decide": recipe.decide * done}
    loss = torch.as_tensor(sum(weights[name] * value for name, value in terms.items()))
    with torch.no_grad():
        right = (logits["keep"].argmax(1) == targets).float().mean()
        share = (masks > recipe.alpha_min).float().mean()
    return Step(loss, terms, right, masks.detach().mean(), share)


def upsampled(cells: Tensor, images: Tensor) -> Tensor:
    """Maps at the images' size, bilinear, corners not aligned: [N,h,w] -> [N,H,W]."""
    h, w = images.shape[2:]
    return F.interpolate(cells[:, None], size=(h, w), mode="bilinear", align_corners=False)[:, 0]
