"""Curves asked at a coarse grid and halved where they change."""

import pytest
import torch
from torch import Tensor, nn

from reference import heatmaps_like, small_net
from small_models import Spy
from sufficit import Classifier, evaluate
from sufficit.metrics import COLUMNS, Metric
from sufficit.metrics.plan import make_plan
from sufficit.perturbation.bands import EVERYTHING, hide, show, top
from sufficit.perturbation.predict import predict
from sufficit.perturbation.sampling import CLOSE, STEP, halvings, predict_by_halving


def case(n: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    images = torch.rand(n, 3, 8, 6, generator=torch.Generator().manual_seed(seed))
    return images, heatmaps_like("random", n, (8, 6), seed), small_net()(images).argmax(1)


class Brightness(nn.Module):
    """Class 1 where more than `edge` of the image is bright."""

    def __init__(self, edge: float, steep: float = 1e6) -> None:
        super().__init__()
        self.edge, self.steep = edge, steep

    def forward(self, images: Tensor) -> Tensor:
        over = self.steep * (images.mean((1, 2, 3)) - self.edge)
        return torch.stack([torch.zeros_like(over), over], 1)


def ramp() -> tuple[Tensor, Tensor, Tensor]:
    """A white image whose heatmap is a ramp: Show(>a) keeps a share 1 - a of it."""
    return torch.ones(1, 1, 20, 20), torch.linspace(0, 1, 400).view(1, 20, 20), torch.tensor([1])


def test_every_band_is_asked_first_or_the_middle_of_one_interval() -> None:
    for plan in (make_plan(0.337), make_plan("search", columns=["msi"])):
        first, levels = halvings(plan.asks)
        middles = torch.cat([level[:, 1] for level in levels]).tolist()
        assert sorted([*first, *middles]) == list(range(len(plan.asks)))
        known = set(first)
        for level in levels:
            for low, middle, high in level.tolist():
                assert {low, high} <= known
                assert {plan.asks[k].axis for k in (low, middle, high)} == {plan.asks[low].axis}
            known |= set(level[:, 1].tolist())


def test_the_hide_curves_of_two_alpha_min_are_apart() -> None:
    bands = [hide(a, b) for a in (0.1, 0.2) for b in (0.3, 0.4, 0.5)]
    first, levels = halvings(bands)
    assert sorted(first) == [0, 2, 3, 5]
    assert [level.tolist() for level in levels] == [[[0, 1, 2], [3, 4, 5]]]


@pytest.mark.parametrize("edge", [0.0049, 0.137, 0.503, 0.731, 0.9951])
def test_a_curve_with_one_jump_is_found_exactly(edge: float) -> None:
    bands = [show(i / 100) for i in range(101)]
    given = (Classifier(Brightness(edge)), *ramp(), bands)
    exact, found = predict(*given), predict_by_halving(*given)
    assert torch.equal(found.named, exact.named)
    assert torch.equal(found.confidences, exact.confidences)
    assert found.calls.item() <= 101 / STEP + 1 + 3  # three halvings of five steps
    assert found.drawn is None


def test_between_ends_that_agree_the_confidence_is_on_a_line() -> None:
    bands = [show(i / 100) for i in range(101)]
    given = (Classifier(Brightness(-1.0, steep=1.0)), *ramp(), bands)  # flat, far from a half
    exact, found = predict(*given), predict_by_halving(*given)
    assert found.calls.item() == 21
    assert torch.equal(found.named, exact.named)
    assert (found.confidences - exact.confidences).abs().max() < 1e-2
    assert torch.equal(found.confidences[:, ::STEP], exact.confidences[:, ::STEP])


def test_confidences_that_differ_are_asked_although_the_class_is_the_same() -> None:
    bands = [show(i / 100) for i in range(101)]
    given = (Classifier(Brightness(-0.01, steep=60.0)), *ramp(), bands)
    exact, found = predict(*given), predict_by_halving(*given)
    assert (exact.named == 1).all()
    assert (found.confidences - exact.confidences).abs().max() <= CLOSE
    assert 21 < found.calls.item() < 60


def test_no_mask_is_asked_twice() -> None:
    images, _, targets = case()
    maps = heatmaps_like("tied", 6, (8, 6))  # eleven values: most neighbours on the grid are equal
    plan = make_plan(0.5)
    given = (Classifier(small_net()), images, maps, targets, plan.asks)
    exact, found = predict(*given), predict_by_halving(*given, always=plan.always)
    assert (found.calls <= exact.calls).all()
    values = [i for i, band in enumerate(plan.asks) if band.axis == "value"]
    assert torch.equal(found.named[:, values], exact.named[:, values])


def test_several_methods_fills_per_image_and_missing_targets_are_as_one_by_one() -> None:
    images, maps, _ = case()
    bands, fill = make_plan(0.5).asks, torch.rand(images.shape)
    classifier, methods = Classifier(small_net()), (maps, maps.flip(1))
    both = predict_by_halving(classifier, images, torch.cat(methods), None, bands, fill=fill)
    for k, one in enumerate(methods):
        for i in range(6):
            row = slice(i, i + 1)
            given = (classifier, images[row], one[row], None, bands)
            alone = predict_by_halving(*given, fill=fill[row])
            assert both.calls[6 * k + i] == alone.calls[0]
            assert torch.equal(both.named[6 * k + i], alone.named[0])
            assert torch.allclose(both.confidences[6 * k + i], alone.confidences[0], atol=1e-6)


def test_evaluate_asks_fewer_masks_and_is_close_to_exact() -> None:
    spy = Spy(small_net())
    options = {"alpha_min": 0.337, "held_out_fill": "blur"}
    exact = evaluate(Classifier(small_net()), *case(), **options)
    found = evaluate(Classifier(spy), *case(), calls="adaptive", **options)
    assert sum(spy.sizes) == found.calls.sum()
    assert (found.calls < exact.calls).all()
    assert not found.sampled
    for name in (*COLUMNS, "msi_held_out"):
        assert (found[name] - exact[name]).abs().max() < 0.1
        assert found.mean()[name] == pytest.approx(exact.mean()[name], abs=0.03)
    certain = [EVERYTHING, show(0.337)]
    assert torch.equal(
        found.answers.of(certain, "confidence"), exact.answers.of(certain, "confidence")
    )


def test_a_metric_without_weights_is_asked_exactly() -> None:
    bands = [top(0.14), top(0.16)]
    metric = Metric(True, lambda s: bands, lambda p, s: p.of(bands, "confidence").amax(1))
    exact, found = (
        evaluate(Classifier(small_net()), *case(), metrics={"own": metric}, calls=calls)
        for calls in ("exact", "adaptive")
    )
    assert found["own"].tolist() == pytest.approx(exact["own"].tolist(), abs=1e-7)


class Broken(nn.Module):
    """Returns NaN for images that are mostly dark."""

    def forward(self, images: Tensor) -> Tensor:
        share = images.mean((1, 2, 3))
        logits = torch.stack([-share, share], 1)
        return logits.masked_fill(share[:, None] < 0.3, torch.nan)


def test_nan_is_found_as_a_change() -> None:
    bands = [show(i / 100) for i in range(101)]
    given = (Classifier(Broken()), *ramp(), bands)
    exact, found = predict(*given), predict_by_halving(*given)
    assert 20 < exact.confidences.isnan().sum() < 40
    assert torch.equal(found.confidences.isnan(), exact.confidences.isnan())
    assert torch.equal(found.named, exact.named)
