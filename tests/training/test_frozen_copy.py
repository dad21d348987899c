"""A frozen copy answers as the classifier does, without its batch norms, and shares nothing."""

import copy

import pytest
import torch
import torchvision
from torch import Generator, Tensor, nn

from lax_toys import classifier_of, data
from sufficit import Classifier
from sufficit.training import OrderRecipe
from sufficit.training.frozen_copy import compiled, fold, frozen_copy
from sufficit.training.lax_training import untrained_order
from sufficit.training.order_step import order_step

MODELS = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=5), 64),
    "mobilenet_v2": (lambda: torchvision.models.mobilenet_v2(num_classes=5), 64),
    "vit": (
        lambda: torchvision.models.VisionTransformer(
            image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
        ),
        32,
    ),
}


def classifier_named(name: str) -> tuple[Classifier, Tensor]:
    """A network whose batch norms have seen its images, and images for it."""
    torch.manual_seed(0)
    build, side = MODELS[name]
    model = build()
    images = torch.rand(6, 3, side, side, generator=Generator().manual_seed(1))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
            nn.init.uniform_(module.bias, -0.2, 0.2)
        if isinstance(module, nn.Linear):  # a ViT's head starts at zero
            nn.init.normal_(module.weight, std=0.3)
    model.train()((images - 0.5) / 0.25)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # of six images some hardly vary
            module.running_var.clamp_(min=0.1)
    model.eval()
    head = [one for one in model.modules() if isinstance(one, nn.Linear)][-1]
    with torch.no_grad():  # no answer is so sure that its gradient is rounding
        head.weight.mul_(2 / model((images - 0.5) / 0.25).std())
    return Classifier(model.requires_grad_(False), mean=(0.5,) * 3, std=(0.25,) * 3), images


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_features_are_equal_and_no_batch_norm_is_left(name: str) -> None:
    classifier, images = classifier_named(name)
    layers = classifier.stage_layers(images)
    found = frozen_copy(classifier, images, layers, torch.float32)
    assert found is not classifier
    assert not any(isinstance(one, nn.BatchNorm2d) for one in found.model.modules())
    after, before = (one.stages(images, layers)[0] for one in (found, classifier))
    pairs = [*zip(after, before, strict=True), (found(images), classifier(images))]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_the_classifier_is_left_as_it_was_and_shares_no_weights() -> None:
    classifier, images = classifier_named("resnet18")
    before = copy.deepcopy(classifier.model.state_dict())
    found = frozen_copy(classifier, images, (), torch.float32)
    for parameter in found.model.parameters():
        assert not parameter.requires_grad
        parameter.fill_(0)
    after = classifier.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_step_are_those_of_the_plain_network(name: str) -> None:
    """In float64, in which no ReLU of a random network turns by rounding."""
    classifier, images = classifier_named(name)
    classifier.to(dtype=torch.float64)
    recipe = OrderRecipe(width=8, cells=8)
    lax = untrained_order(classifier, images, recipe, None, 0)
    nn.init.normal_(lax.net.out.weight, std=0.1)  # at zero no gradient passes it
    frozen = frozen_copy(classifier, images, lax.reads, torch.float64)
    assert frozen is not classifier
    found = []
    for asked in (classifier, frozen):
        lax.zero_grad()
        generator = Generator().manual_seed(3)
        numbers = order_step(asked, lax, lax, images, None, recipe, generator, done=0.5, flips=True)
        numbers["loss"].backward()
        found.append(torch.cat([p.grad.flatten() for p in lax.parameters()]))
    plain, fast = found
    assert plain.norm() > 0
    assert (plain - fast).norm() < 1e-4 * plain.norm()


def test_bfloat16_weights_where_they_are_asked_for() -> None:
    classifier, images = classifier_named("resnet18")
    found = frozen_copy(classifier, images, ("layer4",), torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert classifier.dtype == torch.float32
    wanted = classifier(images)
    assert (found(images).float() - wanted).norm() < 0.05 * wanted.norm()


class Twice(nn.Module):
    """One convolution before two batch norms: neither may be folded into it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.one, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        nn.init.constant_(self.other.bias, 0.7)
        nn.init.constant_(self.one.weight, 1.7)
        self.end = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        seen = self.conv(images)
        return self.end((self.one(seen) * self.other(seen)).mean((2, 3)))


def test_what_cannot_be_folded_stays_as_it_is() -> None:
    images = torch.rand(4, 3, 8, 8)
    classifier = Classifier(Twice().eval().requires_grad_(False))
    for layers in ((), ("conv",)):
        found = frozen_copy(classifier, images, layers, torch.float32)
        assert isinstance(found.model.one, nn.BatchNorm2d)
        torch.testing.assert_close(found(images), classifier(images), rtol=1e-5, atol=1e-5)


def test_a_convolution_that_is_read_keeps_its_output() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    nn.init.constant_(model[1].weight, 3.0)
    fold(model, torch.rand(1, 3, 8, 8), layers=("0",))
    assert isinstance(model[1], nn.BatchNorm2d)
    fold(model, torch.rand(1, 3, 8, 8))
    assert isinstance(model[1], nn.Identity)


class InFloat32(nn.Module):
    """A model whose own code makes float32 tensors, so that bfloat16 weights raise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.end = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.end(self.conv(images).float().mean((2, 3)))


def test_a_model_that_takes_no_bfloat16_is_asked_as_it_is() -> None:
    classifier = Classifier(InFloat32().eval())
    images = torch.rand(2, 3, 8, 8)
    assert frozen_copy(classifier, images, (), torch.bfloat16) is classifier


def test_toys_have_one_too() -> None:
    classifier, images = classifier_of(), data()[0]
    found = frozen_copy(classifier, images, ("4",), torch.float32)
    assert isinstance(found.model[1], nn.Identity)
    torch.testing.assert_close(found(images), classifier(images), rtol=1e-3, atol=1e-3)


def test_a_model_that_cannot_be_compiled_is_asked_as_it_is(monkeypatch) -> None:
    classifier, images = classifier_of(), data()[0]
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    fast = compiled(classifier, images)
    assert fast.model is classifier.model

    class Broken(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            raise ValueError("no such kernel")

    monkeypatch.setattr(torch, "compile", lambda model, **_: Broken())
    with pytest.warns(UserWarning, match="cannot be compiled .ValueError: no such kernel"):
        assert compiled(classifier, images) is classifier
