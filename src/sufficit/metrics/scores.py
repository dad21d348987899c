"""`evaluate`: ask for all bands at once, read every column back."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier, check_classifier, check_images, check_targets
from sufficit.errors import UserError, unknown
from sufficit.metrics.curves import Curve, MeanCurve, averaged, curves_of
from sufficit.metrics.leakage import Leak, leak
from sufficit.metrics.probe import Setting, check_classes
from sufficit.metrics.registry import (
    BESIDE,
    COLUMNS,
    METRICS,
    Metric,
    Schedule,
    alpha_from,
    higher_is_better,
    msi,
)
from sufficit.perturbation.bands import EVERYTHING, grid
from sufficit.perturbation.fills import check_fill
from sufficit.perturbation.heatmaps import check_heatmaps
from sufficit.perturbation.predict import check_batch_size, predict
from sufficit.perturbation.types import Band, Predictions, Progress, ScoreKind
from sufficit.progress import bar, stage

if TYPE_CHECKING:
    import pandas

ALPHA = 'a number in 0..1 or "search"'
_FACTS = ("image", "target", "clean_accuracy", "plan", "answers", "columns", "alpha_min")
ALPHA_GRID: tuple[float, ...] = tuple(i / 20 for i in range(1, 20))


@dataclass(frozen=True)
class Plan:
    """What is wanted, and the merged bands that all of it needs."""

    schedules: tuple[Schedule, ...]  # one for each alpha_min tried
    columns: tuple[str, ...] = COLUMNS
    searching: bool = False
    own: Mapping[str, Metric] = field(default_factory=dict)  # metrics of the user's own

    def metric(self, name: str) -> Metric:
        """How a column is made."""
        return self.own[name] if name in self.own else METRICS[name]

    def higher_is_better(self, name: str) -> bool | None:
        """The direction of a column, None where it has none."""
        return self.own[name].higher_is_better if name in self.own else higher_is_better(name)

    @cached_property
    def asks(self) -> tuple[Band, ...]:
        """Every band the model must be asked, once."""
        wanted = (self.metric(name).asks(s) for s in self.schedules for name in self.columns)
        return tuple(dict.fromkeys([EVERYTHING, *(band for asked in wanted for band in asked)]))

    @cached_property
    def msi_asks(self) -> tuple[Band, ...]:
        """Every band that MSI alone needs, once."""
        wanted = (METRICS["msi"].asks(s) for s in self.schedules)
        return tuple(dict.fromkeys(band for asked in wanted for band in asked))

    @cached_property
    def weighs(self) -> tuple[Band, ...]:
        """Every band whose size is wanted, once."""
        wanted = (self.metric(name).weighs(s) for s in self.schedules for name in self.columns)
        return tuple(dict.fromkeys(band for weighed in wanted for band in weighed))


@dataclass(frozen=True)
class AlphaSearch:
    """MSI at every value of alpha_min that was tried."""

    alphas: tuple[float, ...]
    msi: Tensor  # [N,A]

    @property
    def means(self) -> Tensor:
        """Mean MSI over the images at each value, NaN left out: [A]."""
        return self.msi.nanmean(0)

    @property
    def best(self) -> float:
        """The value with the highest mean MSI, the smaller of two that tie."""
        return self.alphas[int(self.means.nan_to_num(-torch.inf).argmax())]


@dataclass(frozen=True)
class Scores:
    """One value an image for each column: `scores.msi`, `scores["msi"]`; all on the CPU."""

    plan: Plan
    answers: Predictions
    columns: dict[str, Tensor]  # each [N]
    alpha_min: float
    search: AlphaSearch | None = None
    held_out: Predictions | None = None  # with the held-out fill
    leaked: Leak | None = None

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("__") or name == "columns":
            raise AttributeError(name)
        try:
            return self[name]
        except UserError as error:
            raise AttributeError(str(error)) from error

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.columns:
            raise unknown("column", name, self.columns)
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.answers.targets)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:.4f}" for name, value in self.mean().items())
        return f"Scores(n={len(self)}, alpha_min={self.alpha_min:g}, {values})"

    @property
    def targets(self) -> Tensor:
        """The class each image was scored for: [N]."""
        return self.answers.targets

    @property
    def calls(self) -> Tensor:
        """Model calls spent on each image: [N]."""
        beside = (part.calls for part in (self.held_out, self.leaked) if part is not None)
        return sum(beside, start=self.answers.calls)

    @property
    def leak_ratio(self) -> float:
        """Mean leak over mean chance, where `leak_donors` asked for it."""
        if self.leaked is None:
            raise AttributeError("leak_ratio")
        return self.leaked.ratio

    @property
    def clean(self) -> Tensor:
        """Whether the model gives each whole image its target class: [N]."""
        return self.answers.of([EVERYTHING], "accuracy")[:, 0]

    def mean(self) -> dict[str, float]:
        """Mean of each column; NaN values are left out (`nan_counts` says how many)."""
        return {name: values.nanmean().item() for name, values in self.columns.items()}

    def nan_counts(self) -> dict[str, int]:
        """How many images have no value in each column, because the model answered NaN."""
        return {name: int(values.isnan().sum()) for name, values in self.columns.items()}

    def curves(self) -> dict[str, Curve]:
        """The curves behind the columns, by name, as far as they were asked for."""
        return curves_of(self.answers, self._schedule())

    def curve_pieces(self) -> Iterator[dict[str, Curve]]:
        """The curves of some images at a time, for more images than memory would hold."""
        return (curves_of(some, self._schedule()) for some in self.answers.pieces())

    def mean_curves(self) -> dict[str, MeanCurve]:
        """Each curve averaged over the images, NaN left out, by the score that was chosen."""
        return averaged(self.curve_pieces(), self._schedule().score)

    def frame(self) -> "pandas.DataFrame":
        """One row an image: target, whether the whole image is given it, calls, all columns."""
        import pandas

        facts = {"target": self.targets, "clean_accuracy": self.clean, "calls": self.calls}
        return pandas.DataFrame({name: v.numpy() for name, v in {**facts, **self.columns}.items()})

    def _schedule(self) -> Schedule:
        return next(s for s in self.plan.schedules if s.alpha_min == self.alpha_min)


def evaluate(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Tensor,
    targets: Tensor | None = None,
    *,
    alpha_min: float | Literal["search"] = 0.5,
    score: ScoreKind = "accuracy",
    fill: str | Tensor = "black",
    value_step: float = 0.01,
    percent_step: float = 0.02,
    batch_size: int | None = None,
    columns: Sequence[str] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    alphas: Sequence[float] = ALPHA_GRID,
    held_out_fill: str | Tensor | None = None,
    leak_donors: int = 0,
    seed: int = 0,
    progress: bool | Progress | None = None,
) -> Scores:
    """Score heatmaps of images, both in 0..1: [N,C,H,W], [N,H,W] -> a value an image and column.

    Without targets the model's own prediction is the target. `alpha_min="search"` tries `alphas`
    and takes the one with the best mean MSI. `columns` asks for some of the columns only, and
    `metrics` adds columns of your own: {name: Metric}.
    `held_out_fill` scores MSI with another fill as well; `leak_donors` measures the leak over so
    many donors an image, drawn by the seed. In a terminal a progress bar shows by itself when it
    takes long; progress=True or False decides, and a function is told (done, total).

    >>> from torch import nn
    >>> model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    >>> _ = nn.init.zeros_(model[2].bias), nn.init.eye_(model[2].weight)
    >>> images = torch.zeros(1, 3, 4, 4)
    >>> images[:, 1, 0, 0] = 1                              # the one pixel that makes it class 1
    >>> scores = evaluate(Classifier(model), images, images[:, 1])
    >>> scores.msi, scores.calls
    (tensor([0.9275], dtype=torch.float64), tensor([32]))
    """
    check_classifier(classifier)
    check_images(images)
    check_heatmaps(heatmaps, images)
    targets = check_targets(targets, len(images))
    plan = make_plan(alpha_min, score, value_step, percent_step, columns, alphas, metrics)
    check_asking(plan, fill, held_out_fill, batch_size)
    if leak_donors:  # what `leak` would refuse afterwards
        Setting(0, leak_donors, seed, fill=fill).check(images)
        if targets is not None:
            check_classes(targets, targets)
    stages = 1 + (held_out_fill is not None) + bool(leak_donors)
    with bar("scoring", progress) as tick:
        given = (classifier, images, heatmaps, targets, plan, fill, held_out_fill, batch_size)
        answers, held_out = ask(*given, tick=tick, stages=stages)
        scores = read(answers, plan, held_out)
        if not leak_donors or _of_one_class(scores, targets):
            return scores
        found = leak(
            classifier,
            images,
            heatmaps,
            scores.targets,
            alpha_min=scores.alpha_min,
            donors=leak_donors,
            seed=seed,
            fill=fill,
            batch_size=batch_size,
            progress=stage(tick, stages - 1, stages) or False,
        )
    return with_leak(scores, found)


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
    """What the model says of all that a plan asks; with the held-out fill, what MSI needs of it.

    Of what is given the fills alone are checked. Heatmaps of several methods, one method's after
    the other's, are asked in one go: a GPU then waits for nobody in between.
    """
    check_fill(fill, images)
    if held_out_fill is not None:
        check_fill(held_out_fill, images)
    asked = partial(predict, classifier, images, heatmaps, weigh=plan.weighs, batch_size=batch_size)
    stages = stages or 1 + (held_out_fill is not None)
    answers = asked(targets, plan.asks, fill=fill, progress=stage(tick, 0, stages))
    if held_out_fill is None:
        return answers, None
    goals, told = answers.targets[: len(images)], stage(tick, 1, stages)
    return answers, asked(goals, plan.msi_asks, fill=held_out_fill, progress=told)


def _of_one_class(scores: Scores, targets: Tensor | None) -> bool:
    """Whether the model calls all images alike, so that there is no leak; it is said then."""
    if targets is not None or len(scores.targets.unique()) > 1:
        return False
    warnings.warn("no leak: the model's predictions are all of one class", stacklevel=3)
    return True


def make_plan(
    alpha_min: float | Literal["search"] = 0.5,
    score: ScoreKind = "accuracy",
    value_step: float = 0.01,
    percent_step: float = 0.02,
    columns: Sequence[str] | None = None,
    alphas: Sequence[float] = ALPHA_GRID,
    metrics: Mapping[str, Metric] | None = None,
) -> Plan:
    """Check what is wanted and lay it out."""
    searching = isinstance(alpha_min, str) and alpha_min == "search"
    tried = tuple(sorted({alpha_from(a, ALPHA) for a in (alphas if searching else [alpha_min])}))
    if not tried:
        raise UserError("alphas must name at least one alpha_min in 0..1 to try, got none")
    if score not in ("accuracy", "confidence"):
        raise unknown("score", str(score), ("accuracy", "confidence"))
    for step in (value_step, percent_step):
        grid(step)  # refuses a step that makes none
    own = _checked_metrics(metrics or {})
    wanted = _known_columns(columns, own)
    if searching and "msi" not in wanted:
        raise UserError('alpha_min="search" maximises MSI: add "msi" to columns')
    schedules = tuple(Schedule(alpha, score, value_step, percent_step) for alpha in tried)
    return Plan(schedules, wanted, searching, own)


def _checked_metrics(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics of the user's own under names that are free."""
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise UserError(
                f"metrics must be sufficit.metrics.Metric by name, got {type(metric).__name__} for"
                f" {name!r}"
            )
        if name in {*METRICS, *BESIDE, *_FACTS} or name in dir(Scores):
            raise UserError(f"a metric of your own can't be called {name!r}: the name is taken")
    return dict(metrics)


def _known_columns(columns: Sequence[str] | None, own: Mapping[str, Metric]) -> tuple[str, ...]:
    """The columns asked for, or all, those of the user's own metrics included."""
    known = (*COLUMNS, *own)
    wanted = known if columns is None else (columns,) if isinstance(columns, str) else columns
    for name in wanted:
        if name not in known:
            raise unknown("column", name, known)
    if not wanted:
        raise UserError("columns must name at least one column, or be left out for all")
    return tuple(wanted)


def read(answers: Predictions, plan: Plan, held_out: Predictions | None = None) -> Scores:
    """Every column of a plan from the model's answers, and from those with the held-out fill."""
    search = None
    schedule = plan.schedules[0]
    if plan.searching:
        tried = answers.by_piece(
            lambda some: {"msi": torch.stack([msi(some, s) for s in plan.schedules], dim=1)}
        )
        search = AlphaSearch(tuple(s.alpha_min for s in plan.schedules), tried["msi"])
        schedule = replace(schedule, alpha_min=search.best)
    formulas = {name: plan.metric(name).formula for name in plan.columns}
    columns = answers.by_piece(
        lambda some: {name: formula(some, schedule) for name, formula in formulas.items()}
    )
    if held_out is not None:
        columns |= held_out.by_piece(lambda some: {"msi_held_out": msi(some, schedule)})
        columns["fill_drop"] = columns["msi"] - columns["msi_held_out"]
    return Scores(plan, answers, columns, schedule.alpha_min, search, held_out)


def with_leak(scores: Scores, leaked: Leak) -> Scores:
    """Scores with the columns of the leak beside the others."""
    return replace(scores, columns={**scores.columns, **leaked.columns}, leaked=leaked)


def join(parts: Iterable[Scores]) -> Scores:
    """The scores of several batches as one; a searched alpha_min is chosen anew over all."""
    listed = list(parts)
    held_out = [part.held_out for part in listed if part.held_out is not None]
    leaked = [part.leaked for part in listed if part.leaked is not None]
    scores = read(
        Predictions.join([part.answers for part in listed]),
        listed[0].plan,
        Predictions.join(held_out) if held_out else None,
    )
    if not leaked:
        return scores
    same = all(part.alpha_min == scores.alpha_min for part in leaked)
    if len(leaked) < len(listed) or not same:
        raise UserError(
            f"the leak was not measured in all of these parts at alpha_min {scores.alpha_min:g}:"
            " score them at one alpha_min, or measure the leak after joining"
        )
    return with_leak(scores, Leak.join(leaked))


def check_asking(
    plan: Plan, fill: str | Tensor, held_out: str | Tensor | None, batch_size: int | None
) -> None:
    """Raise, before an image is seen, where the plan can't be asked so."""
    check_batch_size(batch_size)
    if held_out is not None and "msi" not in plan.columns:
        raise UserError('held_out_fill scores MSI a second time: add "msi" to columns')
    if isinstance(held_out, str) and isinstance(fill, str) and held_out == fill:
        raise UserError(f"held_out_fill must be another fill than fill, both are {fill!r}")
