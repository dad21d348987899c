"""Attributions from gradients against captum, second writings and answers known by hand."""

import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from small_models import linear, rand, random_images
from sufficit import Classifier, UserError, explain, normalize
from sufficit.explainers.gradients import (
    expected_gradients,
    input_x_gradient,
    integrated_gradients,
    smoothgrad,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # captum's own imports are not ours to mend
    from captum import attr

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
METHODS = ("input-x-gradient", "integrated-gradients", "expected-gradients", "smoothgrad")
PLAIN = {"layer": None, "seed": 0}


class Prepared(nn.Module):
    """A classifier's model with its normalisation inside, as captum wants it."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier.model(self.classifier.normalize(images))


@pytest.fixture
def classifier() -> Classifier:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 5, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, 4),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for weights in model.parameters():
        weights.data = torch.randn(weights.shape, generator=generator) * 0.4
    return Classifier(model.eval(), mean=MEAN, std=STD)


def test_input_x_gradient_equals_captums(classifier: Classifier) -> None:
    images, targets = random_images(3, 8).requires_grad_(), torch.tensor([0, 2, 3])
    theirs = attr.InputXGradient(Prepared(classifier)).attribute(images, target=targets).sum(1)
    images = images.detach()
    found = input_x_gradient(classifier, images, targets, **PLAIN)
    assert torch.allclose(found, theirs.detach(), atol=1e-5)
    wanted = normalize(theirs.detach().clamp(min=0))
    assert torch.allclose(
        explain(classifier, images, targets, "input-x-gradient"), wanted, atol=1e-4
    )
    word = "input-x-gradient:sign=absolute"
    wanted = normalize(theirs.detach().abs())
    assert torch.allclose(explain(classifier, images, targets, word), wanted, atol=1e-4)


@pytest.mark.parametrize("baseline", ["black", "mean"])
def test_integrated_gradients_equal_captums(classifier: Classifier, baseline: str) -> None:
    images, targets = random_images(3, 8), torch.tensor([1, 2, 3])
    start = torch.zeros_like(images) if baseline == "black" else images.mean((2, 3), keepdim=True)
    theirs = attr.IntegratedGradients(Prepared(classifier)).attribute(
        images, start.expand_as(images), target=targets, n_steps=20, method="riemann_middle"
    )
    given = (classifier, images, targets)
    found = integrated_gradients(*given, **PLAIN, steps=20, baseline=baseline)
    assert torch.allclose(found, theirs.sum(1).float(), atol=1e-5)
    # Completeness: the attributions sum to the difference of the logits.
    many = integrated_gradients(*given, **PLAIN, steps=400, baseline=baseline).sum((1, 2))
    gap = classifier(images) - classifier(start.expand_as(images))
    assert torch.allclose(many, gap.gather(1, targets[:, None])[:, 0], atol=0.01)


def test_of_a_linear_model_all_points_of_the_path_agree() -> None:
    weights = rand(4, 3, 6, 6) - 0.5
    classifier, images, targets = linear(weights), random_images(2, 6), torch.tensor([3, 1])
    exact = (weights[targets] * images).sum(1)
    given = (classifier, images, targets)
    for steps in (1, 7):
        found = integrated_gradients(*given, **PLAIN, steps=steps, baseline="black")
        assert torch.allclose(found, exact, atol=1e-6)
    assert torch.allclose(input_x_gradient(*given, **PLAIN), exact, atol=1e-6)
    plain = smoothgrad(*given, **PLAIN, samples=3, noise=0.2)
    assert torch.allclose(plain, weights[targets].sum(1), atol=1e-6)
    # The mean baseline of many uniform ones is grey.
    found = expected_gradients(*given, **PLAIN, samples=4000, baselines="noise")
    assert torch.allclose(found, (weights[targets] * (images - 0.5)).sum(1), atol=0.02)


def plain_gradient(classifier: Classifier, image: Tensor, target: int) -> Tensor:
    leaf = image[None].clone().requires_grad_()
    classifier.model(classifier.normalize(leaf))[0, target].backward()
    classifier.model.zero_grad()
    return leaf.grad[0]


def test_expected_gradients_and_smoothgrad_equal_slow_ones(classifier: Classifier) -> None:
    """Image by image and sample by sample, from the same lots."""
    images, targets, samples = random_images(2, 8), torch.tensor([1, 3]), 5
    generator = torch.Generator().manual_seed(7)
    shares = torch.rand(samples, 1, 1, 1, 1, generator=generator).flatten().tolist()
    starts = torch.rand(samples, 3, 8, 8, generator=generator)
    noise = torch.randn(samples, 1, 3, 8, 8, generator=torch.Generator().manual_seed(7))[:, 0]
    slow, smooth = torch.zeros(2, 8, 8), torch.zeros(2, 8, 8)
    for i in range(2):
        for s in range(samples):
            point = starts[s] + shares[s] * (images[i] - starts[s])
            gradient = plain_gradient(classifier, point, int(targets[i]))
            slow[i] += ((images[i] - starts[s]) * gradient).sum(0) / samples
            width = 0.1 * (images[i].max() - images[i].min())
            noisy = images[i] + width * noise[s]
            smooth[i] += plain_gradient(classifier, noisy, int(targets[i])).sum(0) / samples
    given, lots = (classifier, images, targets), {"layer": None, "seed": 7, "samples": samples}
    assert torch.allclose(expected_gradients(*given, **lots, baselines="noise"), slow, atol=1e-6)
    assert torch.allclose(smoothgrad(*given, **lots, noise=0.1), smooth, atol=1e-6)


def test_baselines_may_be_images_of_a_folder(classifier: Classifier, tmp_path: Path) -> None:
    for shade in (51, 204):  # 0.2 and 0.8
        Image.new("RGB", (8, 8), (shade, shade, shade)).save(tmp_path / f"{shade}.png")
    weights = rand(4, 3, 8, 8) - 0.5
    images, targets = random_images(1, 8), torch.tensor([2])
    word = {"samples": 400, "baselines": str(tmp_path)}
    found = expected_gradients(linear(weights), images, targets, **PLAIN, **word)
    assert torch.allclose(found, (weights[2] * (images - 0.5)).sum(1), atol=0.06)
    shades = {0.2, 0.8}
    each = expected_gradients(linear(weights), images, targets, **PLAIN, **word | {"samples": 1})
    wanted = [(weights[2] * (images - shade)).sum(1) for shade in shades]
    assert any(torch.allclose(each, one, atol=1e-5) for one in wanted)
    with pytest.raises(UserError, match="must be noise or a folder of images, got 'nois'"):
        explain(classifier, images, method="expected-gradients:baselines=nois")


def test_a_model_without_gradients_is_refused() -> None:
    class Blind(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.detach().mean((2, 3))

    with pytest.raises(UserError, match="no gradient goes from the logits to the image.*rise"):
        explain(Classifier(Blind()), random_images(1), method="smoothgrad")
