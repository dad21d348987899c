"""`leak`: how often a mask makes the model predict the mask's class on images of other classes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier, check_classifier, check_images, check_targets
from sufficit.errors import UserError
from sufficit.metrics.donors import Donors, canvases, draw_donors
from sufficit.metrics.registry import alpha_from, higher_is_better
from sufficit.perturbation.bands import rest, show
from sufficit.perturbation.fills import check_fill
from sufficit.perturbation.heatmaps import check_heatmaps
from sufficit.perturbation.predict import Views, check_batch_size, predict_views
from sufficit.perturbation.predictions import hits
from sufficit.progress import Progress, bar, stage
from sufficit.statistics import Estimate, estimates, ratio, ratio_estimate

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
        """The shares by their names in tables and files: each [N]."""
        return {
            "leak": self.donors,
            "leak_chance": self.donors_chance,
            "leak_grey": self.grey,
            "leak_grey_chance": self.grey_chance,
            "leak_noise": self.noise,
            "leak_noise_chance": self.noise_chance,
        }

    @property
    def ratio(self) -> float:
        """Mean leak over mean chance; infinite where chance is 0, NaN where both are."""
        means = self.mean()
        return float(ratio(means["leak"], means["leak_chance"]))

    def mean(self) -> dict[str, float]:
        """Return the mean of each column, NaN ignored."""
        return {name: values.nanmean().item() for name, values in self.columns.items()}

    def estimates(self, seed: int = 0) -> dict[str, Estimate]:
        """Return every mean, and `leak_ratio`, with a 95 % bootstrap interval over the images."""
        values = {name: column.numpy() for name, column in self.columns.items()}
        found = estimates(values, {name: higher_is_better(name) for name in values}, seed=seed)
        ratios = ratio_estimate(values["leak"], values["leak_chance"], seed=seed)
        return found | {"leak_ratio": ratios}

    def rows(self, some: slice) -> "Leak":
        """Return the leak of some of the images."""
        return replace(self, **{name: getattr(self, name)[some] for name in TENSORS})

    @staticmethod
    def join(parts: Sequence["Leak"]) -> "Leak":
        """Return the leak of several batches as one, in their order."""
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in TENSORS}
        return Leak(**joined, alpha_min=parts[0].alpha_min)


@dataclass(frozen=True)
class LeakSettings:
    """How the leak is measured."""

    alpha_min: float
    donors: int = 16
    seed: int = 0
    noises: int = 4
    fill: str | Tensor = "black"
    batch_size: int | None = None

    def check(self, images: Tensor) -> None:
        """Raise for a bad number, or a fill that is not the same for all images."""
        for name, least in (("donors", 1), ("noises", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UserError(f"{name} must be a whole number, {least} or more, got {value!r}")
        check_batch_size(self.batch_size)
        check_fill(self.fill, images)
        if isinstance(self.fill, Tensor) and self.fill.ndim == 4 and len(self.fill) > 1:
            raise UserError(
                f"the leak needs one fill for all images, got {list(self.fill.shape)}: pass a name,"
                " a number, [C] or [C,H,W]"
            )


@dataclass(frozen=True)
class Pool:
    """Where donors, and the masks behind the chance level, are drawn from."""

    images: Tensor  # [P,C,H,W]
    heatmaps: Tensor  # [P,H,W], or [MP,H,W] of several methods, method after method
    targets: Tensor  # [P]


@dataclass(frozen=True)
class LeakProbe:
    """A classifier, the pool that its donors come from, and the settings."""

    classifier: Classifier
    pool: Pool
    settings: LeakSettings

    @cached_property
    def canvas_classes(self) -> Tensor:
        """The class predicted for grey and noise through the pool's masks: [MP,1+noises]."""
        return self.canvas_classes_of(self.pool.heatmaps)

    def canvas_classes_of(self, heatmaps: Tensor) -> Tensor:
        """Return the class predicted for grey and noise through each mask: [N,1+noises]."""
        shape, settings = tuple(self.pool.images.shape[1:]), self.settings
        blank = canvases(shape, settings.seed, settings.noises)
        count, n = len(blank), len(heatmaps)
        every = torch.arange(n * count, device="cpu")
        return self._classes(blank, heatmaps, Views(every % count, every // count)).view(n, count)

    def donor_share(
        self,
        heatmaps: Tensor,
        masks: Tensor,
        drawn: Donors,
        targets: Tensor,
        tick: Progress | None,
    ) -> Tensor:
        """Return the share of each image's donors predicted as its target through masks: [N]."""
        views = Views(drawn.donors, masks)
        named = self._classes(self.pool.images, heatmaps, views, targets, tick)
        sums = torch.zeros(len(targets), dtype=torch.float64, device="cpu")
        return sums.index_add_(0, drawn.owners, hits(named, targets[drawn.owners])) / drawn.counts

    def _classes(
        self,
        images: Tensor,
        heatmaps: Tensor,
        views: Views,
        targets: Tensor | None = None,
        tick: Progress | None = None,
    ) -> Tensor:
        """Return the class predicted for each view through the mask M > alpha_min: [T]."""
        return predict_views(
            self.classifier,
            images,
            heatmaps,
            show(self.settings.alpha_min),
            views,
            targets=targets,
            fill=self.settings.fill,
            batch_size=self.settings.batch_size,
            progress=tick,
        )


def prepare(classifier: Classifier, pool: Pool, settings: LeakSettings) -> LeakProbe:
    """Return a probe that calls the model for the pool's masks when it is first needed."""
    return LeakProbe(classifier, replace(pool, targets=pool.targets.cpu()), settings)


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
    check_classifier(classifier)
    settings = LeakSettings(alpha_from(alpha_min), donors, seed, noises, fill, batch_size)
    probe = None
    if pool is not None:
        settings.check(images)
        known = checked_pool(pool)
        _check_size(known, images)
        probe = prepare(classifier, known, settings)
    with bar("measuring the leak", progress) as tick:
        return measure(classifier, images, heatmaps, targets, settings, probe, tick=tick)


def measure(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Tensor,
    targets: Tensor | None,
    settings: LeakSettings,
    probe: LeakProbe | None = None,
    *,
    numbers: Sequence[int] | None = None,
    strict: bool = True,
    tick: Progress | None = None,
) -> Leak:
    """Return the leak of images with these numbers among all images, 0, 1, ... by default.

    An image without a possible donor raises, or has NaN unless strict.
    """
    known = _checked(images, heatmaps, targets)
    settings.check(images)
    goals = _predictions(classifier, images, settings) if known is None else known.cpu()
    if strict:
        check_classes(goals, goals if probe is None else probe.pool.targets)
    if probe is None:
        probe = prepare(classifier, Pool(images, heatmaps, goals), settings)
        named = probe.canvas_classes
    else:
        _check_size(probe.pool, images)
        named = probe.canvas_classes_of(heatmaps)
    numbers = range(len(goals)) if numbers is None else numbers
    found = _found(probe, heatmaps, goals, named, numbers, tick)
    return found if known is not None else replace(found, calls=found.calls + 1)


def measure_methods(
    heatmaps: Mapping[str, Tensor], targets: Tensor, probe: LeakProbe, numbers: Sequence[int]
) -> dict[str, Leak]:
    """Return the leak of several methods on the same images, each [N,H,W], in one pass.

    `numbers` are those of the images among all images; donors are drawn by them. The probe's pool
    has heatmaps of the same methods, in the same order. Nothing is checked.
    """
    n, maps = len(targets), torch.cat(list(heatmaps.values()))
    found = _found(probe, maps, targets, probe.canvas_classes_of(maps), numbers, None)
    return {name: found.rows(slice(k * n, (k + 1) * n)) for k, name in enumerate(heatmaps)}


def _found(
    probe: LeakProbe,
    heatmaps: Tensor,
    targets: Tensor,
    named: Tensor,
    numbers: Sequence[int],
    tick: Progress | None,
) -> Leak:
    """Return the leak of M methods, method after method: [MN,H,W].

    `named` are the classes predicted for grey and noise through the masks: [MN,1+noises].
    """
    pool, settings, m = probe.pool, probe.settings, len(heatmaps) // len(targets)
    drawn = draw_donors(targets, pool.targets, settings.donors, settings.seed, numbers)
    drawn = drawn.of_methods(m, len(pool.targets))
    goals = targets.repeat(m)
    own = probe.donor_share(heatmaps, drawn.owners, drawn, goals, stage(tick, 0, 2))
    chance = probe.donor_share(pool.heatmaps, drawn.others, drawn, goals, stage(tick, 1, 2))
    canvas = hits(named, goals[:, None])
    each = probe.canvas_classes.chunk(m)
    by_chance = torch.cat([_canvas_chance(one, pool.targets, targets) for one in each])
    return Leak(
        donors=own,
        donors_chance=chance,
        grey=canvas[:, 0],
        grey_chance=by_chance[:, 0],
        noise=canvas[:, 1:].mean(1),
        noise_chance=by_chance[:, 1:].mean(1),
        calls=2 * drawn.counts + named.shape[1],
        alpha_min=settings.alpha_min,
    )


def _predictions(classifier: Classifier, images: Tensor, settings: LeakSettings) -> Tensor:
    """Return the class predicted for each whole image: [N]."""
    every = torch.arange(len(images), device="cpu")
    zeros = torch.zeros(1, *images.shape[2:], dtype=torch.float32, device="cpu")
    views, size = Views(every, torch.zeros_like(every)), settings.batch_size
    return predict_views(classifier, images, zeros, rest(math.inf), views, batch_size=size)


def _canvas_chance(named: Tensor, pool_targets: Tensor, targets: Tensor) -> Tensor:
    """Return how often the pool's masks of other classes are predicted as each target.

    [P,K] -> [N,K]; NaN predictions are ignored.
    """
    classes, place = targets.unique(return_inverse=True)
    rows = [hits(named[pool_targets != target], target).nanmean(0) for target in classes]
    return torch.stack(rows)[place]


def leak_warning(summary: Mapping[str, Estimate]) -> str | None:
    """Return what a reader of MSI must know about the leak, None where there is no problem."""
    ratios, own, chance = (summary[name] for name in ("leak_ratio", "leak", "leak_chance"))
    facts = (
        f"over images of other classes these masks make the model predict the mask's class in"
        f" {own.mean:.1%} of the cases, masks of other classes in {chance.mean:.1%}"
        f" ({_ratio_in_words(ratios)})"
    )
    if ratios.mean > LIMIT and ratios.low > 1:
        return (
            f"the masks leak: {facts}. Their shape alone tells the model the class, so MSI flatters"
            " this method"
        )
    if not (ratios.low > 1 or ratios.high <= 2 * LIMIT):
        return f"{ratios.n} images are too few to tell whether the masks leak: {facts}"
    return None


def _ratio_in_words(ratio: Estimate) -> str:
    """Return the ratio and its interval, as far as they exist."""
    if not math.isfinite(ratio.mean):
        return "no ratio: by chance it never happens here"
    if math.isnan(ratio.low):
        return f"ratio {ratio.mean:.2f}"
    if math.isinf(ratio.high):
        return f"ratio {ratio.mean:.2f}, 95 % interval from {ratio.low:.2f} without end"
    return f"ratio {ratio.mean:.2f}, 95 % interval {ratio.low:.2f} .. {ratio.high:.2f}"


def check_classes(targets: Tensor, pool_targets: Tensor) -> None:
    """Raise where an image has no possible donor, because the pool has its class only."""
    classes = pool_targets.unique()
    if len(classes) == 1 and (targets == classes.to(targets.device)).any():
        raise UserError(
            "the leak lays masks over images of other classes, and all are of class"
            f" {int(classes)}: pass images, or a pool, of two classes or more"
        )


def checked_pool(pool: Pool) -> Pool:
    """Return the pool with integer targets, or raise where it is incomplete."""
    if not isinstance(pool, Pool):
        raise UserError(
            f"pool must be a Pool, got {type(pool).__name__}: pass Pool(images, heatmaps, targets)"
        )
    targets = _checked(pool.images, pool.heatmaps, pool.targets)
    if targets is None:
        raise UserError("a pool needs targets: pass its labels, or classifier(images).argmax(1)")
    return replace(pool, targets=targets)


def _checked(images: Tensor, heatmaps: Tensor, targets: Tensor | None) -> Tensor | None:
    """Return integer targets, or raise for bad images, heatmaps or targets."""
    check_images(images)
    check_heatmaps(heatmaps, images)
    return check_targets(targets, len(images))


def _check_size(pool: Pool, images: Tensor) -> None:
    wanted, came = list(images.shape[1:]), list(pool.images.shape[1:])
    if wanted != came:
        raise UserError(
            f"the pool's images must be {wanted} as the others are, got {came}: resize them"
        )
