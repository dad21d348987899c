"""A plan merges the bands that all metrics need, and `ask` sends them to the model in one pass."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError, unknown
from sufficit.metrics import columns as registry
from sufficit.metrics.columns import COLUMNS, METRICS, OTHER_COLUMNS, Metric, Schedule
from sufficit.perturbation.bands import EVERYTHING, Band, grid
from sufficit.perturbation.fills import check_fill
from sufficit.perturbation.predict import check_batch_size, predict
from sufficit.perturbation.predictions import Predictions, ScoreKind
from sufficit.progress import Progress, stage

ALPHA_GRID: tuple[float, ...] = tuple(i / 20 for i in range(1, 20))
RESERVED = (
    *("image", "target", "clean_accuracy"),  # columns of tables
    *("plan", "answers", "columns", "alpha_min", "search", "held_out", "leaked"),  # of Scores
    *("targets", "calls", "leak_ratio", "clean", "mean", "summary", "nan_counts"),
    *("curves", "mean_curves", "frame", "_schedule"),
)  # names that a metric must not have


@dataclass(frozen=True)
class Plan:
    """What is wanted, and the merged bands that all of it needs."""

    schedules: tuple[Schedule, ...]  # one per alpha_min tried
    columns: tuple[str, ...] = COLUMNS
    searching: bool = False
    own: Mapping[str, Metric] = field(default_factory=dict)  # the user's metrics

    def metric(self, name: str) -> Metric:
        """Return the metric of a column."""
        return self.own[name] if name in self.own else METRICS[name]

    def higher_is_better(self, name: str) -> bool | None:
        """Return the direction of a column, None where it has none."""
        if name in self.own:
            return self.own[name].higher_is_better
        return registry.higher_is_better(name)

    @cached_property
    def asks(self) -> tuple[Band, ...]:
        """Every band the model must be called for, once."""
        return self._merged("asks", self.columns, EVERYTHING)

    @cached_property
    def msi_asks(self) -> tuple[Band, ...]:
        """Every band that MSI alone needs, once."""
        return self._merged("asks", ["msi"])

    @cached_property
    def weighs(self) -> tuple[Band, ...]:
        """Every band whose size is needed, once."""
        return self._merged("weighs", self.columns)

    def _merged(self, part: str, columns: Iterable[str], *first: Band) -> tuple[Band, ...]:
        wanted = (getattr(self.metric(name), part)(s) for s in self.schedules for name in columns)
        return tuple(dict.fromkeys([*first, *(band for found in wanted for band in found)]))


def make_plan(
    alpha_min: float | Literal["search"] = 0.5,
    score: ScoreKind = "accuracy",
    value_step: float = 0.01,
    percent_step: float = 0.02,
    columns: Sequence[str] | None = None,
    alphas: Sequence[float] = ALPHA_GRID,
    metrics: Mapping[str, Metric] | None = None,
) -> Plan:
    """Return the plan for some columns, all by default, once the options are checked."""
    searching = isinstance(alpha_min, str) and alpha_min == "search"
    given, kind = alphas if searching else [alpha_min], 'a number in 0..1 or "search"'
    tried = sorted({registry.alpha_from(alpha, kind) for alpha in given})
    if not tried:
        raise UserError("alphas must name at least one alpha_min in 0..1 to try, got none")
    if score not in ("accuracy", "confidence"):
        raise unknown("score", str(score), ("accuracy", "confidence"))
    for step in (value_step, percent_step):
        grid(step)  # raises for a bad step
    own = dict(metrics or {})
    for name, metric in own.items():
        if not isinstance(metric, Metric):
            raise UserError(
                f"metrics must be sufficit.metrics.Metric by name, got {type(metric).__name__} for"
                f" {name!r}"
            )
        if name in {*METRICS, *OTHER_COLUMNS, *RESERVED} or name.startswith("__"):
            raise UserError(f"cannot call a metric {name!r}: the name is taken, choose another")
    known = (*COLUMNS, *own)
    wanted = known if columns is None else (columns,) if isinstance(columns, str) else columns
    for name in wanted:
        if name not in known:
            raise unknown("column", name, known)
    if not wanted:
        raise UserError("columns must name at least one column, got none: leave it out for all")
    if searching and "msi" not in wanted:
        raise UserError('alpha_min="search" maximises MSI: add "msi" to columns')
    schedules = tuple(Schedule(alpha, score, value_step, percent_step) for alpha in tried)
    return Plan(schedules, tuple(wanted), searching, own)


def check_asking(
    plan: Plan, fill: str | Tensor, held_out: str | Tensor | None, batch_size: int | None
) -> None:
    """Raise, before any image is read, where options contradict each other."""
    check_batch_size(batch_size)
    if held_out is not None and "msi" not in plan.columns:
        raise UserError('held_out_fill scores MSI a second time: add "msi" to columns')
    if isinstance(held_out, str) and isinstance(fill, str) and held_out == fill:
        raise UserError(f"fill and held_out_fill are both {fill!r}: hold another fill out")


def ask(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Tensor,
    targets: Tensor | None,
    plan: Plan,
    fill: str | Tensor = "black",
    held_out_fill: str | Tensor | None = None,
    batch_size: int | None = None,
    *,
    tick: Progress | None = None,
    stages: int | None = None,
) -> tuple[Predictions, Predictions | None]:
    """Return the predictions a plan needs, and those MSI needs with the held-out fill.

    Only the fills are checked. Heatmaps of several methods may come in one tensor, method after
    method, so that a GPU never waits in between.
    """
    check_fill(fill, images)
    if held_out_fill is not None:
        check_fill(held_out_fill, images)
    asked = partial(predict, classifier, images, heatmaps, weigh=plan.weighs, batch_size=batch_size)
    stages = stages or 1 + (held_out_fill is not None)
    predictions = asked(targets, plan.asks, fill=fill, progress=stage(tick, 0, stages))
    if held_out_fill is None:
        return predictions, None
    goals, second = predictions.targets[: len(images)], stage(tick, 1, stages)
    return predictions, asked(goals, plan.msi_asks, fill=held_out_fill, progress=second)
