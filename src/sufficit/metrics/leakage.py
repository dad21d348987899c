"""`leak`: does the shape of a mask alone reveal its class, on images of other classes?

With few classes it counts how often the model predicts the mask's class. Among many classes that
next to never happens, and the log probability of the class is compared instead.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, get_args

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
from sufficit.errors import UserError, unknown
from sufficit.metrics.columns import HEADINGS, alpha_from
from sufficit.perturbation.bands import masks_of, ranks, runs, show, top
from sufficit.perturbation.fills import check_fill
from sufficit.perturbation.heatmaps import check_heatmaps
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.perturbation.predict import check_batch_size
from sufficit.perturbation.predictions import hits
from sufficit.progress import Progress, counting_bar
from sufficit.statistics import Estimate, estimates_of, ratio, ratio_of
from sufficit.sums import both, sums_of

Ints = npt.NDArray[np.int64]
RANKED = 64  # heatmaps that are ranked at a time
POOL = 256  # images of a folder that are donors
LIMIT = 1.5  # a ratio above it is worth a warning
MANY = 100  # classes; with more, a ratio of shares has no resolution
LIFT_SIZES = (0.10, 0.25, 0.45)  # of the masks whose lift is measured, as shares of the image
LIFTS = tuple(f"leak_lift_{100 * size:.0f}" for size in LIFT_SIZES)
LIFT, OVER_GRADCAM = "leak_lift", "leak_lift_over_gradcam"
FEWER = 4  # a lift takes a quarter of the donors, at each of its sizes
Form = Literal["auto", "ratio", "lift"]
TENSORS = ("donors", "donors_chance", "grey", "grey_chance", "noise", "noise_chance", "calls")


@dataclass(frozen=True)
class Leak:
    """Per image, the shares of predictions of the mask's class, and those by chance; on the CPU.

    Or, for a model of many classes, the lifts: how much higher the log probability of the mask's
    class is on donors under the image's own mask than under masks of the same size of others.
    """

    donors: Tensor  # [N] images of other classes through the image's mask
    donors_chance: Tensor  # [N] the same donors through masks of other classes
    grey: Tensor  # [N] plain grey through the image's mask
    grey_chance: Tensor  # [N] plain grey through masks of other classes
    noise: Tensor  # [N] noise through the image's mask
    noise_chance: Tensor  # [N] noise through masks of other classes
    calls: Tensor  # [N] model calls spent on each image
    alpha_min: float
    lifts: Tensor | None = None  # [N,3] by LIFT_SIZES, in the place of all shares, which are NaN

    @classmethod
    def of_lifts(cls, lifts: Tensor, calls: Tensor, alpha_min: float) -> "Leak":
        """Return the leak of a model of many classes, by lifts [N,3]; its shares are NaN."""
        unmeasured = torch.full_like(lifts[:, 0], torch.nan)
        return cls(
            donors=unmeasured,
            donors_chance=unmeasured,
            grey=unmeasured,
            grey_chance=unmeasured,
            noise=unmeasured,
            noise_chance=unmeasured,
            calls=calls,
            alpha_min=alpha_min,
            lifts=lifts,
        )

    def __len__(self) -> int:
        return len(self.donors)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:.4f}" for name, value in self.mean().items())
        if self.lifts is not None:
            return f"Leak(n={len(self)}, {values})"
        return f"Leak(n={len(self)}, ratio={self.ratio:.4f}, {values})"

    @property
    def columns(self) -> dict[str, Tensor]:
        """The shares by their names in tables and files, `leak` and `leak_chance` first.

        Or the lifts, their mean first.
        """
        if self.lifts is not None:
            return {LIFT: self.lifts.mean(1), **dict(zip(LIFTS, self.lifts.T, strict=True))}
        shares = {name: getattr(self, name) for name in TENSORS if name != "calls"}
        return {f"leak_{name}".replace("_donors", ""): found for name, found in shares.items()}

    @property
    def ratio(self) -> float:
        """Mean leak over mean chance; infinite where chance is 0, NaN where both are, or lifts."""
        if self.lifts is not None:
            return math.nan
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
        if self.lifts is not None:
            return found
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
    form: Form = "auto"

    def check(self, images: Tensor) -> None:
        """Raise for a bad number, or a fill that is not the same for all images."""
        for name, least in (("donors", 1), ("noises", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UserError(f"{name} must be a whole number, {least} or more, got {value!r}")
        if self.form not in get_args(Form):
            raise unknown("form", str(self.form), get_args(Form))
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

    @property
    def lifted(self) -> bool:
        """Whether lifts are measured: by the form, or because the model has many classes."""
        if self.form == "auto":
            return self.asked.model.class_count > MANY
        return self.form == "lift"

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
        if self.lifted:
            return self._measure_lifts(heatmaps, targets, numbers)
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

    def _measure_lifts(self, heatmaps: Tensor, targets: Tensor, numbers: Sequence[int]) -> Leak:
        """Return the lifts of M methods, method after method: [MN,H,W], [N] -> each [MN]."""
        n = len(targets)
        m = len(heatmaps) // n
        others = self._pool.targets.cpu().numpy()
        count = math.ceil(self.donors / FEWER)
        drawn = [
            draw(target, others, count, self.seed, number)
            for target, number in zip(targets.tolist(), numbers, strict=True)
        ]
        counts = torch.tensor([len(donors) for donors, _ in drawn], device="cpu").repeat(m)
        first, second = (
            torch.from_numpy(np.concatenate(parts)).repeat(m) for parts in zip(*drawn, strict=True)
        )
        owners = torch.arange(m * n, device="cpu").repeat_interleave(counts)
        partners = second + len(others) * (owners // n)
        goals = targets.repeat(m)
        found = torch.zeros(m * n, len(LIFT_SIZES), dtype=torch.float64, device="cpu")
        for place, size in enumerate(LIFT_SIZES):
            own = self._log_shares(first, top_masks(heatmaps, size), owners, goals[owners])
            chance = self._log_shares(first, self._pool_top_masks[place], partners, goals[owners])
            found[:, place].index_add_(0, owners, own - chance)
        # NaN without any donor.
        lifts, calls = found / counts[:, None], 2 * len(LIFT_SIZES) * counts
        return Leak.of_lifts(lifts, calls, self.alpha_min)

    @cached_property
    def _pool_top_masks(self) -> list[Tensor]:
        """The masks of each size of the pool's images: each bool [MP,H,W]."""
        return [top_masks(self._pool.heatmaps, size) for size in LIFT_SIZES]

    def _log_shares(
        self, donors: Tensor, masks: Tensor, through: Tensor, targets: Tensor
    ) -> Tensor:
        """Return log p of the target of each view, a donor through one of the masks: [T]."""
        found = self.asked.views(
            self._pool.images, masks, (donors, through), targets=targets, score=log_probability
        )
        return found.cpu().confidences.double()


def log_probability(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-softmax of each target: [N,C], [N] -> [N].

    >>> log_probability(torch.zeros(1, 4), torch.tensor([2]))  # -log 4
    tensor([-1.3863])
    """
    return logits.float().log_softmax(1).gather(1, targets[:, None])[:, 0]


def top_masks(heatmaps: Tensor, size: float) -> Tensor:
    """Return which pixels come first by rank, so many that they make the size: bool [N,H,W]."""
    stop = int(runs(heatmaps[:1], [top(size)])[0, 0, 1])
    return torch.cat([ranks(some) < stop for some in heatmaps.split(RANKED)])


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
    form: Form = "auto",
    batch_size: int | None = None,
    progress: bool | Progress | None = None,
) -> Leak:
    """Return how often the mask M > alpha_min makes images of other classes its own class.

    - `classifier`: the model; it is left as it was.
    - `images`: floats in 0..1, [N,C,H,W]; `heatmaps`: floats in 0..1, [N,H,W].
    - `targets`: the class of each image, [N]. Without them, the model's own predictions.
    - `alpha_min`: pixels above it belong to the mask.
    - `donors`: images of other classes per mask. An image with fewer gets each of them once.
    - `seed`: selects the donors and the masks of the chance level, with the image's number.
    - `noises`: images of noise, the same for every mask.
    - `fill`: what hidden pixels become.
    - `pool`: a Pool that donors and masks come from; by default the images themselves.
    - `form`: "ratio", "lift", or "auto": the lift where the model has more than 100 classes.
    - `batch_size`: masked images per forward pass; chosen for the device if left out.
    - `progress`: a bar; by default when the work takes long in a terminal.

    For a model of more than 100 classes, or with form="lift", it returns lifts instead: the log
    probability of the image's class on a donor under the image's own mask, minus that under the
    mask of another image, both of the first 10, 25 and 45 % of the pixels by rank. The mask's shape
    says nothing of its class where that is 0. It takes a quarter of the donors at each size. Two
    calls with the same seed use the same donors, so that lifts of two methods can be paired.

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
        form=form,
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
    if LIFT in summary:
        return lift_words(summary) if leaks(summary) else None
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
    if leaks(summary):
        return (
            f"the masks leak: {facts}. Their shape alone tells the model the class, so MSI flatters"
            " this method"
        )
    if not (ratios.low > 1 or ratios.high <= 2 * LIMIT):
        return f"{ratios.n} images are too few to tell whether the masks leak: {facts}"
    return None


def leaks(summary: Mapping[str, Estimate]) -> bool:
    """Whether the masks of a method significantly reveal their class, and by much.

    By the ratio of a leak to its chance level. By lifts: whether they lie above Grad-CAM's, or
    above 0 where there is no Grad-CAM.
    """
    ratios, lift = summary.get("leak_ratio"), summary.get(OVER_GRADCAM, summary.get(LIFT))
    if ratios is not None:
        return ratios.mean > LIMIT and ratios.low > 1
    return lift is not None and lift.low > 0


def lift_words(summary: Mapping[str, Estimate]) -> str:
    """Return how far masks lift the log probability of their class, in a sentence."""
    lift, over = summary[LIFT], summary.get(OVER_GRADCAM)
    against = "0" if over is None else "those of Grad-CAM"
    apart = lift if over is None else over
    return (
        f"the masks leak: on images of other classes they lift the log probability of their class"
        f" by {lift.mean:.2f} over masks of the same size of other images, {apart.mean:.2f} above"
        f" {against} (95 % interval {apart.low:.2f} .. {apart.high:.2f}). Their shape alone tells"
        " the model something of the class, so MSI flatters this method"
    )


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
