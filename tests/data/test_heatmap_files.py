"""Heatmaps of other libraries go into evaluate as they come."""

import pytest
import torch
from captum.attr import IntegratedGradients
from pytorch_grad_cam import EigenCAM, GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

from sufficit import Classifier, evaluate, explain, normalize
from sufficit.data.digits import Digits, synthetic_digits

# Both libraries are imported here, and what they import is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
COARSE = {"value_step": 0.05, "percent_step": 0.05}


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return Classifier.load("sufficit:digits")


@pytest.fixture(scope="module")
def digits() -> Digits:
    return synthetic_digits(4, seed=1)


def test_captums_attributions_find_more_than_chance(classifier: Classifier, digits: Digits) -> None:
    found = IntegratedGradients(classifier).attribute(
        digits.images, target=digits.labels, n_steps=16
    )
    scores = evaluate(
        classifier, digits.images, normalize(found.abs().sum(1)), digits.labels, **COARSE
    )
    chance = explain(classifier, digits.images, method="random")
    control = evaluate(classifier, digits.images, chance, digits.labels, **COARSE)
    assert scores.insertion_percent.mean() > control.insertion_percent.mean() + 0.2


def test_grad_cams_map_scores_as_ours_does(classifier: Classifier, digits: Digits) -> None:
    targets = [ClassifierOutputTarget(int(k)) for k in digits.labels]
    with GradCAM(classifier.model, [classifier.model.features]) as cam:
        theirs = torch.from_numpy(cam(classifier.normalize(digits.images), targets))
    ours = explain(classifier, digits.images, digits.labels)
    assert torch.allclose(theirs, ours, atol=1e-4)
    scores = [
        evaluate(classifier, digits.images, maps, digits.labels, score="confidence", **COARSE)
        for maps in (theirs, ours)
    ]
    for name in scores[0].columns:
        assert torch.allclose(scores[0][name], scores[1][name], atol=5e-3), name


def test_a_method_we_lack_can_be_scored(classifier: Classifier, digits: Digits) -> None:
    with EigenCAM(classifier.model, [classifier.model.features]) as cam:
        maps = torch.from_numpy(cam(classifier.normalize(digits.images), targets=None))
    scores = evaluate(classifier, digits.images, maps, digits.labels, **COARSE)
    assert torch.allclose(scores.mask_penalty, (maps >= 0.5).double().mean((1, 2)))
