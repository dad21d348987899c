"""One step of training with a `LaxRecipe`: features -> masks -> masked images -> loss.

A step of the default recipe, `robust`, is in `order_step`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError, unknown
from sufficit.training import losses
from sufficit.training.mosaics import Mosaics, mosaics
from sufficit.training.recipes import LaxRecipe, random_fills
from sufficit.training.training_batch import TrainingBatch

Draw = Callable[..., Tensor]
"""(features, targets [N]) -> maps [N,h,w] in 0..1."""


@dataclass(eq=False)
class TrainingStep:
    """What a loss knows of one step: the images, the adapter's maps, the model's answers to them.

    Masked images are asked when a loss first reads them. `kept` and `rest` are the logits of the
    images inside and outside the masks; `views("kept", "rest")` asks both in one forward pass, and
    `ask` anything else. `masks` carry the gradients to the adapter.
    """

    classifier: Classifier  # whose features the adapter reads
    batch: TrainingBatch
    draw: Draw  # the adapter
    targets: Tensor  # [N] the classes that the maps are drawn for
    cells: Tensor  # [N,h,w] the adapter's maps in 0..1
    masks: Tensor  # [N,H,W] the same at the size of the images
    fills: tuple[str, ...]  # what hidden pixels show: names in TRAINING_FILLS
    generator: Generator  # of everything random in a step
    done: float = 1.0  # the finished share of the training
    absent: Tensor | None = None  # [N] another class per image; None for a class-free adapter
    judge: Classifier | None = None  # who answers for masked images, if not the classifier
    known: dict[str, Tensor] = field(default_factory=dict, init=False)  # logits of views, as asked

    @property
    def images(self) -> Tensor:
        """The images in 0..1: [N,C,H,W]."""
        return self.batch.images

    @property
    def labels(self) -> Tensor:
        """The targets of training, labels or predictions: [N]."""
        return self.batch.targets

    @property
    def predicted(self) -> Tensor:
        """The classes that the classifier finds in the whole images: [N]."""
        return self.batch.first[:, 0]

    @property
    def kept(self) -> Tensor:
        """The logits of the images inside the masks: [N,classes]."""
        return self.views("kept")[0]

    @property
    def rest(self) -> Tensor:
        """The logits of the images outside the masks: [N,classes]."""
        return self.views("rest")[0]

    def views(self, *names: str) -> list[Tensor]:
        """The logits of "kept", "rest" and "donors", in one forward pass: each [N,classes].

        Donors show the image before in the batch through the mask of each image.
        """
        missing = [name for name in names if name not in self.known]
        if missing:
            found = self.ask([self._view(name) for name in missing])
            self.known.update(zip(missing, found, strict=True))
        return [self.known[name] for name in names]

    @cached_property
    def outside(self) -> Tensor:
        """What the masks leave: [N,H,W]."""
        return 1 - self.masks

    def _view(self, name: str) -> tuple[Tensor, Tensor]:
        if name == "kept":
            return self.images, self.masks
        if name == "rest":
            return self.images, self.outside
        if name == "donors":  # as rounded as the view outside
            return self.images.roll(1, 0), 1 - self.outside
        raise unknown("view", name, ("kept", "rest", "donors"))

    def ask(self, masked: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The logits of images through masks, in one forward pass: [N,C,H,W], [N,H,W] each."""
        judge = self.judge or self.classifier
        mixed = torch.cat([self._mixed(images, masks) for images, masks in masked])
        logits = judge.logits_of(judge.normalize(mixed)).float()
        return list(logits.split([len(images) for images, _ in masked]))

    def _mixed(self, images: Tensor, masks: Tensor) -> Tensor:
        if self.fills == ("black",):
            return images * masks[:, None]
        fills = random_fills(images, self.fills, self.generator)
        return torch.lerp(fills, images, masks[:, None])


Loss = Callable[[TrainingStep], Tensor | Mapping[str, Tensor]]
"""What a step is to lower: a scalar, or terms by name, which are summed."""


@dataclass(frozen=True)
class StepResult:
    """The loss of a batch, and the numbers to report."""

    loss: Tensor
    terms: dict[str, Tensor]  # whose sum is the loss
    accuracy: Tensor  # on the images inside the masks
    area: Tensor  # mean mask
    share: Tensor  # of the pixels above alpha_min


def take_step(
    classifier: Classifier,
    draw: Draw,
    batch: TrainingBatch,
    recipe: LaxRecipe,
    generator: Generator,
    *,
    done: float = 1.0,
    classes: int | None = None,
    loss: Loss | None = None,
) -> StepResult:
    """The loss of a batch by a recipe, or by `loss`; the classifier must be frozen, in eval mode.

    `done` is the finished share of the training, with which two weights grow. `classes` is how many
    there are, for an adapter that takes a class.
    """
    targets, absent = batch.targets, None
    if classes is not None:
        targets, absent = asked_classes(batch, classes, generator)
    cells = draw(batch.features, targets)
    step = TrainingStep(
        classifier=classifier,
        batch=batch,
        draw=draw,
        targets=targets,
        cells=cells,
        masks=upsampled(cells[:, None], batch.images)[:, 0],
        fills=recipe.fills,
        generator=generator,
        done=done,
        absent=absent,
    )
    terms = recipe_loss(step, recipe) if loss is None else checked_terms(loss(step))
    total = torch.as_tensor(sum(terms.values()))
    with torch.no_grad():
        right = (step.kept.argmax(1) == targets).float().mean()
        share = (step.masks > recipe.alpha_min).float().mean()
    return StepResult(total, terms, right, step.masks.detach().mean(), share)


def checked_terms(found: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The terms that a loss of the user's gave; raise unless each is one number."""
    terms = dict(found) if isinstance(found, Mapping) else {"own": found}
    for name, value in terms.items():
        if not isinstance(value, Tensor) or value.ndim > 0:
            came = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UserError(
                f"a loss must give a tensor without axes, or a dict of such by name, got {came} for"
                f" {name!r}: take the mean"
            )
    if not any(value.requires_grad for value in terms.values()):
        raise UserError("the loss does not depend on the masks: use step.masks or step.kept")
    return terms


def recipe_loss(step: TrainingStep, recipe: LaxRecipe) -> dict[str, Tensor]:
    """The terms of a recipe, each times its weight; a weight of 0 drops a term."""
    targets, power = step.targets, recipe.power
    donors = recipe.donors > 0 and len(targets) > 1  # one image alone would be its own donor
    names = ["kept", *(["rest"] if recipe.drop else []), *(["donors"] if donors else [])]
    logits = dict(zip(names, step.views(*names), strict=True))
    terms: dict[str, Tensor] = {}
    if recipe.keep:
        terms["keep"] = recipe.keep * losses.kept(logits["kept"], targets, power)
    if recipe.drop:
        weight = recipe.drop * (1 + step.done) / 2
        terms["drop"] = weight * losses.unlike(logits["rest"], targets, power=power)
    if donors:
        shown = step.labels.roll(1, 0)
        push = losses.excess(logits["donors"], targets, shown)
        unlike = losses.unlike(logits["donors"], targets, targets != shown, power)
        terms["donors"] = recipe.donors * (push * unlike)
    if step.absent is not None:
        counted = (step.absent != step.labels) & (step.absent != step.predicted)
        means = step.draw(step.batch.features, step.absent).mean((1, 2))
        terms["absent"] = recipe.absent * (means * counted).mean()
        if recipe.mosaics:
            made = mosaics(step.batch, targets, step.masks.detach(), step.generator)
            if made is not None:
                terms["mosaics"] = recipe.mosaics * _mosaic_term(step, made)
    if recipe.entropy:
        terms["entropy"] = recipe.entropy * losses.entropy(step.cells, recipe.temperature)
    if recipe.size:
        terms["size"] = recipe.size * losses.size(step.cells, recipe.area)
    if recipe.decide:
        terms["decide"] = recipe.decide * step.done * losses.undecided(step.cells)
    return terms


def asked_classes(
    batch: TrainingBatch, classes: int, generator: Generator
) -> tuple[Tensor, Tensor]:
    """The classes that maps are drawn for, and for each image another one: [N], [N].

    The first is the target or, for half of the images, the classifier's own prediction. The other
    is, for half of the images, the class that comes second, else any.
    """
    n, device = len(batch.targets), batch.targets.device
    coin = torch.rand(3, n, generator=generator, device=device)
    first, second = batch.first.unbind(1)
    asked = torch.where(coin[0] < 0.5, batch.targets, first)
    drawn = (coin[1] * classes).long()
    return asked, torch.where(coin[2] < 0.5, second, drawn)


def _mosaic_term(step: TrainingStep, made: Mosaics) -> Tensor:
    """How far the maps of mosaics are from those of their tiles."""
    batch = step.batch
    with torch.no_grad():
        layers = batch.layers or step.classifier.stage_layers(made.images, len(batch.features))
        stages, _ = step.classifier.stages(made.images, layers)
    maps = step.draw(tuple(stage.float() for stage in stages), made.asked)[:, None]
    wanted, counted = (
        F.interpolate(each, size=maps.shape[2:], mode="area")
        for each in (made.wanted, made.counted)
    )
    return losses.apart(maps, wanted, counted)


def upsampled(cells: Tensor, images: Tensor) -> Tensor:
    """Maps at the images' size, bilinear, corners not aligned: [N,A,h,w] -> [N,A,H,W]."""
    h, w = images.shape[2:]
    return F.interpolate(cells, size=(h, w), mode="bilinear", align_corners=False)
