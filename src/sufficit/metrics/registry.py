"""One entry a column: the bands it asks for, and how it reads the answers back.

To add a metric, write what it asks and what it makes of the answers, and add a line to METRICS; one
that is yours alone goes to `evaluate(metrics={name: Metric(...)})`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from sufficit.errors import UserError
from sufficit.metrics.areas import area, from_point, mean_height
from sufficit.perturbation import bands
from sufficit.perturbation.types import Band, Predictions, ScoreKind


@dataclass(frozen=True)
class Schedule:
    """Where the curves have their points, and what counts as a score."""

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
        """The alphas of MSI's curves: from alpha_min to 1."""
        return from_point(self.values, self.alpha_min)


@dataclass(frozen=True)
class Metric:
    """A column: its direction, the bands it asks of the model and weighs, and its formula."""

    higher_is_better: bool
    asks: Callable[[Schedule], list[Band]]
    formula: Callable[[Predictions, Schedule], Tensor]  # -> [N]
    weighs: Callable[[Schedule], list[Band]] = lambda _: []


def higher_is_better(column: str) -> bool | None:
    """The direction of a column, None where it has none."""
    return METRICS[column].higher_is_better if column in METRICS else BESIDE[column]


def alpha_from(value: object, wanted: str = "a number in 0..1") -> float:
    """An alpha_min in 0..1 from whatever calls itself a number."""
    try:
        alpha = float(value)  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError) as error:
        raise UserError(f"alpha_min must be {wanted}, got {value!r}") from error
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha_min must lie in 0..1, got {alpha:g}")
    return alpha


def insertion_pixel_bands(schedule: Schedule) -> list[Band]:
    """Show(>a) for every alpha."""
    return [bands.show(a) for a in schedule.values]


def deletion_pixel_bands(schedule: Schedule) -> list[Band]:
    """Show(<=a) for every alpha."""
    return [bands.rest(a) for a in schedule.values]


def insertion_percent_bands(schedule: Schedule) -> list[Band]:
    """The top k % for every k."""
    return [bands.top(k) for k in schedule.shares]


def deletion_percent_bands(schedule: Schedule) -> list[Band]:
    """All but the top k % for every k."""
    return [bands.all_but_top(k) for k in schedule.shares]


def show_bands(schedule: Schedule) -> list[Band]:
    """MSI's Show curve."""
    return [bands.show(a) for a in schedule.alphas]


def hide_bands(schedule: Schedule) -> list[Band]:
    """MSI's Hide curve."""
    return [bands.hide(schedule.alpha_min, a) for a in schedule.alphas]


def base_score_bands(schedule: Schedule) -> list[Band]:
    """All that BaseScore asks."""
    return [*show_bands(schedule), *hide_bands(schedule), bands.rest(schedule.alpha_min)]


def base_score(answers: Predictions, schedule: Schedule) -> Tensor:
    """1/2 [ Show(>a_min) - Show(<=a_min) + mean Show(>a) - mean Hide(>a) ], a in a_min..1: [N]."""
    show = answers.of(show_bands(schedule), schedule.score)
    hide = answers.of(hide_bands(schedule), schedule.score)
    rest = answers.of([bands.rest(schedule.alpha_min)], schedule.score)[:, 0]
    alphas = schedule.alphas
    return (show[:, 0] - rest + mean_height(show, alphas) - mean_height(hide, alphas)) / 2


def mask_penalty(answers: Predictions, schedule: Schedule) -> Tensor:
    """Share of the pixels at or above a_min: [N]."""
    return answers.share(bands.at_least(schedule.alpha_min))


def msi(answers: Predictions, schedule: Schedule) -> Tensor:
    """BaseScore - MaskPenalty: [N]."""
    return base_score(answers, schedule) - mask_penalty(answers, schedule)


def _penalty_bands(schedule: Schedule) -> list[Band]:
    return [bands.at_least(schedule.alpha_min)]


def _area(
    asks: Callable[[Schedule], list[Band]], axis: str, answers: Predictions, schedule: Schedule
) -> Tensor:
    """Area of the score over the axis: [N]."""
    return area(answers.of(asks(schedule), schedule.score), getattr(schedule, axis))


def _gap(
    asks: Callable[[Schedule], list[Band]], axis: str, answers: Predictions, schedule: Schedule
) -> Tensor:
    """Area of |p_y(x) - p_y(masked x)| over the axis: [N]."""
    whole = answers.of([bands.EVERYTHING], "confidence")
    masked = answers.of(asks(schedule), "confidence")
    return area((whole - masked).abs(), getattr(schedule, axis))


def _curve_metric(asks: Callable[[Schedule], list[Band]], axis: str, higher: bool) -> Metric:
    return Metric(higher, asks, partial(_area, asks, axis))


def _gap_metric(asks: Callable[[Schedule], list[Band]], axis: str, higher: bool) -> Metric:
    return Metric(higher, lambda s: [*asks(s), bands.EVERYTHING], partial(_gap, asks, axis))


METRICS: dict[str, Metric] = {
    "insertion_pixel": _curve_metric(insertion_pixel_bands, "values", higher=True),
    "deletion_pixel": _curve_metric(deletion_pixel_bands, "values", higher=False),
    "insertion_percent": _curve_metric(insertion_percent_bands, "shares", higher=True),
    "deletion_percent": _curve_metric(deletion_percent_bands, "shares", higher=False),
    "fid_minus_pixel": _gap_metric(insertion_pixel_bands, "values", higher=False),
    "fid_plus_pixel": _gap_metric(deletion_pixel_bands, "values", higher=True),
    "fid_minus_percent": _gap_metric(insertion_percent_bands, "shares", higher=False),
    "fid_plus_percent": _gap_metric(deletion_percent_bands, "shares", higher=True),
    "base_score": Metric(True, base_score_bands, base_score),
    "mask_penalty": Metric(False, lambda _: [], mask_penalty, _penalty_bands),
    "msi": Metric(True, base_score_bands, msi, _penalty_bands),
}
COLUMNS: tuple[str, ...] = tuple(METRICS)

BESIDE: dict[str, bool | None] = {
    "msi_held_out": True,
    "fill_drop": False,
    "leak": False,
    "leak_chance": None,
    "leak_grey": False,
    "leak_grey_chance": None,
    "leak_noise": False,
    "leak_noise_chance": None,
}  # columns that more is done for than reading the answers back: whether higher is better

CURVES: dict[str, tuple[Callable[[Schedule], list[Band]], str]] = {
    "insertion_pixel": (insertion_pixel_bands, "values"),
    "deletion_pixel": (deletion_pixel_bands, "values"),
    "insertion_percent": (insertion_percent_bands, "shares"),
    "deletion_percent": (deletion_percent_bands, "shares"),
    "show": (show_bands, "alphas"),
    "hide": (hide_bands, "alphas"),
}
