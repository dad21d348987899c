"""Any model as one object, which leaves the model as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from small_models import Traces
from sufficit import Classifier, UserError, evaluate
from sufficit.classifier.digit_net import SmallNet


def test_mean_and_std_are_applied_channel_by_channel() -> None:
    seen: list[Tensor] = []

    class Ear(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images)
            return images[:, :2, 0, 0]

    images = torch.rand(2, 3, 4, 4)
    Classifier(Ear(), mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))(images)
    expected = [(images[:, k] - m) / s for k, m, s in ((0, 0.1, 0.5), (1, 0.2, 1.0), (2, 0.3, 2.0))]
    assert torch.allclose(seen[0], torch.stack(expected, 1))


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ((0.5,), None, "both be given"),
        ((0.5,), (0.5, 0.5), "one number per channel"),
        ((0.5,), (0.0,), "above 0"),
    ],
)
def test_mean_and_std_are_checked(mean: Any, std: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Classifier(nn.Flatten(), mean=mean, std=std)


def test_all_classes_have_names_or_none_has() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    images = torch.rand(2, 3, 2, 2)
    assert Classifier(model, classes=["a", "b", "c"])(images).shape == (2, 3)
    with pytest.raises(UserError, match="gives 3 classes and 2 have names"):
        Classifier(model, classes=["a", "b"])(images)
    with pytest.raises(UserError, match="got the one word 'abc'"):
        Classifier(model, classes="abc")


def test_images_of_other_channels_are_refused() -> None:
    classifier = Classifier(SmallNet(), mean=(0.5,) * 3, std=(0.5,) * 3)
    with pytest.raises(UserError, match="images have 1 channels, mean and std have 3"):
        classifier(torch.rand(1, 1, 32, 32))


@pytest.mark.parametrize("kind", ["object", "dict", "tuple"])
def test_logits_are_found_in_what_models_return(kind: str) -> None:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Model(nn.Module):
        def forward(self, images: Tensor) -> Any:
            logits = images[:, :2, 0, 0]
            return {"object": Output(logits), "dict": {"logits": logits}, "tuple": (logits, 1)}[
                kind
            ]

    images = torch.rand(2, 3, 4, 4)
    assert torch.equal(Classifier(Model())(images), images[:, :2, 0, 0])


class Moody(SmallNet):
    """Raises when `raising` is set."""

    raising = False

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        if self.raising:
            raise RuntimeError("in the middle")
        return logits


@pytest.mark.parametrize("raising", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        lambda c, x: c(x),
        lambda c, x: c.features(x),
        lambda c, x: evaluate(c, x, x[:, 0], percent_step=0.5, value_step=0.5),
    ],
    ids=["call", "features", "evaluate"],
)
def test_a_call_leaves_the_model_as_it_was(use: Callable[..., Any], raising: bool) -> None:
    model = Moody()
    model.train()
    model.features[2].eval()
    model.head.weight.requires_grad_(False)
    model(torch.rand(4, 3, 16, 16)).sum().backward()
    model.raising = raising
    traces = Traces(model)
    try:
        use(Classifier(model), torch.rand(2, 3, 16, 16))
    except RuntimeError:
        assert raising
    traces.check()
    assert any(gradient is not None for gradient in traces.gradients)


def test_half_precision_images_are_normalised_in_full() -> None:
    classifier = Classifier(SmallNet(), mean=(0.485,) * 3, std=(0.229,) * 3)
    images = torch.rand(1, 3, 8, 8).bfloat16()
    assert torch.equal(classifier.normalize(images), classifier.normalize(images.float()))
