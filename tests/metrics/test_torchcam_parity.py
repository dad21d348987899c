"""Insertion and deletion by percentage are what torchcam's DeletionInsertionMetric computes."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torchcam.methods import GradCAM, LayerCAM
from torchcam.metrics import DeletionInsertionMetric, _resize_cam

from given_maps import Given
from reference import heatmaps_like
from sufficit import Classifier, evaluate

STEPS = 50  # intervals of 8 pixels of 20 x 20, so that both schedules are the same
SOFTMAX = partial(torch.softmax, dim=-1)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(4)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(200, 4),
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3)
    return net.eval()


@pytest.fixture
def images() -> Tensor:
    return torch.rand(4, 3, 20, 20, generator=torch.Generator().manual_seed(4))


def torchcam_says(extractor, images: Tensor, targets: list[int]) -> dict[str, float]:
    metric = DeletionInsertionMetric(extractor, SOFTMAX, steps=STEPS)
    metric.update(images, targets)
    return metric.summary()


def we_say(model: nn.Module, images: Tensor, heatmaps: Tensor, targets: list[int]):
    columns = ["insertion_percent", "deletion_percent"]
    return evaluate(
        Classifier(model),
        images,
        heatmaps,
        torch.tensor(targets),
        score="confidence",
        percent_step=1 / STEPS,
        columns=columns,
    )


@pytest.mark.parametrize("kind", ["random", "tied", "saturated", "two_valued", "zeros"])
def test_each_image_agrees_to_six_digits(model, images, kind):
    heatmaps = heatmaps_like(kind, 4, (20, 20))
    targets = model(images).argmax(1).tolist()
    scores = we_say(model, images, heatmaps, targets)
    assert scores.insertion_percent.std() > 1e-3
    for i in range(4):
        extractor = Given(model, heatmaps[i : i + 1])
        theirs = torchcam_says(extractor, images[i : i + 1], targets[i : i + 1])
        assert scores.insertion_percent[i].item() == pytest.approx(
            theirs["insertion_auc"], abs=1e-6
        )
        assert scores.deletion_percent[i].item() == pytest.approx(theirs["deletion_auc"], abs=1e-6)


def test_the_mean_over_the_batch_agrees_for_targets_the_model_does_not_predict(model, images):
    heatmaps = heatmaps_like("random", 4, (20, 20))
    targets = [(c + 1) % 4 for c in model(images).argmax(1).tolist()]
    means = we_say(model, images, heatmaps, targets).mean()
    theirs = torchcam_says(Given(model, heatmaps), images, targets)
    assert means["insertion_percent"] == pytest.approx(theirs["insertion_auc"], abs=1e-6)
    assert means["deletion_percent"] == pytest.approx(theirs["deletion_auc"], abs=1e-6)


@pytest.mark.parametrize("method", [GradCAM, LayerCAM])
def test_torchcams_own_maps_score_the_same_here_and_there(model, images, method):
    with method(model, target_layer="3") as extractor:
        targets = model(images).argmax(1).tolist()
        cams = extractor(targets, SOFTMAX(model(images)))
        heatmaps = _resize_cam(extractor.fuse_cams(cams), (20, 20)).detach()
        assert heatmaps.flatten(1).std(1).min() > 0.01
        theirs = torchcam_says(extractor, images, targets)
    means = we_say(model, images, heatmaps, targets).mean()
    assert means["insertion_percent"] == pytest.approx(theirs["insertion_auc"], abs=1e-6)
    assert means["deletion_percent"] == pytest.approx(theirs["deletion_auc"], abs=1e-6)
