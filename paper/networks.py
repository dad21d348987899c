"""The networks of the tables, and their weights from torchvision or from a file.

A trained one is a model like any other: --model python:paper/networks.py:small_resnet18
--num-classes 10 --size 32 --weights runs/cifar10/classifier/classifier.safetensors
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision import models

from sufficit import Classifier, UserError, View

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


def resnet18(num_classes: int = 1000) -> Classifier:
    """Build ResNet18 as torchvision has it."""
    return wrapped(models.resnet18(num_classes=num_classes), "layer4")


def small_resnet18(num_classes: int = 10) -> Classifier:
    """Build ResNet18 for images of 64 pixels and less: the stem keeps their size.

    The last map is an eighth of the image's side.
    """
    model = models.resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return wrapped(model, "layer4")


def resnet50_v1(num_classes: int = 1000) -> Classifier:
    """Build ResNet50 as first published: a stage shrinks in its first convolution."""
    model = models.resnet50(num_classes=num_classes)
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride = (2, 2)
        stage[0].conv2.stride = (1, 1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3  # as in Keras, where its weights come from
    return wrapped(model, "layer4")


def vit_b_16(num_classes: int = 1000) -> Classifier:
    """Build ViT-B/16 as torchvision has it."""
    return wrapped(models.vit_b_16(num_classes=num_classes))


def deit_tiny(num_classes: int = 1000) -> Classifier:
    """Build a vision transformer with 5.5 million weights."""
    return wrapped(models.VisionTransformer(224, 16, 12, 3, 192, 768, num_classes=num_classes))


def tiny_vit(num_classes: int = 10) -> Classifier:
    """Build a vision transformer of three layers for images of 32 pixels."""
    return wrapped(models.VisionTransformer(32, 4, 3, 2, 48, 192, num_classes=num_classes))


def small_net(num_classes: int = 10) -> Classifier:
    """Build the six convolutions of the network that ships with the package."""
    net = Classifier.load("sufficit:digits", weights=None, num_classes=num_classes)
    return wrapped(net.model, "features")


def wrapped(model: nn.Module, layer: str | None = None) -> Classifier:
    """Return the model as a classifier of images with ImageNet's mean and spread."""
    return Classifier(model, layer, MEAN, STD)


@dataclass(frozen=True)
class Network:
    """How to build a network, and which weights it can start from."""

    build: Callable[[int], Classifier]  # from the number of classes
    head: str  # is dropped from weights of another number of classes
    weights: Callable[[], dict[str, Tensor]] | None = None  # that are published
    new: tuple[str, ...] = ()  # parts that no published weights fit
    side: int | None = None  # of its input, if it takes only one
    tokens: bool = False  # attention rollout needs them


def _torchvision(name: str) -> Callable[[], dict[str, Tensor]]:
    return lambda: dict(models.get_model_weights(name).DEFAULT.get_state_dict(check_hash=True))


def _digits() -> dict[str, Tensor]:
    return dict(Classifier.load("sufficit:digits").model.state_dict())


NETWORKS = {
    "resnet18": Network(resnet18, "fc", _torchvision("resnet18")),
    "small-resnet18": Network(small_resnet18, "fc", _torchvision("resnet18"), new=("conv1",)),
    "resnet50-v1": Network(resnet50_v1, "fc"),
    "vit-b-16": Network(vit_b_16, "heads", _torchvision("vit_b_16"), side=224, tokens=True),
    "deit-tiny": Network(deit_tiny, "heads", side=224, tokens=True),
    "small-net": Network(small_net, "head", _digits),
    "tiny-vit": Network(tiny_vit, "heads", side=32, tokens=True),
}


def build(name: str, classes: Sequence[str], side: int, seed: int = 0) -> Classifier:
    """Build a network with random weights for these classes and images of this side."""
    torch.manual_seed(seed)
    classifier = NETWORKS[name].build(len(classes))
    classifier.classes = tuple(classes)
    classifier.view = View((side, side))
    return classifier


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a file of weights, or the parts STEM_a, STEM_b, ... that it was cut into."""
    parts = [path] if path.is_file() else sorted(path.parent.glob(f"{path.stem}_*.safetensors"))
    if not parts:
        raise UserError(f"no weights file at {path}: give a file, default, or none")
    return {name: value for part in parts for name, value in load_file(part).items()}


def fill_in(model: nn.Module, name: str, weights: str) -> list[str]:
    """Load published weights ("default"), those of a file, or "none"; return what stays random.

    Only the head may differ, by its number of classes, and the parts that are listed as new.
    """
    network = NETWORKS[name]
    if weights == "none":
        return [part for part, _ in model.named_children()]
    if weights != "default":
        state = read_weights(Path(weights))
    elif network.weights is None:
        raise UserError(f"{name} has no published weights: give --weights FILE or none")
    else:
        state = network.weights()
    own = model.state_dict()
    left = set(network.new)
    for key in own:
        if key.startswith(f"{network.head}.") and (
            key not in state or state[key].shape != own[key].shape
        ):
            left.add(network.head)
    fitting = {key: value for key, value in state.items() if key.partition(".")[0] not in left}
    missing = model.load_state_dict(fitting, strict=False)
    wrong = [key for key in missing.missing_keys if key.partition(".")[0] not in left]
    if wrong or missing.unexpected_keys:
        first = (wrong + missing.unexpected_keys)[0]
        raise UserError(f"the weights {weights} do not fit {name}, as in {first}: give its own")
    return sorted(left)
