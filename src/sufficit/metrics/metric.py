"""What a metric is made of: the points of its curves, the bands it asks for, its formula."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sufficit.perturbation import bands
from sufficit.perturbation.bands import Band
from sufficit.perturbation.image_masks import ImageMask
from sufficit.perturbation.predictions import Measure, Predictions, ScoreKind


@dataclass(frozen=True)
class Curve:
    """The score of each image along a grid."""

    grid: tuple[float, ...]  # [P]
    accuracy: Tensor  # [N,P]
    confidence: Tensor  # [N,P]


@dataclass(frozen=True)
class MeanCurve:
    """The score along a grid, averaged over images."""

    grid: tuple[float, ...]  # [P]
    values: Tensor  # [P], NaN where no image was asked

    @property
    def height(self) -> float:
        """The mean height over the points that are known."""
        # Where images were asked some masks each, a rare point may have been asked of none.
        known = (~self.values.isnan()).nonzero()[:, 0].tolist() or [0]
        weights = torch.tensor(mean_weights([self.grid[i] for i in known]), dtype=torch.float64)
        return (self.values[known] * weights).sum().item()


@dataclass(frozen=True)
class Schedule:
    """The points of the curves, and the kind of score."""

    alpha_min: float
    score: ScoreKind = "accuracy"
    value_step: float = 0.01
    percent_step: float = 0.02

    @property
    def values(self) -> tuple[float, ...]:
        """The alphas of the pixel-value curves."""
        return bands.grid(self.value_step)

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of the percentage curves."""
        return bands.grid(self.percent_step)

    @property
    def alphas(self) -> tuple[float, ...]:
        """The alphas of MSI's curves, from alpha_min, which need not be on the grid, to 1.

        >>> Schedule(0.7, value_step=0.5).alphas
        (0.7, 1.0)
        """
        return (self.alpha_min, *(point for point in self.values if point > self.alpha_min))


def no_bands(_: Schedule) -> list[Band]:
    """Return no bands, for any schedule."""
    return []


Formula = Callable[[Predictions, Schedule], Tensor]  # -> [N]


@dataclass(frozen=True)
class Metric:
    """A metric of bands: its direction, the bands it needs scores and sizes of, and its formula.

    Bands in `asks` are asked for every image. Those in `weights` may be sampled where calls are
    limited; the formula uses them only through `predictions.total(weights(schedule), ...)`. With a
    `fill` of its own the metric is scored with that fill alone, whatever the others are.
    """

    higher_is_better: bool | None
    asks: Callable[[Schedule], list[Band]]
    formula: Formula
    weighs: Callable[[Schedule], list[Band]] = no_bands
    weights: Callable[[Schedule], Mapping[Band, float]] = lambda _: {}
    fill: str | None = None


@dataclass(frozen=True)
class MapMetric:
    """A metric of the heatmap alone, or of heatmap and truth: no model is asked."""

    higher_is_better: bool | None
    measure: Callable[[Schedule], Measure]  # of an alpha_min
    needs_truth: bool = False


@dataclass(frozen=True)
class CellMetric:
    """A metric of image masks: cells of the image are hidden, the same ones for every heatmap.

    The formula gets the sum of each heatmap over the hidden pixels, and the fall of the target's
    probability without them: twice [N,len(masks)] -> [N].
    """

    higher_is_better: bool | None
    masks: tuple[ImageMask, ...]
    formula: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SeenMetric:
    """A metric of the image through the heatmap: each pixel times its value, the rest the fill.

    The formula gets the target's probability for the whole image and for that one, both [N].
    """

    higher_is_better: bool | None
    formula: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RedrawnMetric:
    """A metric of the heatmap and the one that its method draws for the image through it.

    Only a run can draw again, so `evaluate`, which gets heatmaps, has no such column.
    """

    higher_is_better: bool | None
    measure: Callable[[Tensor, Tensor], Tensor]  # both [N,H,W] -> [N]


@dataclass(frozen=True)
class DerivedMetric:
    """A metric that is computed from other columns of the same image: [N,len(of)] -> [N]."""

    higher_is_better: bool | None
    of: tuple[str, ...]
    formula: Callable[[Tensor], Tensor]


AnyMetric = Metric | MapMetric | CellMetric | SeenMetric | RedrawnMetric | DerivedMetric


def of_map(higher_is_better: bool, measure: Measure, *, needs_truth: bool = False) -> MapMetric:
    """Return the metric that a measure of the heatmap is, whatever alpha_min is."""
    return MapMetric(
        higher_is_better=higher_is_better, measure=lambda _: measure, needs_truth=needs_truth
    )


def of_region(
    higher_is_better: bool, make: Callable[[float], Measure], *, needs_truth: bool = False
) -> MapMetric:
    """Return the metric that a measure of the region at alpha_min is; `make` takes alpha_min."""
    return MapMetric(
        higher_is_better=higher_is_better,
        measure=lambda schedule: make(schedule.alpha_min),
        needs_truth=needs_truth,
    )


def area_weights(grid: Sequence[float]) -> list[float]:
    """Return the weight of each point of a grid in the trapezoid area: P -> P.

    >>> area_weights((0.0, 0.5, 1.0))
    [0.25, 0.5, 0.25]
    """
    before, after = (grid[0], *grid[:-1]), (*grid[1:], grid[-1])
    return [(high - low) / 2 for low, high in zip(before, after, strict=True)]


def mean_weights(grid: Sequence[float]) -> list[float]:
    """Return the weights of area over width, or 1 for the only point of a grid: P -> P."""
    width = grid[-1] - grid[0]
    return [weight / width for weight in area_weights(grid)] if width > 0 else [1.0]


CURVES: dict[str, Callable[[Schedule], dict[float, Band]]] = {
    "insertion_pixel": lambda s: {a: bands.show(a) for a in s.values},
    "deletion_pixel": lambda s: {a: bands.rest(a) for a in s.values},
    "insertion_percent": lambda s: {k: bands.top(k) for k in s.shares},
    "deletion_percent": lambda s: {k: bands.all_but_top(k) for k in s.shares},
    "show": lambda s: {a: bands.show(a) for a in s.alphas},
    "hide": lambda s: {a: bands.hide(s.alpha_min, a) for a in s.alphas},
}  # the band at each point of a curve; the last two are MSI's, from alpha_min to 1


def curves_of(predictions: Predictions, schedule: Schedule) -> dict[str, Curve]:
    """Return the curves by name, those whose bands were predicted."""
    found = {}
    for name, curve in CURVES.items():
        points = curve(schedule)
        asked = [*points.values()]
        if predictions.asked(asked):
            scores = (predictions.of(asked, kind) for kind in ("accuracy", "confidence"))
            found[name] = Curve((*points,), *scores)
    return found


def curve_weights(curve: str) -> Callable[[Schedule], dict[Band, float]]:
    """Return the weights of the area under a curve, by schedule."""

    def weights(schedule: Schedule) -> dict[Band, float]:
        points = CURVES[curve](schedule)
        return dict(zip(points.values(), area_weights([*points]), strict=True))

    return weights


def weighted(
    higher_is_better: bool,
    weights: Callable[[Schedule], Mapping[Band, float]],
    kind: ScoreKind | None = None,
) -> Metric:
    """Return the column that is the sum of weight x score, of the schedule's kind by default."""

    def formula(predictions: Predictions, schedule: Schedule) -> Tensor:
        return predictions.total(weights(schedule), kind or schedule.score)

    return Metric(
        higher_is_better=higher_is_better, asks=no_bands, formula=formula, weights=weights
    )
