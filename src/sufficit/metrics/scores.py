"""`evaluate`: predict all bands in one pass, compute every column from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier, check_classifier
from sufficit.errors import UserError, unknown, warn_user
from sufficit.metrics.columns import msi
from sufficit.metrics.conditions import (
    FIRST,
    HELD_OUT,
    Condition,
    ask_all,
    check_twin,
    fills_from,
    groups_of,
    make_conditions,
)
from sufficit.metrics.further_columns import best_shares, half_sums
from sufficit.metrics.leakage import Leak, LeakProbe, check_classes, checked
from sufficit.metrics.localization import checked_truth
from sufficit.metrics.metric import Curve, MeanCurve, Metric, Schedule, curves_of
from sufficit.metrics.plan import ALPHA_GRID, Plan, check_names, make_plan
from sufficit.outside import html_table
from sufficit.perturbation.bands import EVERYTHING
from sufficit.perturbation.predict import check_batch_size
from sufficit.perturbation.predictions import NO_CLASS, Predictions, ScoreKind
from sufficit.progress import Progress, bar, stage
from sufficit.statistics import Chance, Estimate, estimates_of, ratio_of
from sufficit.sums import Floats, Sums, both, sums_of

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AlphaSearch:
    """MSI at every value of alpha_min that was tried."""

    alphas: tuple[float, ...]
    msi: Tensor  # [N,A]

    @property
    def means(self) -> Tensor:
        """Mean MSI over the images at each value, NaN ignored: [A]."""
        return self.msi.nanmean(0)

    @property
    def best(self) -> float:
        """The value with the highest mean MSI, the smaller of two that tie."""
        return self.alphas[int(self.means.nan_to_num(-torch.inf).argmax())]


@dataclass(frozen=True)
class Scores:
    """One value per image and column: `scores.msi`, `scores["msi"]`; all on the CPU."""

    plan: Plan
    answers: Predictions
    columns: dict[str, Tensor]  # each [N]
    alpha_min: float
    search: AlphaSearch | None = None
    others: Mapping[str, Predictions] = field(default_factory=dict)  # of further conditions, by key
    leaked: Leak | None = None
    conditions: tuple[Condition, ...] = (FIRST,)

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

    def _repr_html_(self) -> str:
        rows = []
        for name, found in self.summary().items():
            better = {True: "higher", False: "lower", None: "-"}[found.higher_is_better]
            interval = "-" if isnan(found.low) else f"{found.low:.3f} .. {found.high:.3f}"
            rows.append((name, better, f"{found.mean:.3f}", interval))
        caption = f"{len(self)} image{'s'[: len(self) > 1]}, alpha_min {self.alpha_min:g}"
        return html_table(caption, ("column", "better", "mean", "95 % interval"), rows)

    def plot(self, title: str = "") -> "Figure":
        """Draw the mean curves behind the columns."""
        from sufficit.plots import curves_figure

        return curves_figure(self, title)

    @property
    def targets(self) -> Tensor:
        """The class each image was scored for: [N]."""
        return self.answers.targets

    @property
    def calls(self) -> Tensor:
        """Model calls spent on each image: [N]."""
        more = [one.calls for one in self.others.values()]
        more += [] if self.leaked is None else [self.leaked.calls]
        return sum(more, start=self.answers.calls)

    @property
    def sampled(self) -> bool:
        """Whether each image was asked some of the masks only: its values are estimates."""
        return self.answers.drawn is not None

    @property
    def leak_ratio(self) -> float:
        """Mean leak over mean chance, if `leak_donors` was given."""
        if self.leaked is None:
            raise AttributeError("leak_ratio")
        return self.leaked.ratio

    @property
    def clean(self) -> Tensor:
        """Whether the model predicts the target for the whole image: [N]."""
        return self.answers.of([EVERYTHING], "accuracy")[:, 0]

    def mean(self) -> dict[str, float]:
        """Return the mean of each column; NaN is ignored (`nan_counts` counts it)."""
        return {name: values.nanmean().item() for name, values in self.columns.items()}

    def summary(self, *, seed: int = 0) -> dict[str, Estimate]:
        """Return mean and 95 % interval of every column, and of the leak ratio if it is known."""
        values = {name: v.numpy().astype(np.float64) for name, v in self.columns.items()}
        return summarise(values, self.plan, seed=seed)

    def nan_counts(self) -> dict[str, int]:
        """Return how many images have NaN in each column, because the model returned NaN."""
        return {name: int(values.isnan().sum()) for name, values in self.columns.items()}

    def curves(self) -> dict[str, Curve]:
        """Return the curves behind the columns, by name; NaN where an image was not asked."""
        return curves_of(self.answers, self._schedule())

    def mean_curves(self) -> dict[str, MeanCurve]:
        """Return each curve of the chosen score, averaged over the images, NaN ignored.

        Each point is the mean over the images that were asked there, NaN if none was.
        """
        schedule, sums = self._schedule(), dict[str, tuple[tuple[float, ...], Tensor, Tensor]]()
        for some in self.answers.pieces():  # the curves of all images at once need much memory
            for name, curve in curves_of(some, schedule).items():
                values: Tensor = getattr(curve, schedule.score)
                _, total, count = sums.get(name, ((), torch.tensor(0.0), torch.tensor(0)))
                total, count = total + values.nansum(0), count + (~values.isnan()).sum(0)
                sums[name] = (curve.grid, total, count)
        return {name: MeanCurve(grid, total / count) for name, (grid, total, count) in sums.items()}

    def frame(self) -> "pandas.DataFrame":
        """Return one row per image: target, whether it is predicted, calls, all columns."""
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
    score: ScoreKind | Callable[[Any], Tensor] = "accuracy",
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
    calls: int | Literal["exact"] = "exact",
    names: Sequence[str] | None = None,
    fills: Sequence[str | Tensor] | None = None,
    twin: Classifier | None = None,
    truth: Tensor | None = None,
) -> Scores:
    """Score heatmaps of images, both in 0..1: [N,C,H,W], [N,H,W] -> one value per image and column.

    Without targets the model's own predictions are the targets. `alpha_min="search"` tries `alphas`
    and takes the one with the highest mean MSI. `columns` selects columns, and `metrics` adds your
    own: {name: Metric}. `held_out_fill` scores MSI with a second fill; `leak_donors` measures the
    leak over that many donors per image, drawn by the seed. A progress bar appears in a terminal
    when the work takes long; progress=True or False decides, and a function gets (done, total).
    `fills=("black", "blur")`, in place of `fill`, scores every column with each: `msi` with the
    first, `msi_blur` with the second, `msi_mean` and `msi_worst` over all. `twin`, a classifier of
    the same classes, is asked the same masks: `msi_twin`, `msi_twin_blur`.
    `score=FUNCTION`, what the model returns -> one number per image [N], replaces classes: masked
    images score their share of the whole image's number (docs/scores.md).
    `truth`, masks [N,H,W] above 0 on the object, adds pointing game, IoU and others.
    `calls=26` asks at most 26 masks per image and fill, drawn by the seed and the image's name,
    which is its number unless `names` are given: the means are unbiased, and the value of an image
    is an estimate.

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
    if callable(score):
        classifier, score = classifier.with_score(score), "confidence"
    targets = checked(images, heatmaps, targets)
    if classifier.score is not None and (targets is not None or leak_donors or twin is not None):
        raise UserError(
            "a score of your own has no classes: leave out targets, leak_donors and twin"
        )
    given_plan = (alpha_min, score, value_step, percent_step, columns, alphas, metrics)
    plan = make_plan(*given_plan, calls, seed, truth=truth is not None)
    where = checked_truth(truth, heatmaps)
    check_names(names, len(images))
    check_batch_size(batch_size)
    used = fills_from(fill, fills)
    conditions = make_conditions(plan, used, held_out_fill, twin=twin is not None)
    if twin is not None:
        check_twin(classifier, twin)
    probe = LeakProbe(classifier, 0, leak_donors, seed, fill=used[0], batch_size=batch_size)
    if leak_donors:  # raise now what the leak would raise after the scoring
        probe.check(images)
        if targets is not None:
            check_classes(targets, targets)
    stages = len(conditions) + bool(leak_donors)
    with bar("scoring", progress) as tick:
        models, given = (classifier, twin), (images, heatmaps, targets, plan, conditions)
        how: Any = {"names": names, "tick": tick, "stages": stages, "truth": where}
        found = ask_all(models, *given, batch_size, **how)
        _warn_of_nan([*found.values()], own_score=classifier.score is not None)
        scores = read(found, plan, conditions)
        means = scores.mean()
        for end, some in groups_of(conditions).items() if "msi" in plan.columns else ():
            scores.columns[f"msi_worst{end}"] = scores.columns[worst_of(some, means)]
        if not leak_donors:
            return scores
        if targets is None and len(scores.targets.unique()) == 1:
            warn_user("no leak: the model's predictions are all of one class")
            return scores
        probe, last = replace(probe, alpha_min=scores.alpha_min), stage(tick, stages - 1, stages)
        return with_leak(scores, probe.leak(images, heatmaps, scores.targets, tick=last))


def _warn_of_nan(found: Sequence[Predictions], *, own_score: bool) -> None:
    """Warn, once, of predictions that are NaN under any of the conditions."""
    asked = [one for some in found for one in (some.named, some.hidden_named) if one is not None]
    broken = torch.cat([named == NO_CLASS for named in asked], 1)  # [N,predictions]
    if not (n := int(broken.sum())):
        return
    gave = "the model gave NaN"
    check = "its weights, its precision, and what it returns for an image that is all fill"
    if own_score:
        gave = "your score gave no share of the whole image"
        check = "that it is finite, and not 0 for whole images"
    images = f"{int(broken.any(1).sum())} of {len(broken)} images"
    warn_user(
        f"{gave} for {n} of {broken.numel()} predictions, in {images}. Their columns are NaN"
        f" and left out of means (nan_counts counts them): check {check}",
        RuntimeWarning,
    )


def read(
    found: Mapping[str, Predictions], plan: Plan, conditions: Sequence[Condition] = (FIRST,)
) -> Scores:
    """Return every column of a plan, from the predictions under each condition."""
    predictions, search, schedule = found[""], None, plan.schedules[0]
    if plan.searching:
        tried = predictions.by_piece(
            lambda some: {"msi": torch.stack([msi(some, s) for s in plan.schedules], dim=1)}
        )
        search = AlphaSearch(tuple(s.alpha_min for s in plan.schedules), tried["msi"])
        schedule = replace(schedule, alpha_min=search.best)
    if plan.ranks and schedule.best_shares is None:
        shares = best_shares(half_sums(predictions, schedule), schedule)
        schedule = replace(schedule, best_shares=shares)
    columns: dict[str, Tensor] = {}
    for condition in conditions:
        columns |= found[condition.key].by_piece(partial(_columns, condition, plan, schedule))
        if condition.key == HELD_OUT:
            columns["fill_drop"] = columns["msi"] - columns["msi_held_out"]
    for end, names in groups_of(conditions).items():
        if "msi" in plan.columns:
            columns[f"msi_mean{end}"] = torch.stack([columns[name] for name in names]).mean(0)
    others = {key: one for key, one in found.items() if key}
    given = (plan, predictions, columns, schedule.alpha_min, search, others)
    return Scores(*given, conditions=tuple(conditions))


def _columns(
    condition: Condition, plan: Plan, schedule: Schedule, some: Predictions
) -> dict[str, Tensor]:
    """Return the columns of some images under a condition: each [n]."""
    names = condition.plan(plan).columns
    return {condition.column(name): plan.metric(name).formula(some, schedule) for name in names}


def worst_of(names: Sequence[str], means: Mapping[str, float]) -> str:
    """Return the column with the lowest mean, NaN ignored.

    >>> worst_of(["msi", "msi_blur"], {"msi": 0.2, "msi_blur": 0.1})
    'msi_blur'
    """
    return min(names, key=lambda name: (isnan(means[name]), means[name]))


def summarise(columns: Mapping[str, Floats], plan: Plan, *, seed: int = 0) -> dict[str, Estimate]:
    """Return mean and 95 % interval of every column [N], and of the leak ratio if it is known."""
    leaked = None
    if "leak" in columns:
        leaked = sums_of(both(columns["leak"], columns["leak_chance"]), seed=seed)
    return summary_of(sums_of(columns, seed=seed), leaked, plan)


def summary_of(
    columns: Sums, leaked: Sums | None, plan: Plan, chance: Chance | None = None
) -> dict[str, Estimate]:
    """Return the same from the sums of the columns, and of `both` columns of the leak."""
    directions = {name: plan.higher_is_better(name) for name in columns.columns}
    summary = estimates_of(columns, directions, chance, plan.limits)
    return summary if leaked is None else summary | {"leak_ratio": ratio_of(leaked, chance)}


def with_leak(scores: Scores, leaked: Leak) -> Scores:
    """Return scores with the columns of the leak added."""
    return replace(scores, columns={**scores.columns, **leaked.columns}, leaked=leaked)


@dataclass(frozen=True)
class MethodScores:
    """One method's scores as a run wrote them: single images are those shown only."""

    n: int  # images scored
    columns: Mapping[str, Tensor]  # of the images shown, in their order: each [S] float64
    targets: Tensor  # [S]
    clean: float  # share of whole images to which the model gives their target, NaN ignored
    alpha_min: float
    schedule: Schedule  # at this alpha_min
    curves: Mapping[str, MeanCurve]  # by name, as far as they are known
    shown: Predictions  # of the images shown, in their order
    alphas: Mapping[float, float] | None = None  # alpha_min -> mean MSI, where it was searched for

    @staticmethod
    def of(scores: Scores, shown_rows: Sequence[int] = ()) -> "MethodScores":
        """The same scores, with the values and predictions of these rows only."""
        search, rows = scores.search, list(shown_rows)
        return MethodScores(
            n=len(scores),
            columns={name: values[rows] for name, values in scores.columns.items()},
            targets=scores.targets[rows],
            clean=scores.clean.nanmean().item(),
            alpha_min=scores.alpha_min,
            schedule=replace(scores.plan.schedules[0], alpha_min=scores.alpha_min),
            curves=scores.mean_curves(),
            shown=scores.answers.rows(rows),
            alphas=dict(zip(search.alphas, search.means.tolist(), strict=True)) if search else None,
        )

    def __getitem__(self, column: str) -> Tensor:
        if column not in self.columns:
            raise unknown("column", column, self.columns)
        return self.columns[column]
