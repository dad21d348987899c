"""Extremal perturbation against a slow writing of its parts and an answer known by hand."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from small_models import linear, rand, random_images
from sufficit import explain
from sufficit.explainers import extremal
from sufficit.perturbation.fills import blur


def slow_mask(cells: Tensor, size: tuple[int, int], cell: int) -> Tensor:
    """Pixel by pixel: the smooth maximum over the cells within three of its own, edges repeated."""
    found = torch.zeros(size)
    for y in range(size[0]):
        for x in range(size[1]):
            peaks = []
            for down in range(-3, 4):
                for right in range(-3, 4):
                    i, j = y // cell + down, x // cell + right
                    value = cells[
                        min(max(i, 0), len(cells) - 1), min(max(j, 0), cells.shape[1] - 1)
                    ]
                    away = ((y + 0.5) / cell - i - 0.5) ** 2 + ((x + 0.5) / cell - j - 0.5) ** 2
                    peaks.append(float(value) * math.exp(-away / 2))
            total = sum(math.exp(20 * peak) for peak in peaks)
            found[y, x] = sum(peak * math.exp(20 * peak) / total for peak in peaks)
    return found


@pytest.mark.parametrize(("size", "cell"), [((6, 6), 2), ((7, 10), 3), ((5, 4), 1)])
def test_the_smooth_mask_equals_the_slow_one(size: tuple[int, int], cell: int) -> None:
    cells = rand(2, math.ceil(size[0] / cell), math.ceil(size[1] / cell))
    found = extremal.smooth_masks(cells, size, cell)
    for i in range(2):
        assert torch.allclose(found[i], slow_mask(cells[i], size, cell), atol=1e-5)


def test_a_pixel_comes_from_the_level_that_its_mask_says() -> None:
    images = random_images(1, 20)
    pyramid = extremal.blurred(images)
    assert torch.allclose(pyramid[0], blur(images), atol=1e-5)
    assert torch.equal(pyramid[-1], images)
    for level in (0, 3, 8):
        masks = torch.full((1, 20, 20), level / 8)
        assert torch.allclose(extremal.perturbed(pyramid, masks), pyramid[level], atol=1e-5)
    between = extremal.perturbed(pyramid, torch.full((1, 20, 20), 2.25 / 8))
    assert torch.allclose(between, 0.75 * pyramid[2] + 0.25 * pyramid[3], atol=1e-5)


def test_a_step_follows_the_gradient_of_the_loss() -> None:
    """Two steps written out, with torch's own SGD."""
    weights = rand(3, 3, 12, 12) - 0.5
    classifier, images, targets = linear(weights), random_images(2, 12), torch.tensor([1, 2])
    cells = torch.full((2, 12, 12), 0.5, requires_grad=True)
    optimizer = torch.optim.SGD([cells], lr=0.01, momentum=0.9)
    pyramid, pull = extremal.blurred(images), 300.0
    for _ in range(2):
        masks = extremal.smooth_masks(cells, (12, 12), 1)
        logits = classifier.model(extremal.perturbed(pyramid, masks))
        ordered = masks.flatten(1).sort(dim=1).values
        wanted = (torch.arange(144) >= 144 - 29).float()  # a fifth of 144 is 28.8
        loss = -logits[0, 1] - logits[1, 2]
        loss = loss + pull * sum(F.mse_loss(one, wanted) for one in ordered)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cells.data.clamp_(0, 1)
        pull *= 1.0035
    wanted_masks = extremal.smooth_masks(cells.detach(), (12, 12), 1)
    method = ("extremal-perturbation", {"area": 0.2, "steps": 2})
    found = explain(classifier, images, targets, method)
    assert torch.allclose(found, wanted_masks.clamp(0, 1), atol=1e-5)


def test_the_mask_finds_where_the_evidence_is() -> None:
    pattern = torch.zeros(2, 3, 24, 24)
    pattern[1, :, 2:10, 12:20] = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(4, 4)
    images = random_images(2, 24)
    images[:, :, 2:10, 12:20] = (pattern[1, :, 2:10, 12:20] + 1) / 2  # blur removes it
    method = ("extremal-perturbation", {"area": 0.12, "steps": 150})
    found = explain(linear(pattern), images, torch.tensor([1, 1]), method)
    inside = torch.zeros(24, 24, dtype=torch.bool)
    inside[2:10, 12:20] = True
    for one in found:
        assert one[inside].mean() > 3 * one[~inside].mean()
        assert abs(one.mean() - 0.12) < 0.08
