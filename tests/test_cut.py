"""`explain(..., size=)`: any map cut at a share of the image, by rank."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from sufficit import Classifier, UserError, explain
from sufficit.data.digits import synthetic_digits
from sufficit.explainers.explanation import draw_all
from sufficit.perturbation.heatmaps import resize

SIZES = (0.001, 0.02, 0.1, 0.125, 0.37, 0.5, 0.9, 1.0)


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return Classifier.load("sufficit:digits")


def marked_plainly(order: Tensor, size: float) -> Tensor:
    """The first pixels of an order [H,W], sorted one by one."""
    values = order.flatten().tolist()
    ranked = sorted(range(len(values)), key=lambda pixel: (-values[pixel], pixel))
    marked = torch.zeros(len(values), dtype=torch.bool)
    marked[ranked[: int(size * len(values) + 0.5)]] = True
    return marked.view(order.shape)


def steps(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
    """Maps with four values, so that most pixels tie."""
    return (images.mean(1) * 3).round() / 3


@pytest.mark.parametrize("size", SIZES)
def test_ties_are_cut_in_pixel_order_at_the_exact_share(
    classifier: Classifier, size: float
) -> None:
    images = synthetic_digits(3, seed=5).images
    found = explain(classifier, images, method=steps, size=size)
    order = steps(classifier, images, torch.zeros(3))
    for heatmap, one in zip(found, order, strict=True):
        assert torch.equal(heatmap >= 0.5, marked_plainly(one, size))
        assert int((heatmap >= 0.5).sum()) == int(size * 64 * 64 + 0.5)


def test_a_region_lies_in_every_larger_one(classifier: Classifier) -> None:
    digits = synthetic_digits(4, seed=2)
    regions = [
        explain(classifier, digits.images, digits.labels, method="gradcam", size=size) >= 0.5
        for size in SIZES
    ]
    for small, large in pairwise(regions):
        assert not (small & ~large).any()
        assert (large & ~small).any()


def test_the_order_is_that_before_relu(classifier: Classifier) -> None:
    digits = synthetic_digits(2, seed=2)
    drawn = draw_all(classifier, digits.images, digits.labels, ["gradcam"])["gradcam"].maps
    order = resize(drawn, (64, 64))
    assert (order < 0).float().mean() > 0.2, "or the test says nothing"
    found = explain(classifier, digits.images, digits.labels, method="gradcam", size=0.9)
    for heatmap, one in zip(found, order, strict=True):
        assert torch.equal(heatmap >= 0.5, marked_plainly(one, 0.9))


@pytest.mark.parametrize("size", [0.0, -0.1, 1.01, 10, float("nan")])
def test_a_size_that_is_no_share_is_refused(classifier: Classifier, size: float) -> None:
    with pytest.raises(UserError, match="the size of a region is a share of the image"):
        explain(classifier, synthetic_digits(1).images, size=size)


def test_a_fit_chooses_its_own_size(classifier: Classifier) -> None:
    with pytest.raises(UserError, match="a fit chooses the size of each region"):
        explain(classifier, synthetic_digits(1).images, fit=True, size=0.1)
