"""The CAMs equal the grad-cam package and answers known by hand."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from small_models import linear, random_images, settled, small, small_model
from sufficit import Classifier
from sufficit.explainers import (
    CAMS,
    explain,
    explain_all,
)
from sufficit.explainers.cams import gradcam, gradcam_plus_plus, layercam

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # grad-cam's own imports are not ours to mend
    import pytorch_grad_cam as peer
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget


PEERS = {
    "gradcam": peer.GradCAM,
    "gradcam++": peer.GradCAMPlusPlus,
    "layercam": peer.LayerCAM,
    "kpca-cam": peer.KPCA_CAM,
}


TARGETS = torch.tensor([1, 7, 3])


def vit() -> nn.Module:
    torch.manual_seed(0)
    model = models.VisionTransformer(
        image_size=64,
        patch_size=8,
        num_layers=3,
        num_heads=3,
        hidden_dim=48,
        mlp_dim=96,
        num_classes=10,
    )
    nn.init.normal_(model.heads.head.weight, std=0.3)  # torchvision starts it at zero
    return model.eval()


def token_grid(output: Tensor) -> Tensor:
    return output[:, 1:].transpose(1, 2).reshape(len(output), -1, 8, 8)


def by_peer(name: str, model: nn.Module, layer: str, images: Tensor) -> Tensor:
    layers = [model.get_submodule(layer)]
    reshape = token_grid if isinstance(model, models.VisionTransformer) else None
    if name == "finer-cam":  # its target is one number for the whole batch
        with peer.FinerCAM(model, layers, reshape) as cam:
            pairs = zip(images, TARGETS, strict=True)
            maps = [cam(image[None], target_idx=int(target)) for image, target in pairs]
        return torch.from_numpy(np.concatenate(maps))
    with PEERS[name](model, layers, reshape) as cam:
        return torch.from_numpy(cam(images, [ClassifierOutputTarget(int(t)) for t in TARGETS]))


MODELS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "resnet18": (lambda: settled("resnet18", 96), 96, "layer4"),
    "resnet50": (lambda: settled("resnet50", 96), 96, "layer4"),
    "mobilenet_v2": (lambda: settled("mobilenet_v2", 96), 96, "features"),
    "vit": (vit, 64, "encoder.layers.encoder_layer_2.ln_1"),
}


@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")  # random weights give some
@pytest.mark.parametrize("name", MODELS)
def test_all_five_equal_grad_cam(name: str) -> None:
    build, side, layer = MODELS[name]
    model, images = build(), random_images(3, side)
    classifier = Classifier(model)
    ours = explain_all(classifier, images, TARGETS)
    assert classifier.layer == layer
    for method in CAMS:
        theirs = by_peer(method, model, layer, images)
        assert theirs.amax() > 0.99, method
        assert (ours[method] - theirs).abs().max() < 1e-4, method


@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")  # random weights give some
def test_a_layer_in_the_middle_equals_grad_cam() -> None:
    model, images = settled("resnet18", 64), random_images(3, 64)
    classifier = Classifier(model)
    ours = explain_all(classifier, images, TARGETS, layer="layer3")
    # One image at a time, as the peer is asked: at this layer of random weights a map can jump by
    # 0.025 when the input changes by 1e-7, and batches of one and of three round differently.
    ours["finer-cam"] = torch.cat(
        [
            explain(classifier, image[None], target[None], "finer-cam", layer="layer3")
            for image, target in zip(images, TARGETS, strict=True)
        ]
    )
    for method in CAMS:
        theirs = by_peer(method, model, "layer3", images)
        assert (ours[method] - theirs).abs().max().item() < 1e-4, method


def test_own_prediction_equals_grad_cams_own_prediction() -> None:
    model, images = settled("resnet18", 64), random_images(3, 64)
    with peer.FinerCAM(model, [model.layer4]) as cam:
        theirs = torch.from_numpy(cam(images))
    assert (explain(Classifier(model), images, method="finer-cam") - theirs).abs().max() < 1e-4


def test_gradcam_by_hand() -> None:
    # class 1: gradients of channel 0 average 1, of channel 1 average -0.5
    weights = torch.zeros(2, 2, 2, 2)
    weights[1] = torch.tensor([[[0.0, 2.0], [2.0, 0.0]], [[-1.0, -1.0], [0.0, 0.0]]])
    images = torch.tensor([[[[0.0, 0.2], [0.4, 1.0]], [[0.4, 0.0], [0.4, 0.4]]]])
    # 1 * channel 0 - 0.5 * channel 1 = (-0.2, 0.2, 0.2, 0.8); positive part, over 0.8
    found = explain(linear(weights), images, torch.tensor([1]), "gradcam")
    assert torch.allclose(found, torch.tensor([[[0.0, 0.25], [0.25, 1.0]]]))


def test_layercam_by_hand() -> None:
    weights = torch.zeros(2, 2, 2, 2)
    weights[1] = torch.tensor([[[0.0, 2.0], [2.0, 0.0]], [[-1.0, -1.0], [0.0, 1.0]]])
    images = torch.tensor([[[[0.0, 0.2], [0.4, 1.0]], [[0.4, 0.0], [0.4, 0.1]]]])
    # (0, 0.4, 0.8, 0) + (0, 0, 0, 0.1), over 0.8
    found = explain(linear(weights), images, torch.tensor([1]), "layercam")
    assert torch.allclose(found, torch.tensor([[[0.0, 0.5], [1.0, 0.125]]]))


def test_gradcam_plus_plus_divides_its_weights() -> None:
    features = torch.tensor([[[[1.0, 2.0]], [[0.0, 1.0]]]])
    gradients = torch.tensor([[[[0.5, -1.0]], [[2.0, 2.0]]]])
    # channel 0: 0.5 * 0.25 / (0.5 + 3 * 0.125) = 1/7; channel 1: twice 2 * 4 / (8 + 1 * 8) = 1
    wanted = torch.tensor([[[1 / 7, 2 / 7 + 1]]])
    assert torch.allclose(gradcam_plus_plus(features, gradients), wanted, atol=1e-5)


def test_cams_equal_plain_loops() -> None:
    torch.manual_seed(0)
    features, gradients = torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, 4)
    for n in range(2):
        plain, cells = torch.zeros(3, 4), torch.zeros(3, 4)
        for k in range(5):
            plain += features[n, k] * gradients[n, k].mean()
            for y in range(3):
                for x in range(4):
                    cells[y, x] += max(gradients[n, k, y, x], 0) * features[n, k, y, x]
        assert torch.allclose(gradcam(features, gradients)[n], plain, atol=1e-6)
        assert torch.allclose(layercam(features, gradients)[n], cells, atol=1e-6)


def test_what_writes_over_the_layer_does_not_change_its_features() -> None:
    """Layer 3 is followed by a ReLU in place; grad-cam then reads features that are already cut."""
    classifier, images = small(), random_images()
    targets = torch.tensor([0, 1, 2])
    found = explain(classifier, images, targets, layer="3")
    plain = small_model().eval()
    plain[4] = nn.ReLU(inplace=False)
    assert torch.allclose(found, explain(Classifier(plain, layer="3"), images, targets), atol=1e-6)
    with peer.GradCAM(plain, [plain[3]]) as cam:
        theirs = torch.from_numpy(cam(images, [ClassifierOutputTarget(int(t)) for t in targets]))
    assert (found - theirs).abs().max() < 1e-4
