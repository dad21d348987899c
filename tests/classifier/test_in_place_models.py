"""Models and methods that work in place on their input get a copy: nothing else changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import pytest
import torch
from fastapi import UploadFile
from torch import Tensor, nn

from small_models import rand, random_images
from sufficit import (
    Classifier,
    Lax,
    View,
    evaluate,
    explain,
    explain_all,
    leak,
    sanity_check,
    train_lax,
)
from sufficit.explainers import CAMS
from sufficit.web import open_service
from sufficit.web.forms import ExplainForm, ScoreForm

IMAGES, TARGETS = random_images(4), torch.tensor([0, 1, 2, 3])
METHODS = ("random", "center", *CAMS)


class Scaling(nn.Module):
    """Stretches its input to -1..1: in place, as some preprocessing layers do, or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, images: Tensor) -> Tensor:
        return images.mul_(2).sub_(1) if self.in_place else images * 2 - 1


def classifier(in_place: bool, **given: Any) -> Classifier:
    torch.manual_seed(0)
    body = (nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=in_place))
    head = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4))
    return Classifier(nn.Sequential(Scaling(in_place), *body, *head), **given)


@contextmanager
def unchanged(*tensors: Tensor) -> Iterator[None]:
    before = [tensor.clone() for tensor in tensors]
    yield
    for tensor, value in zip(tensors, before, strict=True):
        assert torch.equal(tensor, value)


def adapter(model: Classifier) -> Lax:
    loader = [(IMAGES.clone(), TARGETS)]
    with unchanged(loader[0][0]):
        return train_lax(model, loader, epochs=1, validation=loader, progress=False)


def _sanity(model: Classifier) -> list[Tensor]:
    report = sanity_check(model, IMAGES, methods=["gradcam"], targets=TARGETS, progress=False)
    return [found.rank_correlation for found in report.cascade_of("gradcam")]


def _scores(model: Classifier) -> list[Tensor]:
    scores = evaluate(model, IMAGES, rand(4, 16, 16), TARGETS, value_step=0.1, percent_step=0.1)
    return [scores.msi, scores.fid_plus_pixel]


def _page(model: Classifier) -> list[Tensor]:
    model.view = View((16, 16))
    service = open_service(model, "model", ["gradcam"])
    file = UploadFile(BytesIO())
    with unchanged(IMAGES):
        found = service.explain(IMAGES[:1], ExplainForm(file=file), lambda *_: None)
        scored = service.score(IMAGES[:1], ScoreForm(file=file, method="gradcam"), lambda *_: None)
    probabilities = [one["probability"] for one in found["prediction"]]
    return [torch.tensor([*probabilities, *found["maps"][0]["shares"], scored["msi"]])]


USES: dict[str, Callable[[Classifier], Any]] = {
    "call": lambda model: model(IMAGES),
    "features": lambda model: model.features(IMAGES),
    "explain": lambda model: explain(model, IMAGES, TARGETS, "gradcam"),
    "explain_all": lambda model: list(explain_all(model, IMAGES, None, METHODS).values()),
    "evaluate": _scores,
    "leak": lambda model: leak(model, IMAGES, rand(4, 16, 16), TARGETS, donors=2).donors,
    "lax": lambda model: explain(model, IMAGES, TARGETS, adapter(model)),
    "sanity": _sanity,
    "page": _page,
}


@pytest.mark.parametrize("normalised", [False, True], ids=["bare", "mean and std"])
@pytest.mark.parametrize("use", USES)
def test_a_model_that_works_in_place_gives_what_its_twin_gives(use: str, normalised: bool) -> None:
    given = {"mean": (0.4,) * 3, "std": (0.3,) * 3} if normalised else {}
    with unchanged(IMAGES, TARGETS):
        found = USES[use](classifier(True, **given))
    wanted = USES[use](classifier(False, **given))
    if isinstance(found, Tensor):
        found, wanted = [found], [wanted]
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-6, equal_nan=True)


def test_gradients_reach_images_that_a_model_overwrites() -> None:
    images = IMAGES.clone().requires_grad_()
    classifier(True)(images)[:, 0].sum().backward()
    other = IMAGES.clone().requires_grad_()
    classifier(False)(other)[:, 0].sum().backward()
    assert images.grad is not None
    assert torch.allclose(images.grad, other.grad)


def test_a_function_that_works_in_place_harms_no_other_method() -> None:
    def greedy(_: Classifier, images: Tensor, targets: Tensor) -> Tensor:
        targets.zero_()
        return images.mul_(0).mean(1) + 0.5

    def honest(_: Classifier, images: Tensor, targets: Tensor) -> Tensor:
        return images.mean(1) * targets[:, None, None] / 4

    with unchanged(IMAGES, TARGETS):
        found = explain_all(classifier(False), IMAGES, TARGETS, {"a": greedy, "b": honest})
    assert torch.equal(found["b"], IMAGES.mean(1) * TARGETS[:, None, None] / 4)
