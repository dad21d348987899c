"""The four ImageNet networks as classifiers of the package, for `--model python:FILE:FUNCTION`.

The environment variable LAX_WEIGHTS names the folder of their weights (`prepare_weights.py`).
"""

import os
from collections.abc import Callable
from pathlib import Path

from torch import nn

import networks
from sufficit import Classifier

IMAGENET = networks.IMAGENET
HALF = ((0.5,) * 3, (0.5,) * 3)


def _classifier(
    build: Callable[[Path], nn.Module],
    normalization: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET,
) -> Classifier:
    mean, std = normalization
    model = build(Path(os.environ.get("LAX_WEIGHTS", "build/weights")))
    return Classifier(model.eval(), mean=mean, std=std)


def resnet50() -> Classifier:
    """ResNet50 that strides in the first convolution of a block."""
    return _classifier(networks.resnet50)


def mobilenet_v2() -> Classifier:
    """Torchvision's MobileNetV2, IMAGENET1K_V1."""
    return _classifier(networks.mobilenet_v2)


def efficientnet_lite0() -> Classifier:
    """EfficientNet-Lite0."""
    return _classifier(networks.efficientnet_lite0, HALF)


def deit_tiny() -> Classifier:
    """DeiT-tiny as torchvision's VisionTransformer."""
    return _classifier(networks.deit_tiny)


NAMES = {
    "resnet50": resnet50,
    "mobilenet_v2": mobilenet_v2,
    "efficientnet_lite0": efficientnet_lite0,
    "deit_tiny": deit_tiny,
}
