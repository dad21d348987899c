"""Regions of a given size, views and the loss of an order; each against a slow second writing."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Generator, Tensor

from lax_toys import classifier_of, data
from sufficit.training import OrderRecipe
from sufficit.training.lax_training import untrained_order
from sufficit.training.order_step import (
    at_image_size,
    mask_of_size,
    order_loss,
    order_step,
    random_sizes,
    random_views,
)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=Generator().manual_seed(seed), dtype=torch.float64)


def slow_threshold(order: Tensor, size: float, softness: float) -> float:
    """The threshold at which the mean of the sigmoids is the size, by 200 halvings."""
    values = order.flatten().tolist()
    low, high = min(values) - 20 * softness, max(values) + 20 * softness
    for _ in range(200):
        middle = (low + high) / 2
        mean = sum(1 / (1 + math.exp(-(v - middle) / softness)) for v in values) / len(values)
        low, high = (middle, high) if mean > size else (low, middle)
    return (low + high) / 2


@pytest.mark.parametrize("softness", [0.5, 0.1])
@pytest.mark.parametrize("size", [0.03, 0.4, 0.85])
def test_a_mask_is_the_sigmoid_above_the_threshold_that_gives_its_size(
    size: float, softness: float
) -> None:
    orders = rand(3, 6, 5, seed=2) * 4
    masks = mask_of_size(orders, torch.full((3,), size, dtype=torch.float64), softness)
    for order, mask in zip(orders, masks, strict=True):
        threshold = slow_threshold(order, size, softness)
        wanted = ((order - threshold) / softness).sigmoid()
        torch.testing.assert_close(mask, wanted, rtol=1e-4, atol=1e-5)
        assert mask.mean().item() == pytest.approx(size, abs=1e-5)


def test_its_gradient_is_that_of_finite_differences() -> None:
    order = (rand(1, 4, 3, seed=3) * 2).requires_grad_()
    weights, size = rand(1, 4, 3, seed=4), torch.tensor([0.3], dtype=torch.float64)

    def value(given: Tensor) -> Tensor:
        return (mask_of_size(given, size, 0.3) * weights).sum()

    (found,) = torch.autograd.grad(value(order), order)
    for place in range(12):
        step = torch.zeros(12, dtype=torch.float64)
        step[place] = 1e-3

        def exact(moved: Tensor) -> float:
            threshold = slow_threshold(moved, 0.3, 0.3)
            return (((moved - threshold) / 0.3).sigmoid() * weights).sum().item()

        there, back = (order.detach() + way * step.view(1, 4, 3) for way in (1, -1))
        slope = (exact(there) - exact(back)) / 2e-3
        assert found.flatten()[place].item() == pytest.approx(slope, abs=1e-4)


def test_masks_of_larger_sizes_hold_those_of_smaller_ones() -> None:
    order = rand(1, 8, 8, seed=5) * 3
    masks = [mask_of_size(order, torch.tensor([a]).double(), 0.1) for a in (0.1, 0.3, 0.6)]
    for inner, outer in pairwise(masks):
        assert (outer >= inner).all()


def test_sizes_are_log_uniform() -> None:
    found = random_sizes(4000, (0.03, 0.85), Generator().manual_seed(0))
    assert found.min() >= 0.03
    assert found.max() <= 0.85
    middle = math.sqrt(0.03 * 0.85)
    assert (found < middle).float().mean().item() == pytest.approx(0.5, abs=0.03)


def test_the_loss_by_hand() -> None:
    kept, rest = torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 1.0], [3.0, 0.0]])
    targets = torch.tensor([0, 1])
    p = [math.exp(2) / (math.exp(2) + 1), 0.5]
    left = [1 / (1 + math.e), 1 / (1 + math.exp(3))]
    wanted = sum(2 * (1 - math.sqrt(one)) for one in p) / 2 + 0.5 * sum(left) / 2
    assert order_loss(kept, rest, targets, 0.5, 0.5).item() == pytest.approx(wanted, rel=1e-5)


def test_views_are_crops_or_mirror_images_or_the_image_itself() -> None:
    images = rand(40, 3, 16, 16, seed=6).float()
    views, whole = random_views(images, 0.6, 0.5, Generator().manual_seed(0))
    assert torch.equal(views[whole], images[whole])
    assert 0 < whole.sum() < 20
    mirrored, none = random_views(images, 0.0, 1.0, Generator().manual_seed(0))
    torch.testing.assert_close(mirrored, images.flip(3), rtol=1e-4, atol=1e-4)
    assert not none.any()
    plain, every = random_views(images, 0.0, 0.0, Generator().manual_seed(0))
    assert torch.equal(plain, images)
    assert every.all()


def test_a_crop_is_a_part_of_the_image_enlarged() -> None:
    """Of a ramp from left to right, a crop is a flatter ramp."""
    ramp = torch.linspace(0, 1, 32).expand(64, 1, 32, 32).contiguous()
    views, whole = random_views(ramp, 1.0, 0.0, Generator().manual_seed(0))
    slopes = (views[:, 0, 0, 24] - views[:, 0, 0, 8]) / (ramp[:, 0, 0, 24] - ramp[:, 0, 0, 8])
    assert not whole.any()
    assert slopes.min() > 0.59
    assert slopes.max() < 1.01


def test_orders_at_the_images_size_have_a_spread_of_one() -> None:
    order = rand(2, 4, 4, seed=7).float() * 5
    found = at_image_size(order, torch.zeros(2, 3, 16, 12))
    assert found.shape == (2, 16, 12)
    torch.testing.assert_close(found.std((1, 2)), torch.ones(2), rtol=1e-3, atol=1e-3)
    large = torch.nn.functional.interpolate(order[:, None], (16, 12), mode="bilinear")[:, 0]
    torch.testing.assert_close(found[0] * large[0].std(), large[0], rtol=1e-3, atol=1e-3)


def test_regions_are_cut_in_float32_whatever_the_precision_of_the_network() -> None:
    """In bfloat16 too little is left of a mask's gradient, and training makes orders worse."""
    classifier, images = classifier_of(), data()[0]
    for parameter in classifier.model.parameters():
        parameter.requires_grad_(False)
    lax = untrained_order(classifier, images, OrderRecipe(width=8, cells=8), None, 0)
    cells = torch.rand(24, 8, 8, generator=Generator().manual_seed(1)).requires_grad_()
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            numbers = order_step(
                classifier,
                lax,
                lambda features, evidence: cells,
                images,
                data()[1],
                OrderRecipe(crops=0.0),
                Generator().manual_seed(0),
                done=0.5,
                flips=False,
            )
        found[dtype] = torch.autograd.grad(numbers["loss"], cells)[0].flatten()
    one, other = found.values()
    assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.99
    plain = at_image_size(cells, images)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(at_image_size(cells, images), plain)
