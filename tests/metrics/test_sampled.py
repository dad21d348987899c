"""`evaluate(..., calls=26)`: a few masks per image, and means as if all had been asked."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from reference import heatmaps_like, intervals, small_net
from small_models import Spy
from small_probes import ask, probe_for
from sufficit import Classifier, UserError, evaluate
from sufficit.evaluation import batch_of
from sufficit.metrics import COLUMNS, METRICS, MSI, Evaluation, Metric
from sufficit.metrics.columns import ALPHA_GRID
from sufficit.metrics.metric import MeanCurve, area_weights, curves_of
from sufficit.metrics.scores import Scores
from sufficit.perturbation.bands import EVERYTHING, at_least, rest, show, top
from sufficit.perturbation.predictions import Predictions
from sufficit.perturbation.sampling import make_sampling

REPEATS = 400  # of each image under other names, so that each is drawn anew
STEPS = {"value_step": 0.05, "percent_step": 0.1}


def case(n: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Images, heatmaps of several kinds, and targets of which most are what the net predicts."""
    images = torch.rand(n, 3, 8, 6, generator=torch.Generator().manual_seed(seed))
    maps = heatmaps_like("random", n, (8, 6), seed)
    maps[-1:] = heatmaps_like("two_valued", 1, (8, 6), seed)
    targets = small_net()(images).argmax(1)
    targets[0] = (targets[0] + 1) % 3
    return images, maps, targets


def classifier() -> Classifier:
    return Classifier(small_net())


def assert_unbiased(found: Tensor, wanted: Tensor) -> None:
    """[REPEATS * N], [N]: each mean is within 4.5 standard errors, or equal where none varies."""
    found = found.view(REPEATS, -1)
    error = found.std(0) / REPEATS**0.5
    assert ((found.mean(0) - wanted).abs() <= 4.5 * error + 1e-6).all(), (found.mean(0), wanted)


def repeated(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(part.repeat(REPEATS, *[1] * (part.ndim - 1)) for part in parts)


@pytest.mark.parametrize("score", ["accuracy", "confidence"])
@pytest.mark.parametrize("alpha_min", [0.5, 0.337, 0.0, 0.95, 1.0])
def test_every_column_is_unbiased(alpha_min: float, score: str) -> None:
    options = {"alpha_min": alpha_min, "score": score, "held_out_fill": "blur", **STEPS}
    exact = evaluate(classifier(), *case(), **options)
    found = evaluate(classifier(), *repeated(case()), calls=14, **options)
    assert found.sampled
    assert not exact.sampled
    assert tuple(found.columns) == (*COLUMNS, "msi_held_out", "fill_drop")
    for name, values in exact.columns.items():
        assert_unbiased(found[name], values)
    assert torch.equal(found.mask_penalty[:5], exact.mask_penalty)
    varies = [name for name in COLUMNS if found[name].view(REPEATS, -1)[:, 1].std() > 1e-3]
    assert len(varies) >= 6  # a test of values that are always exact would prove nothing


@pytest.mark.parametrize("score", ["accuracy", "confidence"])
def test_msi_is_unbiased_at_every_alpha_min_of_a_search(score: str) -> None:
    options = {"alpha_min": "search", "score": score, "columns": ["msi"], **STEPS}
    exact = evaluate(classifier(), *case(), **options)
    found = evaluate(classifier(), *repeated(case()), calls=24, **options)
    assert exact.search is not None
    assert found.search is not None
    assert found.search.alphas == exact.search.alphas
    assert len(found.search.alphas) == 19
    for k in range(19):
        assert_unbiased(found.search.msi[:, k], exact.search.msi[:, k])
    assert (found.calls <= 23 + 24).all()  # of the search, and at the alpha_min found


def test_a_search_asks_a_hide_curve_of_every_alpha_min_in_some_images() -> None:
    probe = probe_for(classifier(), alphas=ALPHA_GRID, columns=["msi"], calls=26)
    assert probe.drawing is not None
    assert len(probe.bands) > 1000
    assert (probe.drawing.counts > 0).all()
    assert probe.drawing.width == 25  # beside the whole image


@pytest.mark.parametrize("calls", [8, 14, 26, 40])
def test_no_image_is_asked_more_masks_than_wanted(calls: int) -> None:
    spy = Spy(small_net())
    scores = evaluate(Classifier(spy), *case(), calls=calls, **STEPS)
    assert (scores.calls <= calls).all()
    assert scores.calls[1] >= calls - 4  # strata share a band, and small images share masks
    assert sum(spy.sizes) == scores.calls.sum()


def test_another_fill_draws_the_same_masks_and_asks_no_whole_image_again() -> None:
    images, maps, targets = case()
    spy = Spy(small_net())
    asked = Classifier(spy)
    batch = batch_of(asked, images, targets)
    answers = {
        fill: probe_for(asked, fill=fill, calls=20, **STEPS).answers(batch, {"one": maps})
        for fill in ("black", "blur")
    }
    black, blurred = answers["black"], answers["blur"]
    assert torch.equal(blurred.drawn, black.drawn)
    assert torch.equal(blurred.named[:, 0], black.named[:, 0])
    assert (black.calls < 20).all()  # the whole image is one of the 20
    assert torch.equal(blurred.calls, black.calls)
    assert sum(spy.sizes) == 5 + black.calls.sum() + blurred.calls.sum()
    spy.sizes.clear()
    options = {"calls": 20, "fills": ("black", "blur"), "held_out_fill": "mean", **STEPS}
    scores = evaluate(asked, images, maps, targets, **options)
    assert torch.equal(scores.answers.drawn, black.drawn)
    assert (scores.calls <= 20 + 19 + 19).all()  # the last 19 are those of MSI alone
    assert sum(spy.sizes) == scores.calls.sum()


def test_the_whole_image_and_the_masks_at_alpha_min_are_asked_for_every_image() -> None:
    exact, found = (evaluate(classifier(), *case(), calls=c, **STEPS) for c in ("exact", 12))
    certain = [EVERYTHING, show(0.5), rest(0.5)]
    for kind in ("accuracy", "confidence"):
        assert torch.equal(found.answers.of(certain, kind), exact.answers.of(certain, kind))
    assert torch.equal(found.clean, exact.clean)


def asked_all(predictions: Predictions, calls: int | None = None) -> Predictions:
    """The same predictions as if drawn, in another order, all of them by default."""
    bands = predictions.bands
    sizes = {band: 1.0 + i % 3 for i, band in enumerate(bands)}
    sampling = make_sampling(bands, sizes, {EVERYTHING}, calls or len(bands))
    drawn = sampling.draw([str(i) for i in range(len(predictions.targets))], 0)
    rows = {name: getattr(predictions, name).gather(1, drawn.long()) for name in PICKED}
    return replace(predictions, drawn=drawn, counts=sampling.counts, **rows)


PICKED = ("named", "confidences")


@pytest.mark.parametrize("score", ["accuracy", "confidence"])
@pytest.mark.parametrize("alpha_min", [0.337, "search"])
def test_all_masks_drawn_give_the_exact_columns(alpha_min: float | str, score: str) -> None:
    alphas = ALPHA_GRID if alpha_min == "search" else [alpha_min]
    probe = probe_for(classifier(), alphas=alphas, score=score, **STEPS)
    predictions = ask(probe, *case())
    shuffled = asked_all(predictions)
    found = probe.values(shuffled)
    assert len(found) == len(COLUMNS) * len(alphas)
    for name, values in probe.values(predictions).items():
        assert found[name].tolist() == pytest.approx(values.tolist(), abs=1e-9)
    schedule = probe.columns[0].schedules[0]
    curves = curves_of(shuffled, schedule)
    assert len(curves) == 6
    for name, curve in curves_of(predictions, schedule).items():
        assert torch.equal(curves[name].confidence, curve.confidence)


def test_as_many_calls_as_masks_are_exact() -> None:
    exact = evaluate(classifier(), *case(), **STEPS)
    found = evaluate(classifier(), *case(), calls=len(exact.answers.bands), **STEPS)
    assert not found.sampled
    for name in COLUMNS:
        assert torch.equal(found[name], exact[name])
    less = evaluate(classifier(), *case(), calls=len(exact.answers.bands) - 1, **STEPS)
    assert less.sampled
    assert less.mean()["msi"] == pytest.approx(exact.mean()["msi"], abs=0.05)


def test_draws_do_not_depend_on_batch_or_order() -> None:
    images, maps, targets = case(9)
    names = [f"{i}.png" for i in range(9)]
    options = {"calls": 12, "seed": 3, **STEPS}
    whole = evaluate(classifier(), images, maps, targets, names=names, **options)
    order = [4, 0, 7]
    parts = (images[order], maps[order], targets[order])
    some = evaluate(classifier(), *parts, names=[names[i] for i in order], batch_size=2, **options)
    for name in COLUMNS:
        assert some[name].tolist() == pytest.approx(whole[name][order].tolist(), abs=1e-6)
    assert torch.equal(some.answers.drawn, whole.answers.drawn[order])
    other = evaluate(classifier(), images, maps, targets, names=names, **(options | {"seed": 4}))
    assert not torch.equal(other.answers.drawn, whole.answers.drawn)


def test_an_image_without_a_name_is_drawn_by_its_number() -> None:
    plain = evaluate(classifier(), *case(), calls=12, **STEPS)
    named = evaluate(classifier(), *case(), calls=12, names=["0", "1", "2", "3", "4"], **STEPS)
    assert torch.equal(plain.msi, named.msi)


def test_all_methods_of_an_image_are_asked_the_same_masks() -> None:
    images, maps, targets = case()
    probe = probe_for(classifier(), calls=12, **STEPS)
    both = ask(probe, images, torch.cat([maps, maps.flip(1)]), targets)
    alone = ask(probe, images, maps.flip(1), targets)
    assert both.drawn is not None
    assert torch.equal(both.drawn[:5], both.drawn[5:])
    assert torch.equal(both.rows(slice(5, 10)).named, alone.named)
    second = both.rows(slice(5, 10))
    assert torch.equal(probe.values(second)["msi"], probe.values(alone)["msi"])


def test_predictions_read_back_from_their_tensors_give_the_same_scores() -> None:
    for calls in (None, 12):
        probe = probe_for(classifier(), calls=calls, **STEPS)
        found = ask(probe, *case())
        again = probe.kept({part: getattr(found, part) for part in found.parts})
        values = probe.values(again)
        assert {*values} == {*COLUMNS}
        for name, wanted in probe.values(found).items():
            assert torch.equal(values[name], wanted)


def test_curves_have_a_value_where_the_image_was_asked() -> None:
    exact, found = (evaluate(classifier(), *case(), calls=c, **STEPS) for c in ("exact", 12))
    assert found.curves().keys() == exact.curves().keys()
    known = 0
    for name, curve in found.curves().items():
        wanted = exact.curves()[name]
        for kind in ("accuracy", "confidence"):
            values = getattr(curve, kind)
            there = ~values.isnan()
            known += int(there.sum())
            assert values[there].tolist() == pytest.approx(getattr(wanted, kind)[there].tolist())
    assert 0 < known < 5 * 2 * 2 * 12  # each call is a point of at most two curves, of two scores
    assert exact.curves()["show"].accuracy.isnan().sum() == 0


def test_mean_curves_are_unbiased() -> None:
    exact = evaluate(classifier(), *case(), score="confidence", **STEPS)
    found = evaluate(classifier(), *repeated(case()), calls=14, score="confidence", **STEPS)
    for name, curve in exact.mean_curves().items():
        spread = exact.curves()[name].confidence.std(0, correction=0)
        points = (~found.curves()[name].confidence.isnan()).sum(0)
        error = 4.5 * spread / points.sqrt() + 1e-6
        assert ((found.mean_curves()[name].values - curve.values).abs() <= error).all()


def test_the_height_of_a_mean_curve_is_over_the_points_that_are_known() -> None:
    nan = torch.nan
    curve = MeanCurve((0.0, 0.5, 0.75, 1.0), torch.tensor([1.0, 0.5, nan, 0.0]))
    assert curve.height == pytest.approx(0.5)
    assert MeanCurve((0.0, 1.0), torch.tensor([nan, 0.25])).height == 0.25
    assert np.isnan(MeanCurve((0.0, 1.0), torch.tensor([nan, nan])).height)


@pytest.mark.parametrize("alpha_min", [0.0, 0.337, 0.5, 1.0])
def test_weights_and_formula_of_a_column_are_one(alpha_min: float) -> None:
    """Each column is written twice: as its formula, and as the weights that are sampled."""
    probe = probe_for(classifier(), alphas=[alpha_min], score="confidence", **STEPS)
    schedule, found = probe.columns[0].schedules[0], ask(probe, *case())
    whole = found.of([EVERYTHING], "confidence")
    for name, metric in ((name, METRICS[name]) for name in COLUMNS):
        if name == "mask_penalty":
            continue
        value = (lambda p: (whole - p).abs()) if name.startswith("fid") else (lambda p: p)
        by_weights = found.total(metric.weights(schedule), "confidence", value)
        if name == "msi":
            by_weights = by_weights - found.share(at_least(alpha_min))
        assert by_weights.tolist() == pytest.approx(metric.formula(found, schedule).tolist())


def test_the_interval_covers_the_mean_of_exact_scores() -> None:
    """Images drawn from many, masks drawn for each: 95 % of the intervals hold the mean of all."""
    whole, few = (probe_for(classifier(), columns=["msi"], calls=c, **STEPS) for c in (None, 5))
    predictions = ask(whole, *case(300))
    sampling = few.drawing
    assert sampling is not None
    assert few.bands == whole.bands
    exact = whole.values(predictions)["msi"]
    random, hits, rounds, wider = np.random.default_rng(0), 0, 400, 0.0
    for trial in range(rounds):
        rows = random.integers(300, size=60).tolist()
        some = predictions.rows(rows)
        masks = sampling.draw([f"{i}" for i in range(60)], seed=trial)
        drawn = nn.functional.pad(masks + 1, (1, 0))  # the whole image comes before the bands
        picked = {name: getattr(some, name).gather(1, drawn.long()) for name in PICKED}
        again = replace(some, drawn=drawn, counts=sampling.counts_with_whole, **picked)
        values = few.values(again)["msi"]
        low, high = intervals(values.numpy()[:, None])
        hits += bool(low[0] <= exact.mean() <= high[0])
        wider += float(values.std() / exact[rows].std()) / rounds
    assert wider > 1.05  # the draws add to the spread
    assert 0.95 - 4 * (0.95 * 0.05 / rounds) ** 0.5 - 0.01 < hits / rounds < 0.99


def own_metrics() -> dict[str, Metric]:
    def weights(schedule):
        return dict(
            zip([top(k) for k in schedule.shares], area_weights(schedule.shares), strict=True)
        )

    def squared(predictions, schedule):
        return predictions.total(weights(schedule), "confidence", lambda p: p**2)

    def sharpest(predictions, schedule):
        return predictions.of([top(k) for k in (0.1, 0.2)], "confidence").amax(1)

    return {
        "squared": Metric(True, lambda s: [], squared, weights=weights),
        "sharpest": Metric(True, lambda s: [top(0.1), top(0.2)], sharpest),
        "marked": Metric(
            False, lambda s: [], lambda p, s: p.share(at_least(0.3)), lambda s: [at_least(0.3)]
        ),
    }


def test_ones_own_metric_is_sampled_by_its_weights_or_asked_exactly() -> None:
    options = {"metrics": own_metrics(), **STEPS}
    exact = evaluate(classifier(), *case(), **options)
    found = evaluate(classifier(), *repeated(case()), calls=16, **options)
    curve = exact.answers.of([top(k) for k in exact.schedule.shares], "confidence")
    by_hand = torch.trapezoid(curve**2, dx=0.1)
    assert exact.squared.tolist() == pytest.approx(by_hand.tolist())
    assert_unbiased(found.squared, exact.squared)
    assert found.squared.view(REPEATS, -1).std(0).max() > 1e-3
    assert torch.equal(found.sharpest, exact.sharpest.repeat(REPEATS))
    assert torch.equal(found.marked, exact.marked.repeat(REPEATS))
    assert (found.calls <= 16).all()


@pytest.mark.parametrize(
    ("columns", "least"),
    [(None, 8), (["msi"], 5), (["insertion_pixel", "fid_minus_pixel"], 2), (["mask_penalty"], 1)],
)
def test_too_few_calls_name_the_least_number(columns: list[str] | None, least: int) -> None:
    scores = evaluate(classifier(), *case(), columns=columns, calls=least)
    assert (scores.calls <= least).all()
    with pytest.raises(UserError, match=rf"calls must be {least} or more .* got {least - 1}"):
        evaluate(classifier(), *case(), columns=columns, calls=least - 1)


@pytest.mark.parametrize("calls", ["all", "adaptive", 26.0, True, None])
def test_calls_that_are_no_number_are_refused(calls: object) -> None:
    with pytest.raises(UserError, match='calls must be a whole number or "exact", got'):
        evaluate(classifier(), *case(), calls=calls)


@pytest.mark.parametrize("names", [["a"], "abcde"])
def test_names_must_be_one_per_image(names: object) -> None:
    with pytest.raises(UserError, match="names must hold one name per image, 5 in all"):
        evaluate(classifier(), *case(), calls=12, names=names)


class SometimesNaN(torch.nn.Module):
    """Returns NaN for images of which more than half is black."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def forward(self, images: Tensor) -> Tensor:
        dark = (images == 0).double().mean((1, 2, 3)) > 0.5
        return self.net(images).masked_fill(dark[:, None], torch.nan)


def test_a_mask_that_gives_nan_spoils_only_the_columns_it_belongs_to() -> None:
    maps = torch.linspace(0, 1, 48).view(1, 8, 6)
    images = torch.rand(1, 3, 8, 6).clamp(min=0.01)
    upper = Metric(True, lambda s: [show(0.1)], lambda p, s: p.of([show(0.1)], "accuracy")[:, 0])
    options = {"columns": ["insertion_pixel", "mask_penalty", "upper"], "metrics": {"upper": upper}}
    with pytest.warns(RuntimeWarning, match="the model gave NaN"):
        scores = evaluate(Classifier(SometimesNaN()), images, maps, calls=12, **options, **STEPS)
    assert scores.sampled
    assert scores.nan_counts() == {"insertion_pixel": 1, "mask_penalty": 0, "upper": 0}


def as_updates(metric: Evaluation, names: list[str] | None = None, forward: bool = False) -> Scores:
    images, maps, targets = case()
    for rows in (slice(0, 2), slice(2, 5)):
        more = {} if names is None else {"names": names[rows]}
        (metric if forward else metric.update)(images[rows], maps[rows], targets[rows], **more)
    return metric.scores()


@pytest.mark.parametrize("forward", [False, True], ids=["update", "forward"])
@pytest.mark.parametrize("names", [None, list("abcde")], ids=["numbers", "names"])
def test_a_torchmetrics_class_draws_what_evaluate_draws(
    names: list[str] | None, forward: bool
) -> None:
    metric = Evaluation(classifier(), calls=12, seed=2, **STEPS)
    found = as_updates(metric, names, forward)
    wanted = evaluate(classifier(), *case(), calls=12, seed=2, names=names, **STEPS)
    assert found.sampled
    assert torch.equal(found.answers.drawn, wanted.answers.drawn)
    for name in COLUMNS:
        assert found[name].tolist() == pytest.approx(wanted[name].tolist(), abs=1e-6)
        assert metric.compute()[name].item() == pytest.approx(wanted.mean()[name], abs=1e-6)


def test_a_collection_keeps_exact_and_sampled_metrics_apart() -> None:
    both = MetricCollection(
        {"exact": MSI(classifier(), **STEPS), "few": MSI(classifier(), calls=6, **STEPS)},
        postfix="_",
    )
    both.update(*case())
    few = evaluate(classifier(), *case(), columns=MSI.columns, calls=6, **STEPS)
    assert both["few"].scores().msi.tolist() == pytest.approx(few.msi.tolist(), abs=1e-6)
    assert not both["exact"].scores().sampled
