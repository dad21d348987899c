"""A plan merges the bands that all metrics need, and `ask` sends them to the model in one pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError, unknown
from sufficit.metrics import columns as registry
from sufficit.metrics.columns import COLUMNS, METRICS, OTHER_COLUMNS
from sufficit.metrics.further_columns import WHOLE_CURVES, halves_of
from sufficit.metrics.localization import LOCALIZATION
from sufficit.metrics.metric import Metric, Schedule
from sufficit.perturbation.bands import EVERYTHING, Band, grid
from sufficit.perturbation.fills import check_fill
from sufficit.perturbation.image_masks import ImageMask, predict_hidden
from sufficit.perturbation.predict import predict
from sufficit.perturbation.predictions import HIDDEN_ROWS, ROWS, Measure, Predictions, ScoreKind
from sufficit.perturbation.sampling import Sampling, make_sampling
from sufficit.progress import Progress

GROUPS = ("paper", "all")  # of columns
ALPHA_GRID: tuple[float, ...] = tuple(i / 20 for i in range(1, 20))
_MEASURED_PIXELS = 2**22  # of heatmaps measured at a time
LARGE = 0.2  # share of a column's weight from which a band is asked for every image
RESERVED = (
    *("image", "target", "clean_accuracy"),  # columns of tables
    *("plan", "answers", "columns", "alpha_min", "search", "others", "leaked"),  # of Scores
    "conditions",
    *("targets", "calls", "leak_ratio", "clean", "mean", "summary", "nan_counts"),
    *("curves", "mean_curves", "frame", "plot", "_repr_html_", "sampled", "_schedule"),
)  # names that a metric must not have


@dataclass(frozen=True)
class Plan:
    """What is wanted, and the merged bands that all of it needs."""

    schedules: tuple[Schedule, ...]  # one per alpha_min tried
    columns: tuple[str, ...] = COLUMNS
    searching: bool = False
    own: Mapping[str, Metric] = field(default_factory=dict)  # the user's metrics
    calls: int | None = None  # the most masks to ask per image; None for all
    seed: int = 0  # of the masks drawn where not all are asked

    def metric(self, name: str) -> Metric:
        """Return the metric of a column."""
        return self.own[name] if name in self.own else METRICS[name]

    def higher_is_better(self, name: str) -> bool | None:
        """Return the direction of a column, None where it has none."""
        if own := registry.repeated(name, self.own):
            return self.own[own].higher_is_better
        return registry.higher_is_better(name)

    def limits(self, name: str) -> tuple[float, float]:
        """Return the lowest and highest value that a column can have."""
        return (-inf, inf) if registry.repeated(name, self.own) else registry.limits(name)

    @cached_property
    def asks(self) -> tuple[Band, ...]:
        """Every band the model may be called for, once; the whole image first."""
        metrics = [self.metric(name) for name in self.columns]
        wanted = ([*m.weights(s), *m.asks(s)] for s in self.schedules for m in metrics)
        return tuple(dict.fromkeys([EVERYTHING, *(band for found in wanted for band in found)]))

    def part(self, columns: Sequence[str], calls: int | None = None) -> "Plan":
        """Return the plan of those columns that ask the model, with at most so many calls."""
        s, metrics = self.schedules[0], {name: self.metric(name) for name in columns}
        # Others read the heatmap alone, which no fill changes.
        asking = (n for n, m in metrics.items() if m.weights(s) or m.asks(s) or m.hides(s))
        return replace(self, columns=tuple(asking), calls=self.calls if calls is None else calls)

    def of_bands(self) -> "Plan":
        """Return the plan without columns of image masks, or of the heatmap alone."""
        first, metrics = self.schedules[0], {name: self.metric(name) for name in self.columns}
        kept = (n for n, m in metrics.items() if not m.hides(first) and not m.measures(first))
        return replace(self, columns=tuple(kept))

    @cached_property
    def weighs(self) -> tuple[Band, ...]:
        """Every band whose size is needed."""
        return self._merged("weighs")

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        """Everything that is read from the heatmaps alone."""
        return self._merged("measures")

    @cached_property
    def hides(self) -> tuple[ImageMask, ...]:
        """Every mask of the image that the model is called for."""
        return self._merged("hides")

    def _merged(self, what: str) -> tuple[Any, ...]:
        """What the columns need at every alpha_min, each once."""
        wanted = (getattr(self.metric(c), what)(s) for s in self.schedules for c in self.columns)
        return tuple(dict.fromkeys(one for found in wanted for one in found))

    @cached_property
    def sampling(self) -> Sampling | None:
        """How bands are drawn for each image, None where all are asked.

        Always asked are the whole image, the bands of metrics without weights, and a band with a
        large share of a column's weight: for MSI Show(>a_min) and Show(<=a_min), a quarter each.
        The others are as wide as their weights in the columns, squared and summed.

        While alpha_min is searched for, squares and shares are means over the values tried, because
        one of them is read in the end. Each value a has Show(>a), Show(<=a) and a Hide curve of its
        own, a < M <= b for b in a..1. The Hide curves are one family of bands, ordered by a, then
        b. An image is asked a few bands of it, from some of the curves; each counts as often as it
        is rare, so that MSI is unbiased at every value.
        """
        if self.calls is None or self.calls >= len(self.asks):
            return None
        squares = dict.fromkeys(self.asks, 0.0)
        for schedule in self.schedules:
            for metric in map(self.metric, self.columns):
                for band, weight in metric.weights(schedule).items():
                    squares[band] += weight**2 / len(self.schedules)
        sizes = {band: square**0.5 for band, square in squares.items()}
        return make_sampling(self.asks, sizes, self.always, self.calls)

    @cached_property
    def always(self) -> frozenset[Band]:
        """The bands asked for every image, also where not all are."""
        found, tried = {EVERYTHING}, len(self.schedules)
        for metric in map(self.metric, self.columns):
            shares = dict.fromkeys(self.asks, 0.0)
            for schedule in self.schedules:
                found.update(metric.asks(schedule))
                weights = metric.weights(schedule)
                whole = sum(map(abs, weights.values())) or 1.0
                for band, weight in weights.items():
                    shares[band] += abs(weight) / whole / tried
            found |= {band for band, share in shares.items() if share > LARGE}
        return frozenset(found)

    def predictions(self, parts: Mapping[str, Tensor]) -> Predictions:
        """Return what `ask` returns from its tensors with a row per image, by name."""
        counts = None if self.sampling is None else self.sampling.counts
        known: dict[str, Any] = {"measures": self.measures, "hides": self.hides, **parts}
        return Predictions(self.asks, weighed=self.weighs, counts=counts, **known)

    @property
    def width(self) -> int:
        """How many masks are asked per image, at most."""
        return len(self.asks) if self.sampling is None else self.sampling.width

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the tensors with a row per image."""
        more: dict[str, Any] = {
            "drawn": self.sampling,
            "measured": self.measures,
            "halves": self.ranks,
        }
        more |= dict.fromkeys(HIDDEN_ROWS, self.hides)
        return (*ROWS, *(name for name, needed in more.items() if needed))

    @property
    def ranks(self) -> bool:
        """Whether it has msi_rank, which needs two halves of the images."""
        return "msi_rank" in self.columns


def make_plan(
    alpha_min: float | Literal["search"] = 0.5,
    score: ScoreKind = "accuracy",
    value_step: float = 0.01,
    percent_step: float = 0.02,
    columns: Sequence[str] | None = None,
    alphas: Sequence[float] = ALPHA_GRID,
    metrics: Mapping[str, Metric] | None = None,
    calls: int | Literal["exact"] = "exact",
    seed: int = 0,
    *,
    truth: bool = False,
) -> Plan:
    """Return the plan for some columns, those of the paper by default, once all is checked.

    Columns are names, or one of GROUPS: "paper" or "all". The user's own are added to a group. With
    a truth, the columns that compare with it are added, unless some of them are named.
    """
    searching = isinstance(alpha_min, str) and alpha_min == "search"
    given, kind = alphas if searching else [alpha_min], 'a number in 0..1 or "search"'
    tried = sorted({registry.alpha_from(alpha, kind) for alpha in given})
    if not tried:
        raise UserError("alphas must name at least one alpha_min in 0..1 to try, got none")
    if score not in ("accuracy", "confidence"):
        raise unknown("score", str(score), ("accuracy", "confidence"))
    for step in (value_step, percent_step):
        grid(step)  # raises for a bad step
    if not isinstance(metrics or {}, Mapping):
        raise UserError(
            "metrics must be a dict of your own sufficit.metrics.Metric by name, got"
            f" {metrics!r:.99}: give columns= for those that Sufficit has"
        )
    own = dict(metrics or {})
    for name, metric in own.items():
        if not isinstance(metric, Metric):
            raise UserError(
                f"metrics must be sufficit.metrics.Metric by name, got {type(metric).__name__} for"
                f" {name!r}"
            )
        if name in {*METRICS, *OTHER_COLUMNS, *RESERVED} or name.startswith("__"):
            raise UserError(f"cannot call a metric {name!r}: the name is taken, choose another")
    wanted = _columns_named(columns, own, truth=truth, sampled=isinstance(calls, int))
    if searching and "msi" not in wanted:
        raise UserError('alpha_min="search" maximises MSI: add "msi" to columns')
    schedules = tuple(Schedule(alpha, score, value_step, percent_step) for alpha in tried)
    if calls != "exact" and type(calls) is not int:
        raise UserError(
            f'calls must be a whole number or "exact", got {calls!r}: such as 26 masks per image'
        )
    most = None if calls == "exact" else calls
    plan = Plan(schedules, wanted, searching, own, most, seed)
    plan.sampling  # noqa: B018 - raises for too few calls
    return plan


def _columns_named(
    columns: Sequence[str] | None, own: Mapping[str, Metric], *, truth: bool, sampled: bool
) -> tuple[str, ...]:
    """Return the columns that names and groups stand for, each once."""
    words = ["paper"] if columns is None else [columns] if isinstance(columns, str) else columns
    found: list[str] = []
    for word in words:
        if word in GROUPS:
            left_out = {*LOCALIZATION, *(WHOLE_CURVES if sampled else ())}
            group = COLUMNS if word == "paper" else METRICS
            found += [*(name for name in group if name not in left_out), *own]
        elif word in LOCALIZATION and not truth:
            raise UserError(f"{word} compares heatmaps with where the object is: give the truth")
        elif word in METRICS or word in own:
            found.append(word)
        else:
            raise unknown("column", word, (*GROUPS, *METRICS, *own))
    if not found:
        raise UserError("columns must name at least one column, got none: leave it out for all")
    if truth and not {*found} & {*LOCALIZATION}:
        found += LOCALIZATION
    return tuple(dict.fromkeys(found))


def spread(n: int, most: int = 16) -> tuple[int, ...]:
    """Return up to `most` of n rows, evenly spaced.

    >>> spread(3), spread(10, 4)
    ((0, 1, 2), (0, 2, 5, 7))
    """
    count = min(n, most)
    return tuple(i * n // count for i in range(count))


def coarse(value_step: float) -> float:
    """Return the step of a sample's curves: 0.05, or the run's step where it is larger."""
    return max(0.05, value_step)


def check_names(names: Sequence[str] | None, n: int) -> None:
    """Raise unless there is one name per image, or none at all."""
    if names is not None and (isinstance(names, str) or len(names) != n):
        came = repr(names) if isinstance(names, str) else len(names)
        raise UserError(f"names must hold one name per image, {n} in all, got {came}: list them")


def ask(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Tensor,
    targets: Tensor | None,
    plan: Plan,
    fill: str | Tensor = "black",
    batch_size: int | None = None,
    *,
    names: Sequence[str] | None = None,
    tick: Progress | None = None,
    known: Predictions | None = None,
    truth: Tensor | None = None,
) -> Predictions:
    """Return the predictions a plan needs, of one classifier with one fill.

    Only the fill is checked. Heatmaps of several methods may come in one tensor, method after
    method, so that a GPU never waits in between. If the plan limits calls, the masks are drawn by
    its seed and the images' names, 0, 1, ... by default: the same for all methods and fills.
    `known` are predictions of the same classifier with another fill: the whole images are taken
    from there. `truth` is that of the images: [N,H,W].
    """
    check_fill(fill, images)
    called, n = names or [str(i) for i in range(len(images))], len(images)
    how: Any = {"fill": fill, "batch_size": batch_size}
    more: Any = {"weigh": plan.weighs, "progress": tick}
    left = 0 if known is None else 1  # the whole image is asked first, and once
    if plan.sampling is not None:
        more["drawn"] = plan.sampling.draw(called, plan.seed)[:, left:] - left
    found = predict(classifier, images, heatmaps, targets, plan.asks[left:], **how, **more)
    parts = {name: getattr(found, name) for name in found.parts}
    if known is not None:
        for name in ("named", "confidences"):
            parts[name] = torch.cat([getattr(known, name)[:, :1], parts[name]], dim=1)
    if plan.sampling is not None and left:
        parts["drawn"] = F.pad(parts["drawn"] + left, (left, 0))
    if plan.measures:
        parts["measured"] = _measured(plan, heatmaps, truth)
    if plan.ranks:
        parts["halves"] = halves_of(called, plan.seed).repeat(len(heatmaps) // n)
    if plan.hides:
        given = (classifier, images, heatmaps, found.targets[:n], plan.hides)
        parts |= predict_hidden(*given, names=called, seed=plan.seed, **how)
        parts["calls"] = found.calls.clone()
        parts["calls"][:n] += len(plan.hides)  # they count for the first method
    return plan.predictions(parts)


def msi_by_method(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Mapping[str, Tensor],
    targets: Tensor,
    plan: Plan,
    **options: Any,
) -> tuple[dict[str, Tensor], int]:
    """Return MSI of each method at every alpha_min of a plan, and the model calls they took.

    [n,C,H,W], each [n,H,W], [n] -> each [n,A]. `options` are those of `ask`.
    """
    maps = torch.cat(list(heatmaps.values()))
    found = ask(classifier, images, maps, targets, plan, **options)
    values = torch.stack([registry.msi(found, schedule) for schedule in plan.schedules], dim=1)
    return dict(zip(heatmaps, values.split(len(images)), strict=True)), int(found.calls.sum())


def _measured(plan: Plan, heatmaps: Tensor, truth: Tensor | None) -> Tensor:
    """Return what is read from the heatmaps, and a truth: [MN,H,W], [N,H,W] -> [MN,measures]."""
    step, parts = max(1, _MEASURED_PIXELS // heatmaps[0].numel()), []
    for rows in torch.arange(len(heatmaps), device="cpu").split(step):
        maps = heatmaps[rows.to(heatmaps.device)]
        maps = maps.cpu() if maps.device.type == "mps" else maps  # which has no float64
        own = None if truth is None else truth[rows.to(truth.device) % len(truth)].to(maps.device)
        parts.append(torch.stack([one(maps, own).double().cpu() for one in plan.measures], 1))
    return torch.cat(parts)
