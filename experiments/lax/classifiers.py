"""The four ImageNet networks as classifiers of the package, for `--model python:FILE:FUNCTION`.

The environment variable LAX_WEIGHTS names the folder of their weights (`prepare_weights.py`).
"""

import os
from pathlib import Path

import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import networks
from sufficit import Classifier

HALF = ((0.5,) * 3, (0.5,) * 3)


def _root() -> Path:
    return Path(os.environ.get("LAX_WEIGHTS", "build/weights"))


def resnet50() -> Classifier:
    """ResNet50 that strides in the first convolution of a block."""
    model = torchvision.models.resnet50()
    for layer in (model.layer2, model.layer3, model.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    model.load_state_dict(networks.weights_of(_root(), "resnet50_v1_imagenet"), strict=False)
    return _classifier(model, *networks.IMAGENET)


def mobilenet_v2() -> Classifier:
    """Torchvision's MobileNetV2, IMAGENET1K_V1."""
    model = torchvision.models.mobilenet_v2()
    model.load_state_dict(networks.weights_of(_root(), "mobilenet_v2"))
    return _classifier(model, *networks.IMAGENET)


class Lite0(nn.Module):
    """EfficientNet-Lite0 by its weights' names."""

    def __init__(self, saved: dict[str, Tensor]) -> None:
        super().__init__()
        strides = {1: 2, 3: 2, 5: 2, 11: 2}  # the first block of a group that halves
        blocks = []
        for number in range(16):
            mine = f"_blocks.{number}."
            out = saved[mine + "_project_conv.weight"].shape[0]
            wide, _, kernel, _ = saved[mine + "_depthwise_conv.weight"].shape
            expand = mine + "_expand_conv.weight" in saved
            narrow = saved[mine + "_expand_conv.weight"].shape[1] if expand else wide
            stride = strides.get(number, 1)
            blocks.append(networks.LiteBlock(wide, narrow, out, kernel, stride, expand))
        self._conv_stem = networks.SamePadded(3, 32, 3, 2, bias=False)
        self._bn0 = nn.BatchNorm2d(32, eps=1e-3)
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = nn.Conv2d(320, 1280, 1, bias=False)
        self._bn1 = nn.BatchNorm2d(1280, eps=1e-3)
        self._fc = nn.Linear(1280, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of normalised images."""
        x = F.relu6(self._bn0(self._conv_stem(images)))
        for block in self._blocks:
            x = block(x)
        x = F.relu6(self._bn1(self._conv_head(x)))
        return self._fc(x.mean((2, 3)))


def efficientnet_lite0() -> Classifier:
    """EfficientNet-Lite0."""
    saved = networks.weights_of(_root(), "efficientnet_lite0")
    model = Lite0(saved)
    model.load_state_dict(saved)
    return _classifier(model, *HALF)


def deit_tiny() -> Classifier:
    """DeiT-tiny as torchvision's VisionTransformer."""
    model = torchvision.models.VisionTransformer(
        image_size=224, patch_size=16, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768
    )
    model.load_state_dict(networks.weights_of(_root(), "deit_tiny_imagenet"))
    return _classifier(model, *networks.IMAGENET)


def _classifier(model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> Classifier:
    return Classifier(model.eval(), mean=mean, std=std)


NAMES = {
    "resnet50": resnet50,
    "mobilenet_v2": mobilenet_v2,
    "efficientnet_lite0": efficientnet_lite0,
    "deit_tiny": deit_tiny,
}
