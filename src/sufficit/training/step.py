"""One step of training an adapter: features -> mask -> masked images -> loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from sufficit.classifier.classifier import Classifier
from sufficit.training import losses
from sufficit.training.random_fills import random_fills
from sufficit.training.recipes import LaxRecipe


@dataclass(frozen=True)
class Batch:
    """Images in 0..1, the classes to explain, and the features the adapter reads."""

    images: Tensor  # [N,C,H,W]
    targets: Tensor  # [N]
    features: Tensor  # [N,K,h,w]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Images, targets, features."""
        return self.images, self.targets, self.features

    def to(self, device: torch.device | str) -> "Batch":
        """The same on another device."""
        return Batch(*(part.to(device, non_blocking=True) for part in self.tensors))


@dataclass(frozen=True)
class Step:
    """The loss of a batch, and the numbers to report."""

    loss: Tensor
    terms: dict[str, Tensor]
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
    cells = lax(batch.features)
    masks = upsampled(cells, batch.images)
    views = _views(batch, masks, recipe, generator)
    logits = classifier.logits_of(classifier.normalize(torch.cat(list(views.values())))).float()
    logits_of_view = dict(zip(views, logits.split(len(batch.images)), strict=True))
    terms = _terms(logits_of_view, batch, cells, recipe)
    weights = {name: getattr(recipe, name) for name in terms}
    weights["decide"] = recipe.decide * done
    total = sum(weights[name] * value for name, value in terms.items())
    with torch.no_grad():
        right = (logits_of_view["keep"].argmax(1) == batch.targets).float().mean()
        share = (masks > recipe.alpha_min).float().mean()
    return Step(torch.as_tensor(total), terms, right, masks.detach().mean(), share)


def upsampled(cells: Tensor, images: Tensor) -> Tensor:
    """Maps at the images' size, bilinear, corners not aligned: [N,h,w] -> [N,H,W]."""
    h, w = images.shape[2:]
    return F.interpolate(cells[:, None], size=(h, w), mode="bilinear", align_corners=False)[:, 0]


def _views(
    batch: Batch, masks: Tensor, recipe: LaxRecipe, generator: Generator
) -> dict[str, Tensor]:
    """The masked images that each term of the recipe sends through the classifier."""
    images, weights = batch.images, masks[:, None]
    views = {"keep": _mix(images, weights, recipe, generator)}
    if recipe.drop:
        views["drop"] = _mix(images, 1 - weights, recipe, generator)
    if recipe.donors:
        views["donors"] = _mix(images.roll(1, 0), weights, recipe, generator)
    return views


def _mix(images: Tensor, weights: Tensor, recipe: LaxRecipe, generator: Generator) -> Tensor:
    if recipe.fills == ("black",):
        return images * weights
    return torch.lerp(random_fills(images, recipe.fills, generator), images, weights)


def _terms(
    logits_of_view: dict[str, Tensor], batch: Batch, cells: Tensor, recipe: LaxRecipe
) -> dict[str, Tensor]:
    """Every term that has a weight in the recipe, under the weight's name."""
    targets, power = batch.targets, recipe.power
    found = {"keep": losses.kept(logits_of_view["keep"], targets, power)}
    if recipe.drop:
        found["drop"] = losses.unlike(logits_of_view["drop"], targets, power=power)
    if recipe.donors:
        other_class = targets != targets.roll(1, 0)
        found["donors"] = losses.unlike(logits_of_view["donors"], targets, other_class, power)
    if recipe.entropy:
        found["entropy"] = losses.entropy(cells, recipe.temperature)
    if recipe.size:
        found["size"] = losses.size(cells, recipe.area)
    if recipe.decide:
        found["decide"] = losses.undecided(cells)
    return found
