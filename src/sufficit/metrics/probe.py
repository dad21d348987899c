"""What the leak asks: donors of other classes, grey and noise, seen through masks."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier, check_images, check_targets
from sufficit.errors import UserError
from sufficit.perturbation.bands import rest, show
from sufficit.perturbation.fills import check_fill
from sufficit.perturbation.heatmaps import check_heatmaps
from sufficit.perturbation.predict import check_batch_size, predict_views
from sufficit.perturbation.types import Progress, Views

Ints = npt.NDArray[np.int64]
GREY = 0.5
EVERY_PIXEL = rest(math.inf)


@dataclass(frozen=True)
class Pool:
    """Where donors, and the masks that stand for chance, are drawn from."""

    images: Tensor  # [P,C,H,W]
    heatmaps: Tensor  # [P,H,W], or [MP,H,W] of several methods, one after the other
    targets: Tensor  # [P]


@dataclass(frozen=True)
class Setting:
    """How the leak is measured."""

    alpha_min: float
    donors: int = 16
    seed: int = 0
    noises: int = 4
    fill: str | Tensor = "black"
    batch_size: int | None = None

    def check(self, images: Tensor) -> None:
        """Raise where a number makes no sense, or the fill is not one for all images."""
        for name, least in (("donors", 1), ("noises", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UserError(f"{name} must be a whole number, {least} or more, got {value!r}")
        check_batch_size(self.batch_size)
        check_fill(self.fill, images)
        if isinstance(self.fill, Tensor) and self.fill.ndim == 4 and len(self.fill) > 1:
            raise UserError(
                "the leak needs one fill for all images (a name, a number, [C] or [C,H,W]), got"
                f" {list(self.fill.shape)}"
            )


@dataclass(frozen=True)
class Draws:
    """What was drawn for all images, one after the other."""

    owners: Tensor  # [T] whose mask it is
    donors: Tensor  # [T] over which image of the pool
    others: Tensor  # [T] whose mask stands for chance
    counts: Tensor  # [N] donors of each image

    def of_methods(self, m: int, pool: int) -> "Draws":
        """The same for several methods' heatmaps of images and pool, one after the other."""
        method, n = torch.arange(m, device="cpu")[:, None], len(self.counts)
        return Draws(
            (self.owners + n * method).flatten(),
            self.donors.repeat(m),
            (self.others + pool * method).flatten(),
            self.counts.repeat(m),
        )


@dataclass(frozen=True)
class Probe:
    """A classifier, a pool, and what the model says of the pool's masks, asked once."""

    classifier: Classifier
    pool: Pool
    setting: Setting
    said: Tensor  # [MP,1+noises] the class named for grey and noise through the pool's masks

    def through(
        self,
        heatmaps: Tensor,
        masks: Tensor,
        draws: Draws,
        targets: Tensor,
        tick: Progress | None,
    ) -> Tensor:
        """Share of each image's donors that are called its target through these masks: [N]."""
        views = Views(draws.donors, masks)
        named = _named(
            self.classifier, self.pool.images, heatmaps, views, self.setting, targets, tick
        )
        sums = torch.zeros(len(targets), dtype=torch.float64, device="cpu")
        return sums.index_add_(0, draws.owners, hits(named, targets[draws.owners])) / draws.counts

    def named_canvases(self, heatmaps: Tensor) -> Tensor:
        """What the model says of grey and noise through other masks than the pool's: as `said`."""
        return _named_canvases(self.classifier, self.pool.images, heatmaps, self.setting)


def prepare(classifier: Classifier, pool: Pool, setting: Setting) -> Probe:
    """Ask what the model says of the pool's masks."""
    said = _named_canvases(classifier, pool.images, pool.heatmaps, setting)
    return Probe(classifier, replace(pool, targets=pool.targets.cpu()), setting, said)


def _named_canvases(
    classifier: Classifier, images: Tensor, heatmaps: Tensor, setting: Setting
) -> Tensor:
    """The class named for grey and for each picture of noise through each mask: [N,1+noises]."""
    pictures = canvases(tuple(images.shape[1:]), setting.seed, setting.noises)
    count, n = len(pictures), len(heatmaps)
    every = torch.arange(n * count, device="cpu")
    views = Views(every % count, every // count)
    return _named(classifier, pictures, heatmaps, views, setting).view(n, count)


def _named(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Tensor,
    views: Views,
    setting: Setting,
    targets: Tensor | None = None,
    tick: Progress | None = None,
) -> Tensor:
    """The class named for each image through the mask M > alpha_min: [T]."""
    return predict_views(
        classifier,
        images,
        heatmaps,
        show(setting.alpha_min),
        views,
        targets=targets,
        fill=setting.fill,
        batch_size=setting.batch_size,
        progress=tick,
    )


def predictions(classifier: Classifier, images: Tensor, setting: Setting) -> Tensor:
    """The class the model gives each whole image: [N]."""
    n, size = len(images), setting.batch_size
    every = torch.arange(n, device="cpu")
    nothing = torch.zeros(1, *images.shape[2:], dtype=torch.float32, device="cpu")
    views = Views(every, torch.zeros_like(every))
    return predict_views(classifier, images, nothing, EVERY_PIXEL, views, batch_size=size)


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def canvases(shape: tuple[int, ...], seed: int, noises: int) -> Tensor:
    """A picture of plain grey, and pictures of uniform noise by the seed: [1+noises,C,H,W]."""
    random = np.random.default_rng(seed)
    pictures = torch.from_numpy(random.random((noises, *shape), dtype=np.float32))
    return torch.cat([torch.full_like(pictures[:1], GREY), pictures])


def draw(target: int, pool_targets: Ints, donors: int, seed: int, number: int) -> tuple[Ints, Ints]:
    """The donors of image `number`, and the images whose masks stand for chance over them.

    Both are of another class than the target's, each of them at most once.
    """
    others = np.flatnonzero((pool_targets != target) & (pool_targets >= 0))
    random = np.random.default_rng([seed, number])
    count = min(donors, len(others))
    first, second = (random.choice(others, count, replace=False) for _ in range(2))
    return first, second


def draw_pool(targets: Tensor, size: int, seed: int) -> list[int]:
    """Numbers of up to `size` images, in order; of two classes where there are two.

    >>> draw_pool(torch.tensor([1, 1, 1, 1, 1, 0]), 2, seed=0)
    [3, 5]
    """
    known, order = targets.numpy(), np.random.default_rng(seed).permutation(len(targets))
    chosen, left = order[:size].copy(), order[size:]
    others = left[known[left] != known[chosen[0]]]
    if (known[chosen] == known[chosen[0]]).all() and len(others):
        chosen[-1] = others[0]
    return sorted(chosen.tolist())


def draw_all(targets: Tensor, pool_targets: Tensor, setting: Setting, first: int) -> Draws:
    """Draw for images of which the first has this number among all: [N], [P]."""
    known = pool_targets.numpy()
    drawn = [
        draw(target, known, setting.donors, setting.seed, number)
        for number, target in enumerate(targets.tolist(), first)
    ]
    counts = torch.tensor([len(donors) for donors, _ in drawn], device="cpu")
    donors, others = (np.concatenate(both) for both in zip(*drawn, strict=True))
    owners = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    return Draws(owners, torch.from_numpy(donors), torch.from_numpy(others), counts)


def hits(named: Tensor, targets: Tensor) -> Tensor:
    """1 where the class named is the target, else 0; NaN where the model said NaN."""
    hit = (named == targets).double()
    return hit.masked_fill((named < 0) | (targets < 0), torch.nan)


def canvas_chance(said: Tensor, pool_targets: Tensor, targets: Tensor) -> Tensor:
    """How often the pool's masks of other classes are called each target: [P,K] -> [N,K].

    A mask whose canvas the model answers with NaN is left out.
    """
    classes, place = targets.unique(return_inverse=True)
    rows = [hits(said[pool_targets != target], target).nanmean(0) for target in classes]
    return torch.stack(rows)[place]


def check_classes(targets: Tensor, pool_targets: Tensor) -> None:
    """Raise where an image has no possible donor, because the pool holds its class alone."""
    classes = pool_targets.unique()
    if len(classes) == 1 and (targets == classes.to(targets.device)).any():
        raise UserError(
            "the leak lays masks over images of other classes, and all are of class"
            f" {int(classes)}: give images, or a pool, of two classes or more"
        )


def checked(images: Tensor, heatmaps: Tensor, targets: Tensor | None) -> Tensor | None:
    """Targets as whole numbers, once images and heatmaps are found to be in order."""
    check_images(images)
    check_heatmaps(heatmaps, images)
    return check_targets(targets, len(images))


def check_size(pool: Pool, images: Tensor) -> None:
    """Raise unless the images are of the pool's size."""
    wanted, came = list(images.shape[1:]), list(pool.images.shape[1:])
    if wanted != came:
        raise UserError(f"the pool's images must be {wanted} as the others are, got {came}")


def checked_pool(pool: Pool) -> Pool:
    """A pool that is whole, its targets as whole numbers."""
    if not isinstance(pool, Pool):
        raise UserError(
            f"pool must be a Pool(images, heatmaps, targets), got {type(pool).__name__}"
        )
    targets = checked(pool.images, pool.heatmaps, pool.targets)
    if targets is None:
        raise UserError("a pool needs targets: its labels, or classifier(images).argmax(1)")
    return replace(pool, targets=targets)
