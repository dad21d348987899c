"""The metrics: one entry per column, with the bands it asks for and its formula.

To add a metric, add a line to METRICS, or pass your own to `evaluate(metrics={name: Metric(...)})`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sufficit.errors import UserError
from sufficit.metrics.curves import Curve, area, mean_height
from sufficit.perturbation import bands
from sufficit.perturbation.bands import Band
from sufficit.perturbation.predictions import Predictions, ScoreKind


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


@dataclass(frozen=True)
class Metric:
    """A column: its direction, the bands it needs scores and sizes of, and its formula."""

    higher_is_better: bool
    asks: Callable[[Schedule], list[Band]]
    formula: Callable[[Predictions, Schedule], Tensor]  # -> [N]
    weighs: Callable[[Schedule], list[Band]] = lambda _: []


def higher_is_better(column: str) -> bool | None:
    """Return the direction of a column, None where it has none."""
    return METRICS[column].higher_is_better if column in METRICS else OTHER_COLUMNS[column]


def alpha_from(value: object, wanted: str = "a number in 0..1") -> float:
    """Return an alpha_min as a float in 0..1, or raise."""
    try:
        alpha = float(value)  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError) as error:
        raise UserError(f"alpha_min must be {wanted}, got {value!r}") from error
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha_min must lie in 0..1, got {alpha:g}: the default is 0.5")
    return alpha


def show_bands(schedule: Schedule) -> list[Band]:
    """Return the bands of MSI's Show curve."""
    return [bands.show(a) for a in schedule.alphas]


def hide_bands(schedule: Schedule) -> list[Band]:
    """Return the bands of MSI's Hide curve."""
    return [bands.hide(schedule.alpha_min, a) for a in schedule.alphas]


CURVES: dict[str, tuple[Callable[[Schedule], list[Band]], str]] = {
    "insertion_pixel": (lambda s: [bands.show(a) for a in s.values], "values"),
    "deletion_pixel": (lambda s: [bands.rest(a) for a in s.values], "values"),
    "insertion_percent": (lambda s: [bands.top(k) for k in s.shares], "shares"),
    "deletion_percent": (lambda s: [bands.all_but_top(k) for k in s.shares], "shares"),
    "show": (show_bands, "alphas"),
    "hide": (hide_bands, "alphas"),
}  # the bands of each curve, and the property of the schedule that is its grid


def curves_of(predictions: Predictions, schedule: Schedule) -> dict[str, Curve]:
    """Return the curves by name, those whose bands were predicted."""
    found = {}
    for name, (asks, axis) in CURVES.items():
        asked = asks(schedule)
        if set(asked) <= set(predictions.bands):
            scores = (predictions.of(asked, kind) for kind in ("accuracy", "confidence"))
            found[name] = Curve(getattr(schedule, axis), *scores)
    return found


def base_score(predictions: Predictions, schedule: Schedule) -> Tensor:
    """1/2 [ Show(>a_min) - Show(<=a_min) + mean Show(>a) - mean Hide(>a) ], a in a_min..1: [N]."""
    show = predictions.of(show_bands(schedule), schedule.score)
    hide = predictions.of(hide_bands(schedule), schedule.score)
    rest = predictions.of([bands.rest(schedule.alpha_min)], schedule.score)[:, 0]
    alphas = schedule.alphas
    return (show[:, 0] - rest + mean_height(show, alphas) - mean_height(hide, alphas)) / 2


def mask_penalty(predictions: Predictions, schedule: Schedule) -> Tensor:
    """Share of the pixels at or above a_min: [N]."""
    return predictions.share(bands.at_least(schedule.alpha_min))


def msi(predictions: Predictions, schedule: Schedule) -> Tensor:
    """BaseScore - MaskPenalty: [N]."""
    return base_score(predictions, schedule) - mask_penalty(predictions, schedule)


def _base_bands(schedule: Schedule) -> list[Band]:
    return [*show_bands(schedule), *hide_bands(schedule), bands.rest(schedule.alpha_min)]


def _penalty_bands(schedule: Schedule) -> list[Band]:
    return [bands.at_least(schedule.alpha_min)]


def _area_metric(curve: str, higher: bool) -> Metric:
    """Area of the score under a curve."""
    asks, axis = CURVES[curve]
    return Metric(higher, asks, lambda p, s: area(p.of(asks(s), s.score), getattr(s, axis)))


def _fidelity_metric(curve: str, higher: bool) -> Metric:
    """Area of |p_y(x) - p_y(masked x)| over the grid of a curve."""
    asks, axis = CURVES[curve]

    def formula(predictions: Predictions, schedule: Schedule) -> Tensor:
        whole = predictions.of([bands.EVERYTHING], "confidence")
        masked = predictions.of(asks(schedule), "confidence")
        return area((whole - masked).abs(), getattr(schedule, axis))

    return Metric(higher, lambda s: [*asks(s), bands.EVERYTHING], formula)


METRICS: dict[str, Metric] = {
    "insertion_pixel": _area_metric("insertion_pixel", higher=True),
    "deletion_pixel": _area_metric("deletion_pixel", higher=False),
    "insertion_percent": _area_metric("insertion_percent", higher=True),
    "deletion_percent": _area_metric("deletion_percent", higher=False),
    "fid_minus_pixel": _fidelity_metric("insertion_pixel", higher=False),
    "fid_plus_pixel": _fidelity_metric("deletion_pixel", higher=True),
    "fid_minus_percent": _fidelity_metric("insertion_percent", higher=False),
    "fid_plus_percent": _fidelity_metric("deletion_percent", higher=True),
    "base_score": Metric(True, _base_bands, base_score),
    "mask_penalty": Metric(False, lambda _: [], mask_penalty, _penalty_bands),
    "msi": Metric(True, _base_bands, msi, _penalty_bands),
}
COLUMNS: tuple[str, ...] = tuple(METRICS)

OTHER_COLUMNS: dict[str, bool | None] = {
    "msi_held_out": True,
    "fill_drop": False,
    "leak": False,
    "leak_chance": None,
    "leak_grey": False,
    "leak_grey_chance": None,
    "leak_noise": False,
    "leak_noise_chance": None,
}  # columns that need more than the plan's predictions: whether higher is better
