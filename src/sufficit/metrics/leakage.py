"""`leak`: how often a mask makes the model say the mask's own class over what is not that class."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier, check_classifier
from sufficit.intervals import Estimate, estimates, ratio, ratio_estimate
from sufficit.metrics.probe import (
    Pool,
    Probe,
    Setting,
    canvas_chance,
    check_classes,
    check_size,
    checked,
    checked_pool,
    draw_all,
    hits,
    predictions,
    prepare,
)
from sufficit.metrics.registry import alpha_from, higher_is_better
from sufficit.perturbation.types import Progress
from sufficit.progress import bar, stage

POOL = 256  # images of a folder that serve as donors
LIMIT = 1.5  # a ratio above it is worth a warning
TENSORS = ("donors", "donors_chance", "grey", "grey_chance", "noise", "noise_chance", "calls")


@dataclass(frozen=True)
class Leak:
    """Shares an image of what is called the mask's class, beside those by chance; on the CPU."""

    donors: Tensor  # [N] images of other classes, seen through the image's mask
    donors_chance: Tensor  # [N] the same donors through masks of other classes
    grey: Tensor  # [N] plain grey through the image's mask
    grey_chance: Tensor  # [N] plain grey through the masks of other classes
    noise: Tensor  # [N] pictures of noise through the image's mask
    noise_chance: Tensor  # [N] the same through the masks of other classes
    calls: Tensor  # [N] model calls spent on each image
    alpha_min: float

    def __len__(self) -> int:
        return len(self.donors)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:.4f}" for name, value in self.mean().items())
        return f"Leak(n={len(self)}, ratio={self.ratio:.4f}, {values})"

    @property
    def columns(self) -> dict[str, Tensor]:
        """The shares by the names they have in tables and files: each [N]."""
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
        """Mean leak over mean chance; at a chance of 0 infinite, or NaN where leak is 0 too."""
        means = self.mean()
        return float(ratio(means["leak"], means["leak_chance"]))

    def mean(self) -> dict[str, float]:
        """Mean of each column, NaN left out."""
        return {name: values.nanmean().item() for name, values in self.columns.items()}

    def estimates(self, seed: int = 0) -> dict[str, Estimate]:
        """Every mean, and `leak_ratio`, with a 95 % bootstrap interval over the images."""
        values = {name: column.numpy() for name, column in self.columns.items()}
        found = estimates(values, {name: higher_is_better(name) for name in values}, seed=seed)
        ratios = ratio_estimate(values["leak"], values["leak_chance"], seed=seed)
        return found | {"leak_ratio": ratios}

    def rows(self, some: slice) -> "Leak":
        """What was measured of some of the images."""
        return replace(self, **{name: getattr(self, name)[some] for name in TENSORS})

    @staticmethod
    def join(parts: Sequence["Leak"]) -> "Leak":
        """What was measured of several batches as one, in their order."""
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in TENSORS}
        return Leak(**joined, alpha_min=parts[0].alpha_min)


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
    """How often the mask M > alpha_min makes the model say its class over images of other classes.

    Donors, and the masks that stand for chance, come from the pool, or from the images themselves;
    which ones, follows from the seed, an image's number and the pool. An image with fewer possible
    donors than asked for gets all there are, each once.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten())   # which half is brighter
    >>> images = torch.full((2, 1, 4, 4), 0.5)
    >>> heatmaps = torch.zeros(2, 4, 4)
    >>> heatmaps[0, :2], heatmaps[1, 2:] = 1, 1                       # each mask shows its own half
    >>> leak(Classifier(model), images, heatmaps, torch.tensor([0, 1])).mean()["leak"]
    1.0
    """
    check_classifier(classifier)
    setting = Setting(alpha_from(alpha_min), donors, seed, noises, fill, batch_size)
    probe = None
    if pool is not None:
        setting.check(images)
        known = checked_pool(pool)
        check_size(known, images)
        probe = prepare(classifier, known, setting)
    with bar("measuring the leak", progress) as tick:
        return measure(classifier, images, heatmaps, targets, setting, probe, tick=tick)


def measure(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Tensor,
    targets: Tensor | None,
    setting: Setting,
    probe: Probe | None = None,
    *,
    first: int = 0,
    strict: bool = True,
    tick: Progress | None = None,
) -> Leak:
    """The leak of images of which the first has this number among all.

    Unless strict, images without a possible donor have NaN.
    """
    known = checked(images, heatmaps, targets)
    setting.check(images)
    goals = predictions(classifier, images, setting) if known is None else known.cpu()
    if strict:
        check_classes(goals, goals if probe is None else probe.pool.targets)
    if probe is None:
        probe = prepare(classifier, Pool(images, heatmaps, goals), setting)
        said = probe.said
    else:
        check_size(probe.pool, images)
        said = probe.named_canvases(heatmaps)
    found = _found(probe, heatmaps, goals, said, first, tick)
    return found if known is not None else replace(found, calls=found.calls + 1)


def measure_methods(
    heatmaps: Mapping[str, Tensor], targets: Tensor, probe: Probe, first: int
) -> dict[str, Leak]:
    """The leak of several methods' heatmaps of the same images, each [N,H,W], all asked in one go.

    The probe's pool has heatmaps by these methods, in their order. Nothing is checked.
    """
    n, maps = len(targets), torch.cat(list(heatmaps.values()))
    found = _found(probe, maps, targets, probe.named_canvases(maps), first, None)
    return {name: found.rows(slice(k * n, (k + 1) * n)) for k, name in enumerate(heatmaps)}


def _found(
    probe: Probe,
    heatmaps: Tensor,
    targets: Tensor,
    said: Tensor,
    first: int,
    tick: Progress | None,
) -> Leak:
    """The leak, given what the model says of grey and noise through the masks: [MN,1+noises].

    Heatmaps are those of M methods, one after the other: [MN,H,W].
    """
    pool, m = probe.pool, len(heatmaps) // len(targets)
    draws = draw_all(targets, pool.targets, probe.setting, first).of_methods(m, len(pool.targets))
    goals = targets.repeat(m)
    own = probe.through(heatmaps, draws.owners, draws, goals, stage(tick, 0, 2))
    chance = probe.through(pool.heatmaps, draws.others, draws, goals, stage(tick, 1, 2))
    canvases = hits(said, goals[:, None])
    by_chance = torch.cat([canvas_chance(s, pool.targets, targets) for s in probe.said.chunk(m)])
    return Leak(
        own,
        chance,
        canvases[:, 0],
        by_chance[:, 0],
        canvases[:, 1:].mean(1),
        by_chance[:, 1:].mean(1),
        2 * draws.counts + said.shape[1],
        probe.setting.alpha_min,
    )


def leak_warning(summary: Mapping[str, Estimate]) -> str | None:
    """What a reader of MSI must know of the leak, in plain words; None where all is well."""
    ratios, own, chance = (summary[name] for name in ("leak_ratio", "leak", "leak_chance"))
    facts = (
        f"over images of other classes these masks make the model say the mask's own class in"
        f" {own.mean:.1%} of the cases, where masks of other classes do so in {chance.mean:.1%}"
        f" ({_ratio_in_words(ratios)})"
    )
    if ratios.mean > LIMIT and ratios.low > 1:
        return (
            f"the masks leak: {facts}. Their shape itself tells the model the class, whatever the"
            " image shows, so MSI flatters this method"
        )
    if not (ratios.low > 1 or ratios.high <= 2 * LIMIT):
        return f"{ratios.n} images are too few to tell whether the masks leak: {facts}"
    return None


def _ratio_in_words(ratio: Estimate) -> str:
    """The ratio and its interval, as far as there are any."""
    if not math.isfinite(ratio.mean):
        return "no ratio: by chance it never happens here"
    if math.isnan(ratio.low):
        return f"ratio {ratio.mean:.2f}"
    if math.isinf(ratio.high):
        return f"ratio {ratio.mean:.2f}, 95 % interval from {ratio.low:.2f} without end"
    return f"ratio {ratio.mean:.2f}, 95 % interval {ratio.low:.2f} .. {ratio.high:.2f}"
