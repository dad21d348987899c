"""`leak`: how often a mask makes the model predict the mask's class on images of other classes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sufficit.classifier.classifier import (
    Classifier,
    check_has_classes,
    check_images,
    check_targets,
)
from sufficit.errors import UserError
from sufficit.metrics.columns import HEADINGS, alpha_from
from sufficit.perturbation.bands import masks_of, show
from sufficit.perturbation.fills import check_fill
from sufficit.perturbation.heatmaps import check_heatmaps
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.perturbation.predict import check_batch_size
from sufficit.perturbation.predictions import hits
from sufficit.progress import Progress, counting_bar
from sufficit.statistics import Estimate, estimates_of, ratio, ratio_of
from sufficit.sums import both, sums_of

Ints = npt.NDArray[np.int64]
POOL = 256  # images of a folder that are donors
LIMIT = 1.5  # a ratio above it is worth a warning
TENSORS = ("donors", "donors_chance", "grey", "grey_chance", "noise", "noise_chance", "calls")


@dataclass(frozen=True)
class Leak:
    """Per image, the shares of predictions of the mask's class, and those by chance; on the CPU."""

    donors: Tensor  # [N] images of other classes through the image's mask
    donors_chance: Tensor  # [N] the same donors through masks of other classes
    grey: Tensor  # [N] plain grey through the image's mask
    grey_chance: Tensor  # [N] plain grey through masks of other classes
    noise: Tensor  # [N] noise through the image's mask
    noise_chance: Tensor  # [N] noise through masks of other classes
    calls: Tensor  # [N] model calls spent on each image
    alpha_min: float

    def __len__(self) -> int:
        return len(self.donors)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:.4f}" for name, value in self.mean().items())
        return f"Leak(n={len(self)}, ratio={self.ratio:.4f}, {values})"

    @property
    def columns(self) -> dict[str, Tensor]:
        """The shares by their names in tables and files, `leak` and `leak_chance` first."""
        shares = {name: getattr(self, name) for name in TENSORS if name != "calls"}
        return {f"leak_{name}".replace("_donors", ""): found for name, found in shares.items()}

    @property
    def ratio(self) -> float:
        """Mean leak over mean chance; infinite where chance is 0, NaN where both are."""
        means = self.mean()
        return float(ratio(means["leak"], means["leak_chance"]))

    def mean(self) -> dict[str, float]:
        """Return the mean of each column, NaN ignored."""
        return {name: values.nanmean().item() for name, values in self.columns.items()}

    def estimates(self, seed: int = 0) -> dict[str, Estimate]:
        """Return every mean, and `leak_ratio`, with a 95 % interval over the images."""
        values = {name: column.numpy() for name, column in self.columns.items()}
        directions = {name: HEADINGS[name].higher_is_better for name in values}
        limits = {name: HEADINGS[name].limits for name in values}
        found = estimates_of(sums_of(values, seed=seed), directions, limits=limits.__getitem__)
        pairs = sums_of(both(values["leak"], values["leak_chance"]), seed=seed)
        return found | {"leak_ratio": ratio_of(pairs)}


@dataclass(frozen=True)
class Pool:
    """Where donors, and the masks behind the chance level, are drawn from."""

    images: Tensor  # [P,C,H,W]
    heatmaps: Tensor  # [P,H,W], or [MP,H,W] of several methods, method after method
    targets: Tensor  # [P]


@dataclass(frozen=True)
class LeakMeter:
    """How the leak of a model is measured, and the pool that its donors come from."""

    asked: MaskedModel
    alpha_min: float
    donors: int = 16
    seed: int = 0
    noises: int = 4
    pool: Pool | None = None  # None: the images whose masks are measured

    def check(self, images: Tensor) -> None:
        """Raise for a bad number, or a fill that is not the same for all images."""
        for name, least in (("donors", 1), ("noises", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UserError(f"{name} must be a whole number, {least} or more, got {value!r}")
        fill = self.asked.fill
        check_batch_size(self.asked.batch_size)
        check_fill(fill, images)
        if isinstance(fill, Tensor) and fill.ndim == 4 and len(fill) > 1:
            raise UserError(
                f"the leak needs one fill for all images, got {list(fill.shape)}: pass a name, a"
                " number, [C] or [C,H,W]"
            )

    def leak(
        self,
        images: Tensor,
        heatmaps: Tensor,
        targets: Tensor | None,
        *,
        numbers: Sequence[int] | None = None,
        strict: bool = True,
    ) -> Leak:
        """Return the leak of images with these numbers among all images, 0, 1, ... by default.

        An image without a possible donor raises, or has NaN unless strict.
        """
        known = checked(images, heatmaps, targets)
        self.check(images)
        if self.pool is not None and self.pool.images.shape[1:] != images.shape[1:]:
            wanted, came = list(images.shape[1:]), list(self.pool.images.shape[1:])
            raise UserError(
                f"the pool's images must be {wanted} as the others are, got {came}: resize them"
            )
        goals = self._predicted(images) if known is None else known.cpu()
        meter = self if self.pool else replace(self, pool=Pool(images, heatmaps, goals))
        if strict:
            check_classes(goals, goals if self.pool is None else self.pool.targets)
        numbers = range(len(goals)) if numbers is None else numbers
        found = meter.measure(heatmaps, goals, numbers)
        return found if known is not None else replace(found, calls=found.calls + 1)

    def _predicted(self, images: Tensor) -> Tensor:
        """The classes predicted for whole images: [N]."""
        every = torch.arange(len(images), device="cpu")
        whole = torch.ones(1, *images.shape[2:], dtype=torch.bool, device="cpu")
        return self.asked.views(images, whole, (every, torch.zeros_like(every))).named.cpu()

    @property
    def calls(self) -> int:
        """Forward passes per image and source, at most."""
        return 2 * self.donors + 1 + self.noises

    @property
    def _pool(self) -> Pool:
        assert self.pool is not None  # `measure` needs one
        return self.pool

    @cached_property
    def _canvases(self) -> Tensor:
        """Grey and noise: [1+noises,C,H,W]."""
        return canvases(tuple(self._pool.images.shape[1:]), self.seed, self.noises)

    @cached_property
    def _images(self) -> Tensor:
        """All that is seen through masks, the donors, then grey and noise."""
        donors = self._pool.images
        return torch.cat([donors, self._canvases.to(donors)])

    @cached_property
    def _pool_masks(self) -> Tensor:
        """The masks of the pool: bool [MP,H,W]."""
        return self._masks(self._pool.heatmaps)

    @cached_property
    def _pool_classes(self) -> Tensor:
        """The class predicted for grey and noise through the pool's masks: [MP,1+noises]."""
        masks = self._pool_masks
        images, through = self._canvas_views(len(masks))
        found = self.asked.views(self._images, masks, (images, through)).cpu()
        return found.named.view(len(masks), -1)

    def _canvas_views(self, masks: int) -> tuple[Tensor, Tensor]:
        """Every canvas through every mask: the numbers of image and mask."""
        blank = len(self._canvases)
        every = torch.arange(masks * blank, device="cpu")
        return len(self._pool.images) + every % blank, every // blank

    def _masks(self, heatmaps: Tensor) -> Tensor:
        """The mask M > alpha_min of each heatmap."""
        return masks_of(heatmaps, show(self.alpha_min), self.asked.model.device)

    def measure(self, heatmaps: Tensor, targets: Tensor, numbers: Sequence[int]) -> Leak:
        """Return the leak of M methods, method after method: [MN,H,W], [N] -> each [MN].

        `numbers` are those of the images among all images; donors are drawn by them. The pool has
        heatmaps of the same methods, in the same order. Nothing is checked.
        """
        pool = self._pool
        n = len(targets)
        m = len(heatmaps) // n
        others = pool.targets.cpu()
        drawn = [
            draw(target, others.numpy(), self.donors, self.seed, number)
            for target, number in zip(targets.tolist(), numbers, strict=True)
        ]
        first, second = (torch.from_numpy(np.concatenate(x)) for x in zip(*drawn, strict=True))
        counts = torch.tensor([len(donors) for donors, _ in drawn], device="cpu")
        method = torch.arange(m, device="cpu")[:, None]
        owners = (torch.arange(n, device="cpu").repeat_interleave(counts) + n * method).flatten()
        second = (second + len(others) * method).flatten()
        donors, counts, goals = first.repeat(m), counts.repeat(m), targets.repeat(m)

        # All views in one go, so that batches are full and a GPU is waited for once: donors through
        # the images' own masks, through masks of the pool, canvases through the own masks.
        is_pool = heatmaps is pool.heatmaps  # then canvases are known
        masks = self._pool_masks
        before = 0  # masks before those of the pool
        if not is_pool:
            own_masks = self._masks(heatmaps)
            before = len(own_masks)
            masks = torch.cat([own_masks, masks.to(own_masks.device)])
        canvas, through = self._canvas_views(before)
        found = self.asked.views(
            self._images,
            masks,
            (
                torch.cat([donors, donors, canvas]),
                torch.cat([owners, before + second, through]),
            ),
            targets=torch.cat([goals[owners], goals[owners], goals[through]]),
        )
        own, chance, blank = found.cpu().named.split([len(donors), len(donors), len(canvas)])

        def donor_share(named: Tensor) -> Tensor:
            """Return the share of each image's donors predicted as its target: [MN]."""
            sums = torch.zeros(len(goals), dtype=torch.float64, device="cpu")
            return sums.index_add_(0, owners, hits(named, goals[owners])) / counts

        blank = self._pool_classes if is_pool else blank.view(len(goals), -1)
        seen = hits(blank, goals[:, None])
        classes, place = targets.unique(return_inverse=True)
        by_chance = torch.cat(
            [
                torch.stack([hits(one[others != y], y).nanmean(0) for y in classes])[place]
                for one in self._pool_classes.chunk(m)
            ]
        )
        return Leak(
            donors=donor_share(own),
            donors_chance=donor_share(chance),
            grey=seen[:, 0],
            grey_chance=by_chance[:, 0],
            noise=seen[:, 1:].mean(1),
            noise_chance=by_chance[:, 1:].mean(1),
            calls=2 * counts + blank.shape[1],
            alpha_min=self.alpha_min,
        )


def leak(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Tensor,
    targets: Tensor | None = None,
    *,
    alpha_min: float = 0.5,
    donors: int = 16,
    seed: int = 0,
    noises: int = 4,
    fill: str | Tensor = "black",
    pool: Pool | None = None,
    batch_size: int | None = None,
    progress: bool | Progress | None = None,
) -> Leak:
    """Return how often the mask M > alpha_min makes images of other classes its own class.

    Donors, and the masks behind the chance level, come from the pool, or from the images. Which
    ones depends on the seed, the number of the image and the pool. An image with fewer possible
    donors than wanted gets each of them once.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten())   # which half is brighter
    >>> images = torch.full((2, 1, 4, 4), 0.5)
    >>> heatmaps = torch.zeros(2, 4, 4)
    >>> heatmaps[0, :2], heatmaps[1, 2:] = 1, 1                       # each mask shows its own half
    >>> leak(Classifier(model), images, heatmaps, torch.tensor([0, 1])).mean()["leak"]
    1.0
    """
    check_has_classes(classifier)
    meter = LeakMeter(
        asked=MaskedModel(classifier, fill, batch_size),
        alpha_min=alpha_from(alpha_min),
        donors=donors,
        seed=seed,
        noises=noises,
        pool=checked_pool(pool),
    )
    with counting_bar("measuring the leak", len(heatmaps) * meter.calls, progress):
        return meter.leak(images, heatmaps, targets)


def draw(target: int, pool_targets: Ints, donors: int, seed: int, number: int) -> tuple[Ints, Ints]:
    """Return the donors of image `number`, and the images whose masks give the chance level.

    Both are of another class than the target, each image at most once.
    """
    others = np.flatnonzero((pool_targets != target) & (pool_targets >= 0))
    random = np.random.default_rng([seed, number])
    count = min(donors, len(others))
    first, second = (random.choice(others, count, replace=False) for _ in range(2))
    return first, second


def draw_pool(targets: Tensor, size: int, seed: int) -> list[int]:
    """Return the sorted numbers of up to `size` images, of two classes where there are two.

    >>> draw_pool(torch.tensor([1, 1, 1, 1, 1, 0]), 2, seed=0)
    [3, 5]
    """
    known, order = targets.numpy(), np.random.default_rng(seed).permutation(len(targets))
    chosen, left = order[:size].copy(), order[size:]
    others = left[known[left] != known[chosen[0]]]
    if (known[chosen] == known[chosen[0]]).all() and len(others):
        chosen[-1] = others[0]
    return sorted(chosen.tolist())


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def canvases(shape: tuple[int, ...], seed: int, noises: int) -> Tensor:
    """Return an image of plain grey, and images of uniform noise by the seed: [1+noises,C,H,W]."""
    random = np.random.default_rng(seed)
    images = torch.from_numpy(random.random((noises, *shape), dtype=np.float32))
    return torch.cat([torch.full_like(images[:1], 0.5), images])


def leak_warning(summary: Mapping[str, Estimate]) -> str | None:
    """Return what a reader of MSI must know about the leak, None where there is no problem."""
    ratios, own, chance = (summary[name] for name in ("leak_ratio", "leak", "leak_chance"))
    if not math.isfinite(ratios.mean):
        words = "no ratio: by chance it never happens here"
    else:
        words = f"ratio {ratios.mean:.2f}"
        if math.isinf(ratios.high):
            words += f", 95 % interval from {ratios.low:.2f} without end"
        elif not math.isnan(ratios.low):
            words += f", 95 % interval {ratios.low:.2f} .. {ratios.high:.2f}"
    facts = (
        f"over images of other classes these masks make the model predict the mask's class in"
        f" {own.mean:.1%} of the cases, masks of other classes in {chance.mean:.1%} ({words})"
    )
    if ratios.mean > LIMIT and ratios.low > 1:
        return (
            f"the masks leak: {facts}. Their shape alone tells the model the class, so MSI flatters"
            " this method"
        )
    if not (ratios.low > 1 or ratios.high <= 2 * LIMIT):
        return f"{ratios.n} images are too few to tell whether the masks leak: {facts}"
    return None


def check_classes(targets: Tensor, pool_targets: Tensor) -> None:
    """Raise where an image has no possible donor, because the pool has its class only."""
    classes = pool_targets.unique()
    if len(classes) == 1 and (targets == classes.to(targets.device)).any():
        raise UserError(
            "the leak lays masks over images of other classes, and all are of class"
            f" {int(classes)}: pass images, or a pool, of two classes or more"
        )


def checked_pool(pool: Pool | None) -> Pool | None:
    """Return a pool with integer targets, or raise where it is incomplete."""
    if pool is None:
        return None
    if not isinstance(pool, Pool):
        raise UserError(
            f"pool must be a Pool, got {type(pool).__name__}: pass Pool(images, heatmaps, targets)"
        )
    targets = checked(pool.images, pool.heatmaps, pool.targets)
    if targets is None:
        raise UserError("a pool needs targets: pass its labels, or classifier(images).argmax(1)")
    return replace(pool, targets=targets)


def checked(images: Tensor, heatmaps: Tensor, targets: Tensor | None) -> Tensor | None:
    """Return integer targets, or raise for bad images, heatmaps or targets."""
    check_images(images)
    check_heatmaps(heatmaps, images)
    return check_targets(targets, len(images))
