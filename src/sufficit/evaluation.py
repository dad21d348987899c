"""`evaluate`: ask the model about all bands of some heatmaps, compute every column from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier, check_classifier
from sufficit.data.batch import Batch
from sufficit.errors import UserError, unknown, warn_user
from sufficit.metrics.column import CANDIDATE, Column, Heading
from sufficit.metrics.columns import (
    ALPHA_GRID,
    HEADINGS,
    METRICS,
    alpha_from,
    alphas_from,
    check_metrics,
    metrics_named,
    msi,
)
from sufficit.metrics.leakage import Leak, LeakMeter, check_classes, checked
from sufficit.metrics.localization import checked_truth
from sufficit.metrics.metric import AnyMetric, Schedule
from sufficit.metrics.pooled import Halves, RankShares, halves_of
from sufficit.metrics.scores import AlphaSearch, Scores, worst_of
from sufficit.perturbation.bands import grid
from sufficit.perturbation.fills import check_fill
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.perturbation.predict import check_batch_size, predict_whole
from sufficit.perturbation.predictions import NO_CLASS, Predictions, ScoreKind
from sufficit.perturbation.tokens import drops, token_model
from sufficit.probes.band import BandProbe
from sufficit.probes.probe import CALLS, Probe
from sufficit.probes.standard import (
    MSI,
    AskedModel,
    Derived,
    Scoring,
    asked_models,
    check_column_names,
    check_twin,
    column_probes,
    derived_columns,
    derived_metrics,
    groups_of,
    held_out_probe,
    stacked,
    word_of,
)
from sufficit.progress import Progress, counting_bar

Fill = str | Tensor
ONE = "heatmaps"  # the only source


def evaluate(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Tensor,
    targets: Tensor | None = None,
    *,
    alpha_min: float | Literal["search"] = 0.5,
    score: ScoreKind | Callable[[Any], Tensor] = "accuracy",
    fill: Fill = "black",
    value_step: float = 0.01,
    percent_step: float = 0.02,
    batch_size: int | None = None,
    columns: Sequence[str] | None = None,
    metrics: Mapping[str, AnyMetric] | None = None,
    alphas: Sequence[float] = ALPHA_GRID,
    held_out_fill: Fill | None = None,
    leak_donors: int = 0,
    seed: int = 0,
    progress: bool | Progress | None = None,
    calls: int | Literal["exact"] = "exact",
    names: Sequence[str] | None = None,
    fills: Sequence[Fill] | None = None,
    twin: Classifier | None = None,
    truth: Tensor | None = None,
) -> Scores:
    """Score heatmaps of images, both in 0..1: [N,C,H,W], [N,H,W] -> one value per image and column.

    - `classifier`: the model that is asked; it is left as it was.
    - `images`: floats in 0..1, [N,C,H,W].
    - `heatmaps`: floats in 0..1, [N,H,W].
    - `targets`: the class of each image, [N]. Without them, the model's own predictions.
    - `alpha_min`: pixels at or above it are marked. "search" tries `alphas` and takes the one with
      the highest mean MSI.
    - `score`: what a masked image scores: "accuracy", "confidence", or a function from what the
      model returns to one number per image, of which masked images score their share.
    - `fill`: what hidden pixels become: black, mean, blur, noise, road, drop, or a tensor.
    - `value_step`: of the curves over pixel values.
    - `percent_step`: of the curves over shares of the pixels, a share too.
    - `batch_size`: masked images per forward pass; chosen for the device if left out.
    - `columns`: names of columns, "paper" (the default) or "all".
    - `metrics`: your own columns, {name: Metric}.
    - `alphas`: what alpha_min="search" tries.
    - `held_out_fill`: score MSI with this fill as well: `msi_held_out`.
    - `leak_donors`: measure the leak over so many images of other classes per image.
    - `seed`: of everything that is drawn.
    - `progress`: a bar; by default when the work takes long in a terminal. Or a function of
      (done, total).
    - `calls`: masks per image and fill, drawn by the seed and the image's name; means stay
      unbiased, the value of an image is an estimate. "exact" asks all of them.
    - `names`: of the images; their numbers by default.
    - `fills`: in place of `fill`: score every column with each: `msi` with the first, `msi_blur`
      with the second, `msi_mean` and `msi_worst` over all.
    - `twin`: a classifier of the same classes that is asked the same masks: `msi_twin`.
    - `truth`: masks [N,H,W] above 0 on the object; adds pointing game, IoU and others.

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
    # From here on the function is a part of the model, whose one logit is the score.
    if callable(score):
        classifier = classifier.with_score(score)
        score = "confidence"
    goals = checked(images, heatmaps, targets)
    heatmaps = heatmaps.float()  # as every run has them, and as edges are compared
    _check_own_score(classifier, asks_class=any((goals is not None, leak_donors, twin)))
    # All arguments are checked before the first forward pass: the passes may take hours.
    own = check_metrics(metrics)
    most = calls_from(calls)
    wanted = metrics_named(columns, own, truth=truth is not None, sampled=most is not None)
    where = checked_truth(truth, heatmaps)
    check_names(names, len(images))
    check_batch_size(batch_size)
    tried = [alpha_min] if alpha_min != "search" else alphas_from(alphas)
    schedules = schedules_for(tried, score, value_step, percent_step)
    if alpha_min == "search" and MSI not in wanted:
        raise UserError('alpha_min="search" maximises MSI: add "msi" to columns')
    used = fills_from(fill, fills)
    models = asked_models(classifier, used, twin=twin, batch_size=batch_size)
    if twin is not None:
        check_twin(classifier, twin)
    held_out = _held_out(classifier, held_out_fill, used, batch_size, measured=MSI in wanted)
    for asked in filter(None, [*(model.asked for model in models), held_out]):
        check_asked(asked, images)
    meter = _meter(models[0], images, goals, leak_donors, seed)

    scoring = Scoring(wanted, schedules[0], most, seed)
    _check_finished(scoring)
    # Probes at any alpha_min: their columns and calls are the same at the one that is found.
    probes, derived = _probes(scoring, models, held_out)
    check_column_names(probes, derived)
    search = _searching(scoring, models[0], schedules) if alpha_min == "search" else None
    total = sum(probe.calls + probe.calls_once for probe in probes)
    total += 0 if meter is None else meter.calls
    total += 0 if search is None else search.calls
    with counting_bar("scoring", total * len(images), progress):
        batch = batch_of(classifier, images, goals, names=names, truth=where, batch_size=batch_size)
        tried_alphas = None
        if search is not None:
            answers = search.answers(batch, {ONE: heatmaps})
            tried_alphas = search_of(answers, schedules)
            best = replace(schedules[0], alpha_min=tried_alphas.best)
            scoring = replace(scoring, schedule=best)
            probes, derived = _probes(scoring, models, held_out)
        scores = _scored(scoring, probes, derived, models, batch, heatmaps)
        if tried_alphas is not None:
            scores = replace(scores, search=tried_alphas, calls=scores.calls + answers.calls)
        if meter is None:
            return scores
        if goals is None and len(scores.targets.unique()) == 1:
            warn_user("no leak: the model's predictions are all of one class")
            return scores
        # Only now: the search may have chosen the alpha_min that makes masks.
        meter = replace(meter, alpha_min=scores.alpha_min)
        return with_leak(scores, meter.leak(images, heatmaps, scores.targets))


def _check_own_score(classifier: Classifier, *, asks_class: bool) -> None:
    """Raise where a score of the user's meets what needs classes."""
    if classifier.score is not None and asks_class:
        raise UserError(
            "a score of your own has no classes: leave out targets, leak_donors and twin"
        )


def _meter(
    first: AskedModel, images: Tensor, targets: Tensor | None, donors: int, seed: int
) -> LeakMeter | None:
    """Return what measures the leak, if it is wanted; raise now what it would raise later."""
    if not donors:
        return None
    meter = LeakMeter(first.asked, 0.0, donors, seed)
    meter.check(images)
    if targets is not None:
        check_classes(targets, targets)
    return meter


# Its parameters are the fields of a Batch, and what predicts the targets.
def _check_finished(scoring: Scoring) -> None:
    """Raise for columns that no finished heatmap can have."""
    if scoring.redrawn:
        raise UserError(
            f"{', '.join(scoring.redrawn)} draws every heatmap again, and evaluate gets finished"
            " ones: score the method with compare(..., columns=[...])"
        )


# Its parameters are the fields of a `Batch`, and how the whole images are asked.
def batch_of(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None,
    *,
    names: Sequence[str] | None = None,
    numbers: Sequence[int] | None = None,
    truth: Tensor | None = None,
    batch_size: int | None = None,
) -> Batch:
    """Return images as a batch, with what the classifier says of the whole images."""
    whole = predict_whole(classifier, images, targets, batch_size=batch_size)
    places = range(len(images)) if numbers is None else numbers
    return Batch(
        images=images,
        targets=whole.targets,
        names=tuple(names or map(str, places)),
        numbers=tuple(places),
        truth=truth,
        known={("whole", classifier): whole},
    )


def schedules_for(
    alphas: Sequence[object], score: str, value_step: float, percent_step: float
) -> list[Schedule]:
    """Return a schedule for each alpha_min, or raise for a bad value, score or step."""
    if score not in ("accuracy", "confidence"):
        raise unknown("score", str(score), ("accuracy", "confidence"))
    for step in (value_step, percent_step):
        grid(step)  # raises for a bad step
    kind: ScoreKind = "accuracy" if score == "accuracy" else "confidence"
    words = 'a number in 0..1 or "search"'
    return [Schedule(alpha_from(alpha, words), kind, value_step, percent_step) for alpha in alphas]


def calls_from(calls: object) -> int | None:
    """Return the most masks per image, None for all; raise for anything else."""
    if calls == "exact":
        return None
    if type(calls) is not int:
        raise UserError(
            f'calls must be a whole number or "exact", got {calls!r}: such as 26 masks per image'
        )
    return calls


def fills_from(fill: Fill, fills: Sequence[Fill] | None) -> list[Fill]:
    """Return the fills that are given one way or the other, or raise if both ways differ."""
    if fills is None:
        return [fill]
    if isinstance(fills, str | Tensor):
        raise UserError(f"fills must be a list, got {type(fills).__name__}: one fill is fill=")
    # Black is the default of `fill`, which says nothing against `fills`.
    if fills and isinstance(fill, str) and fill not in ("black", *fills[:1]):
        raise UserError(f"fill is {fill!r} and fills start with {fills[0]!r}: give one of the two")
    return [*fills]


def check_names(names: Sequence[str] | None, n: int) -> None:
    """Raise unless there is one name per image, or none at all."""
    if names is not None and (isinstance(names, str) or len(names) != n):
        came = repr(names) if isinstance(names, str) else len(names)
        raise UserError(f"names must hold one name per image, {n} in all, got {came}: list them")


def check_asked(asked: MaskedModel, images: Tensor) -> None:
    """Raise where the fill is none for these images, or for the model."""
    check_fill(asked.fill, images)
    if drops(asked.fill):
        token_model(asked.model, images.shape[2:])


def search_of(answers: Predictions, schedules: Sequence[Schedule]) -> AlphaSearch:
    """Return MSI at every alpha_min tried."""
    values = answers.by_piece(
        lambda piece: {MSI: torch.stack([msi(piece, schedule) for schedule in schedules], dim=1)}
    )
    return AlphaSearch(tuple(schedule.alpha_min for schedule in schedules), values[MSI])


def with_leak(scores: Scores, leaked: Leak) -> Scores:
    """Return scores with the columns of the leak added."""
    return replace(
        scores,
        columns={**scores.columns, **leaked.columns},
        headings={**scores.headings, **{name: HEADINGS[name] for name in leaked.columns}},
        calls=scores.calls + leaked.calls,
        leaked=leaked,
    )


def _held_out(
    classifier: Classifier,
    held_out: Fill | None,
    fills: Sequence[Fill],
    batch_size: int | None,
    *,
    measured: bool,
) -> MaskedModel | None:
    """Return the model with the held-out fill, or raise where it makes no sense."""
    if held_out is None:
        return None
    if not measured:
        raise UserError('held_out_fill scores MSI a second time: add "msi" to columns')
    # Names only: tensors are not compared.
    if isinstance(held_out, str) and held_out in [fill for fill in fills if isinstance(fill, str)]:
        raise UserError(f"fill and held_out_fill are both {held_out!r}: hold another fill out")
    return MaskedModel(classifier, held_out, batch_size)


def _probes(
    scoring: Scoring,
    models: Sequence[AskedModel],
    held_out: MaskedModel | None,
) -> tuple[list[Probe], list[Derived]]:
    """Return the probes of all columns, and the columns derived from theirs."""
    probes = column_probes(scoring, models, curves=False, keeps=False)
    if held_out is not None:
        probes.append(held_out_probe(scoring, held_out, word_of(held_out.fill), few=False))
    derived = derived_metrics(scoring)
    if MSI in scoring.metrics:
        derived += derived_columns(models, held_out=held_out is not None)
    return probes, derived


def _searching(scoring: Scoring, first: AskedModel, schedules: Sequence[Schedule]) -> BandProbe:
    """Return the probe of MSI at every alpha_min that is tried."""
    # One column with all schedules: bands that they share are asked once.
    heading = Heading("MSI", "MSI over alpha_min")
    column = Column("msi_alpha", METRICS[MSI], tuple(schedules), heading)  # type: ignore[arg-type]
    return BandProbe(first.asked, (column,), most=scoring.calls, seed=scoring.seed)


def _scored(
    scoring: Scoring,
    probes: Sequence[Probe],
    derived: Sequence[Derived],
    models: Sequence[AskedModel],
    batch: Batch,
    heatmaps: Tensor,
) -> Scores:
    """Put heatmaps to every probe; join what they find."""
    rows: dict[str, Tensor] = {}
    calls = torch.zeros(len(batch), dtype=torch.long, device="cpu")
    answers: list[Predictions] = []
    for probe in probes:
        if isinstance(probe, BandProbe):  # whose answers the scores keep, for curves
            of_bands = probe.answers(batch, {ONE: heatmaps})
            answers.append(of_bands)
            rows |= of_bands.by_piece(probe.values)
            calls += of_bands.calls + probe.counts_whole
            continue
        for name, values in probe(batch, {ONE: heatmaps})[ONE].items():
            if name.startswith(CALLS):
                calls += values.long()
            else:
                rows[name] = values
    first = answers[0] if answers else models[0].asked.ask(batch, heatmaps, [])
    _warn_of_nan(answers or [first], own_score=models[0].asked.model.score is not None)
    columns = settled(rows, halves_of(batch.names, scoring.seed))
    for column in derived:
        columns[column.name] = column.compute(stacked(columns, column.of))
    headings = {name: heading for probe in probes for name, heading in probe.headings.items()}
    headings |= {column.name: column.heading for column in derived}
    ordered = in_order(scoring, columns, headings)
    scores = Scores(first, ordered, headings, scoring.schedule, calls)
    means = scores.mean()
    # The worst fill is that of the lowest mean, which all images decide together.
    groups = groups_of(models) if MSI in scoring.metrics else {}
    for end, alike in groups.items():
        name = f"msi_worst{end}"
        scores.columns[name] = columns[worst_of(alike, means)]
        headings[name] = HEADINGS[name]
    return scores


def settled(columns: Mapping[str, Tensor], halves: Halves) -> dict[str, Tensor]:
    """Return the columns; those that have candidates as the images together choose them."""
    values = {name: column.numpy() for name, column in columns.items()}
    shares = RankShares()
    shares.add(halves, values)
    chosen = {name: torch.from_numpy(v) for name, v in shares.settle(halves, values).items()}
    plain = {name: column for name, column in columns.items() if CANDIDATE not in name}
    return plain | chosen


def in_order(
    scoring: Scoring, columns: Mapping[str, Tensor], headings: Mapping[str, Heading]
) -> dict[str, Tensor]:
    """Return the columns that have a heading, those that were asked for first."""
    order = dict.fromkeys([*scoring.metrics, *headings])
    return {name: columns[name] for name in order if name in columns}


def _warn_of_nan(answers: Sequence[Predictions], *, own_score: bool) -> None:
    """Warn, once, of predictions that are NaN, with any fill."""
    broken = torch.cat([predicted.named == NO_CLASS for predicted in answers], dim=1)
    n = int(broken.sum())
    if not n:
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
