"""The registry of methods, and the controls."""

import warnings

import pytest
import torch
from torch import Tensor

from small_models import random_images, settled, small
from sufficit import Classifier
from sufficit.explainers import (
    CAMS,
    EXPLAINERS,
    Explainer,
    explain,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # grad-cam's own imports are not ours to mend
    import pytorch_grad_cam as peer
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget


def test_random_depends_on_the_seed_alone() -> None:
    classifier, images = small(), random_images(4)
    first = explain(classifier, images, method="random", seed=3)
    assert torch.equal(explain(classifier, images, method="random", seed=3, batch_size=1), first)
    assert torch.equal(explain(classifier, images[:2], method="random", seed=3), first[:2])
    assert not torch.equal(explain(classifier, images, method="random", seed=4), first)
    assert abs(first.mean() - 0.5) < 0.05
    state_before = torch.get_rng_state()
    explain(classifier, images, method="random")
    assert torch.equal(torch.get_rng_state(), state_before)


def test_center_is_a_gaussian_in_the_middle() -> None:
    found = explain(small(), random_images(2, 8), method="center")
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], found[0].flip(0))
    assert torch.allclose(found[0], found[0].T)
    assert found[0, 3, 3] == 1
    assert found[0, 0, 0] == 0
    assert (found[0, 3, :4].diff() > 0).all()


def test_a_new_method_is_one_function_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def hires(features: Tensor, gradients: Tensor) -> Tensor:
        return (features * gradients).sum(1)

    monkeypatch.setitem(EXPLAINERS, "hirescam", Explainer("cell by cell", "gradients", hires))
    targets = torch.tensor([1, 7, 3])
    model, images = settled("resnet18", 64), random_images(3, 64)
    with peer.HiResCAM(model, [model.layer4]) as cam:
        theirs = cam(images, [ClassifierOutputTarget(int(t)) for t in targets])
    found = explain(Classifier(model), images, targets, "hirescam")
    assert (found - torch.from_numpy(theirs)).abs().max() < 1e-4


def test_every_method_has_a_line_about_it() -> None:
    assert list(EXPLAINERS) == [*CAMS, "rollout", "random", "center"]
    for entry in EXPLAINERS.values():
        assert 10 < len(entry.description) < 100
        assert "\n" not in entry.description


@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")  # random weights give some
def test_methods_that_ignore_the_class_say_so() -> None:
    agnostic = [name for name, method in EXPLAINERS.items() if method.class_agnostic]
    assert agnostic == ["kpca-cam", "rollout", "random", "center"]
    classifier, images = small(), random_images(4)
    for name in (*CAMS, "random", "center"):
        one, other = (explain(classifier, images, torch.full((4,), k), name) for k in (0, 3))
        assert torch.equal(one, other) == (name in agnostic), name
