"""One step of training an adapter: features -> masks -> masked images -> loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.explainers import losses, rival_losses
from sufficit.explainers.recipes import LaxRecipe, random_fills

LAYOUTS = ((1, 2), (2, 1), (2, 2))  # rows and columns of mosaics
IMAGES = 8  # of a batch for each mosaic; more mosaics cost time
AROUND = 0.15  # how far the centre of a tile may be from that of the mask, of half a side
LEVELS = 2  # points of the insertion and deletion curves that a step of `ranking` draws
Draw = Callable[..., Tensor]
"""(features, targets [N]) -> maps [N,h,w]."""


class Batch(NamedTuple):
    """Images in 0..1, the classes to explain, and what the classifier makes of the images."""

    images: Tensor  # [N,C,H,W]
    targets: Tensor  # [N]
    features: tuple[Tensor, ...]  # of each stage, the last one the coarsest: [N,K,h,w]
    first: Tensor  # [N,2] the two classes that the classifier finds most likely
    layers: tuple[str, ...] = ()  # whose features they are, where that is known

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return (self.images, self.targets, self.first, *self.features)

    def to(self, device: torch.device | str) -> "Batch":
        """The same on another device."""
        return self.each(lambda part: part.to(device, non_blocking=True))

    def rows(self, some: Tensor) -> "Batch":
        """Some of the images."""
        return self.each(lambda part: part[some])

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Every tensor changed in the same way."""
        tensors = [change(one) for one in (self.images, self.targets, self.first)]
        stages = tuple(map(change, self.features))
        return Batch(tensors[0], tensors[1], stages, tensors[2], self.layers)

    def reading(self, layers: tuple[str, ...]) -> "Batch":
        """With the features of these layers alone, the last ones that it has."""
        kept = self.layers[-len(layers) :] if layers else ()
        if not kept:
            return self
        if kept != layers:
            raise UserError(
                f"the cached features are of {', '.join(self.layers)}, but the adapter reads"
                f" {', '.join(layers)}: cache the features of these, cache_features(layers=...)"
            )
        return self._replace(features=self.features[-len(layers) :], layers=layers)

    @classmethod
    def joined(cls, batches: "Sequence[Batch]") -> "Batch":
        """All the images of several batches."""
        images, targets, features, first, layers = zip(*batches, strict=True)
        stages = tuple(torch.cat(stage) for stage in zip(*features, strict=True))
        return cls(torch.cat(images), torch.cat(targets), stages, torch.cat(first), layers[0])


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
    lax: Draw,
    batch: Batch,
    recipe: LaxRecipe,
    generator: Generator,
    done: float | Tensor = 1.0,
    classes: int | None = None,
    source: Classifier | None = None,
) -> Step:
    """The loss of a batch by a recipe; the classifier must be frozen and in eval mode.

    `done` is the finished share of the training, with which two weights grow.
    `classes` is how many there are, for an adapter that takes a class. `source` is whose features
    the adapter reads, where another classifier judges.
    """
    images, targets, power = batch.images, batch.targets, recipe.power
    absent = None
    if classes is not None:
        targets, absent = asked_classes(batch, classes, generator)
    cells = lax(batch.features, targets)
    masks = upsampled(cells[:, None], images)[:, 0]
    views, kinds = _views(images, masks, cells, recipe, generator)
    inputs = classifier.normalize(torch.cat(list(views.values())))
    said = classifier.logits_of(inputs).float().split(len(images))
    logits = dict(zip(views, said, strict=True))
    terms = {"keep": losses.kept(logits["keep", 0], targets, power)}
    if recipe.drop:
        terms["drop"] = losses.unlike(logits["drop", 0], targets, power=power)
    terms |= _rival_terms(logits, targets, batch.first[:, 0], masks, recipe)
    if (donated := logits.get(("donors", 0))) is not None:
        shown = batch.targets.roll(1, 0)
        push = losses.push(donated, targets, shown, kinds["donors", 0])
        terms["donors"] = losses.unlike(donated, targets, targets != shown, push, power)
    if absent is not None:
        counted = (absent != batch.targets) & (absent != batch.first[:, 0])
        means = lax(batch.features, absent).mean((1, 2))
        terms["absent"] = (means * counted).mean()
        if recipe.mosaics and (made := mosaics(batch, targets, masks.detach(), generator)):
            terms["mosaics"] = _mosaic_term(source or classifier, lax, batch, made)
    if recipe.entropy:
        terms["entropy"] = losses.entropy(cells, recipe.temperature)
    if recipe.size:
        terms["size"] = losses.size(cells, recipe.area)
    if recipe.decide:
        terms["decide"] = losses.undecided(cells)
    weights = {name: getattr(recipe, name) for name in terms}
    weights |= {"drop": recipe.drop * (1 + done) / 2, "decide": recipe.decide * done}
    loss = torch.as_tensor(sum(weights[name] * value for name, value in terms.items()))
    with torch.no_grad():
        right = (logits["keep", 0].argmax(1) == targets).float().mean()
        share = (masks > recipe.alpha_min).float().mean()
    return Step(loss, terms, right, masks.detach().mean(), share)


def _views(
    images: Tensor, masks: Tensor, cells: Tensor, recipe: LaxRecipe, generator: Generator
) -> tuple[dict[tuple[str, int], Tensor], dict[tuple[str, int], Tensor]]:
    """The masked images that the classifier is asked about, and the kinds of their fills [N]."""
    views: dict[tuple[str, int], Tensor] = {}
    kinds: dict[tuple[str, int], Tensor] = {}

    def show(name: str, number: int, shown: Tensor, weights: Tensor) -> None:
        kinds[name, number] = torch.zeros(len(shown), device=shown.device)
        if recipe.fills == ("black",):
            views[name, number] = shown * weights[:, None]
        else:
            fill, kinds[name, number] = random_fills(shown, recipe.fills, generator)
            views[name, number] = torch.lerp(fill, shown, weights[:, None])

    left = 1 - masks
    show("keep", 0, images, masks)
    if recipe.drop or recipe.destroy or recipe.blank or recipe.earned:
        show("drop", 0, images, left)
    if recipe.donors > 0 and len(images) > 1:  # one image alone would be its own donor
        show("donors", 0, images.roll(1, 0), 1 - left)  # as rounded as the view outside
    if recipe.ranking:
        tops = upsampled(rival_losses.soft_tops(cells, LEVELS, generator), images)
        for k, top in enumerate(tops.unbind(1)):
            show("insert", k, images, top)
            show("remove", k, images, 1 - top)
    return views, kinds


def _rival_terms(
    logits: Mapping[tuple[str, int], Tensor],
    targets: Tensor,
    predicted: Tensor,
    masks: Tensor,
    recipe: LaxRecipe,
) -> dict[str, Tensor]:
    """The terms of other methods that have a weight; masks [N,H,W]."""
    terms: dict[str, Tensor] = {}
    inside, outside = logits["keep", 0], logits.get(("drop", 0), logits["keep", 0])
    if recipe.preserve:
        terms["preserve"] = rival_losses.margin(inside, targets, rival_losses.PRESERVED)
    if recipe.destroy:
        terms["destroy"] = rival_losses.destroyed(outside, targets, rival_losses.DESTROYED)
    if recipe.sparse:
        terms["sparse"] = rival_losses.sparse(masks)
    if recipe.smooth:
        terms["smooth"] = rival_losses.smooth(masks)
    known = predicted == targets  # without a mask
    if recipe.blank:
        terms["blank"] = rival_losses.blank(outside, known)
    if recipe.earned:
        right, wrong = inside.argmax(1) == targets, known & (outside.argmax(1) != targets)
        terms["earned"] = rival_losses.earned(masks, right, wrong)
    if recipe.ranking:
        kinds = ("insert", "remove")
        pairs = [torch.cat([logits[kind, k] for k in range(LEVELS)]) for kind in kinds]
        terms["ranking"] = rival_losses.ranking(pairs[0], pairs[1], targets.repeat(LEVELS))
    return terms


def asked_classes(batch: Batch, classes: int, generator: Generator) -> tuple[Tensor, Tensor]:
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


class Mosaics(NamedTuple):
    """Images made of others, a class to ask for in each, and where its maps should be."""

    images: Tensor  # [n,C,H,W]
    asked: Tensor  # [n]
    wanted: Tensor  # [n,1,H,W] the maps of the tiles of that class, 0 in the others
    counted: Tensor  # [n,1,H,W] 0 in tiles that may be of that class, else 1


def mosaics(batch: Batch, asked: Tensor, masks: Tensor, generator: Generator) -> Mosaics | None:
    """Mosaics of the images of a batch, one for every eight; none of a single image.

    `masks` [N,H,W] are those of the images for the classes `asked` [N]. The class that is asked
    for in a mosaic is that of one of its tiles. A tile that has this class only by its label or
    only by its prediction does not count.
    """
    n, device, (h, w) = len(asked), asked.device, batch.images.shape[2:]
    channels = [batch.images.shape[1], 1, 1]
    rest = torch.randperm(n, generator=generator, device=device)
    made: list[tuple[Tensor, ...]] = []
    total = -(-n // IMAGES) if n > 1 else 0
    for number, layout in enumerate(LAYOUTS):
        rows, columns = layout
        if not (count := len(range(number, total, len(LAYOUTS)))):
            continue
        some, rest = rest.tensor_split([count * rows * columns])
        own, label, said = (
            classes[some].view(count, -1) for classes in (asked, batch.targets, batch.first[:, 0])
        )
        chosen = torch.rand(own.shape, generator=generator, device=device).argmax(1, keepdim=True)
        wanted = own.gather(1, chosen)
        same = own == wanted
        known = same | ((label != wanted) & (said != wanted))
        side = -(-h // rows), -(-w // columns)
        images, maps = crops(batch.images[some], masks[some], side, generator)
        lit, sure = (each.flatten()[:, None, None, None] for each in (same, known))
        tiles = torch.cat([images, maps * lit, sure.expand_as(maps)], 1)
        grid = tiles.unflatten(0, (count, *layout)).permute(0, 3, 1, 4, 2, 5)
        whole = grid.flatten(4).flatten(2, 3)[..., :h, :w].split(channels, 1)
        made.append((whole[0], wanted[:, 0], *whole[1:]))
    return Mosaics(*map(torch.cat, zip(*made, strict=True))) if made else None


def crops(
    images: Tensor, masks: Tensor, side: tuple[int, int], generator: Generator
) -> tuple[Tensor, Tensor]:
    """The part of each image around its mask, and of the mask: [N,C,H,W], [N,H,W] -> tiles.

    A tile shows between a part of its own size and the whole image.
    """
    n, device = len(images), images.device
    total = masks.sum((1, 2)).clamp(min=1e-6)
    chance = torch.rand(3, n, generator=generator, device=device).to(masks)
    theta = masks.new_zeros(n, 2, 3)
    for axis, length in enumerate(reversed(side)):  # across, then down
        full = masks.shape[2 - axis]
        line = torch.arange(full, device=device).to(masks).mul(2).add(1 - full) / full  # in -1..1
        centre = (masks.sum(1 + axis) * line).sum(1) / total
        shown = length / full + (1 - length / full) * chance[2]
        theta[:, axis, axis] = shown
        centre = centre + AROUND * (2 * chance[axis] - 1)
        theta[:, axis, 2] = torch.minimum(torch.maximum(centre, shown - 1), 1 - shown)
    grid = F.affine_grid(theta, [n, 1, *side], align_corners=False)
    both = torch.cat([images, masks[:, None].to(images)], 1)
    tiles = F.grid_sample(both, grid, padding_mode="border", align_corners=False)
    return tiles[:, : images.shape[1]], tiles[:, images.shape[1] :]


def _mosaic_term(source: Classifier, lax: Draw, batch: Batch, made: Mosaics) -> Tensor:
    """How far the maps of mosaics are from those of their tiles."""
    with torch.no_grad():
        layers = batch.layers or source.stage_layers(made.images, len(batch.features))
        stages, _ = source.stages(made.images, layers)
    maps = lax(tuple(stage.float() for stage in stages), made.asked)[:, None]
    wanted, counted = (
        F.interpolate(each, size=maps.shape[2:], mode="area")
        for each in (made.wanted, made.counted)
    )
    return losses.apart(maps, wanted, counted)


def upsampled(cells: Tensor, images: Tensor) -> Tensor:
    """Maps at the images' size, bilinear, corners not aligned: [N,A,h,w] -> [N,A,H,W]."""
    h, w = images.shape[2:]
    return F.interpolate(cells, size=(h, w), mode="bilinear", align_corners=False)
