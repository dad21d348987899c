"""Finer-CAM: its scores by hand, its maps as grad-cam draws them."""

import warnings

import pytest
import torch
from torch.nn import functional as F

from small_models import random_images, small
from sufficit import UserError
from sufficit.explainers import (
    explain,
    finer_cam,
    target_logits,
)
from sufficit.explainers.finer import mean_contrast, nearest_classes, weighted_contrast

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # grad-cam's own imports are not ours to mend
    import pytorch_grad_cam as peer


def test_nearest_classes_leave_out_the_target_also_in_a_tie() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 4.0, 0.0], [0.0, 5.0, 4.0, 9.0, 5.5]])
    assert nearest_classes(logits, torch.tensor([2, 1])).tolist() == [[0, 1, 4], [4, 2, 3]]


def test_finer_scores_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -9.0]]).requires_grad_()
    targets = torch.tensor([0])
    p = [float(v) for v in logits.detach().softmax(1)[0]]
    wanted = (p[1] * 1 + p[2] * 2 + p[3] * 3) / (p[1] + p[2] + p[3])
    assert weighted_contrast(logits, targets).item() == pytest.approx(wanted, rel=1e-5)
    assert mean_contrast(logits, targets).item() == pytest.approx(2.0)
    (gradient,) = torch.autograd.grad(mean_contrast(logits, targets).sum(), logits)
    assert torch.allclose(gradient, torch.tensor([[1.0, -0.2, -0.2, -0.2, 0.0]]))


def test_finer_mean_reading_is_gradcam_of_a_contrast() -> None:
    classifier, images = small(), random_images()
    targets = torch.tensor([0, 1, 2])
    found = explain(classifier, images, targets, finer_cam("mean"))
    others = nearest_classes(classifier(images).detach(), targets)
    maps = []
    for image, target, near in zip(images, targets, others, strict=True):
        features = classifier.model[:5](image[None]).detach().requires_grad_()
        logits = classifier.model[5:](features)[0]
        score = logits[target] - 0.6 * logits[near].mean()
        (gradient,) = torch.autograd.grad(score, features)
        maps.append(F.relu((features * gradient.mean((2, 3), keepdim=True)).sum(1)).detach())
    small_maps = torch.cat(maps)
    small_maps = small_maps / small_maps.amax((1, 2), keepdim=True)  # each has a zero
    grown = F.interpolate(small_maps[:, None], (16, 16), mode="bilinear")[:, 0]
    low, high = grown.amin((1, 2), keepdim=True), grown.amax((1, 2), keepdim=True)
    assert torch.allclose(found, (grown - low) / (high - low), atol=1e-5)
    assert not torch.allclose(found, explain(classifier, images, targets, "finer-cam"), atol=1e-2)


@pytest.mark.parametrize("classes", [2, 3])
def test_finer_takes_the_classes_there_are(classes: int) -> None:
    classifier, images = small(classes=classes), random_images(2)
    model = classifier.model
    with peer.FinerCAM(model, [model[4]]) as cam:
        theirs = torch.from_numpy(cam(images))
    assert (explain(classifier, images, method="finer-cam") - theirs).abs().max() < 1e-4


def test_finer_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UserError, match="Did you mean 'mean'"):
        finer_cam("meen")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="1 or more"):
        finer_cam(nearest=0)


def test_target_logits() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert target_logits(logits, torch.tensor([1, 0])).tolist() == [2.0, 3.0]
