"""Networks: those of the paper's tables as torchvision builds them, and CLIP with prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torchvision import models

from sufficit.classifier.checkpoint import WEIGHTS, check_fit, read_state
from sufficit.classifier.digit_net import SMALL_NETS, SmallNet
from sufficit.errors import UserError, unknown
from sufficit.files import place

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SMALL_SIDE = 64  # images up to this size get a stem that does not shrink them
_SHAPE = "vision_model with a pooler_output, get_text_features and logit_scale"
_NORMS = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"), ("0", "1"))


@dataclass(frozen=True)
class Architecture:
    """How to build a model, its head and last stage, and the published weights that fit it."""

    build: Callable[[int, int], Any]  # from the number of classes and the image's side
    head: str
    about: str
    published: str | None = None  # a model of torchvision
    layer: str | None = None
    stem: str | None = None  # published weights do not fit it if images are small
    fixed_side: int | None = None
    attention: bool = False
    shipped_for: str | None = None  # the data set that the package's own weights are for


def build(name: str, num_classes: int, image_size: int, *, folded: bool = False) -> nn.Module:
    """A model with random weights; `folded` merges its batch norms into its convolutions."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    side = MODELS[name].fixed_side
    if side is not None and image_size != side:
        raise UserError(f"{name} takes {side} px, got {image_size} px: resize to {side}")
    model: nn.Module = MODELS[name].build(num_classes, image_size).eval()
    return fold(model) if folded else model


def fold(model: nn.Module) -> nn.Module:
    """The same function with every batch norm merged into the convolution before it, in place."""
    for module in model.modules():
        children = dict(module.named_children())
        for conv, norm in _NORMS:
            before, after = children.get(conv), children.get(norm)
            if isinstance(before, nn.Conv2d) and isinstance(after, nn.BatchNorm2d):
                setattr(module, conv, fuse_conv_bn_eval(before, after))
                setattr(module, norm, nn.Identity())
    return model


def fill_in(model: nn.Module, name: str, weights: str | Path, image_size: int) -> tuple[str, ...]:
    """Load published weights, or those of a file, and return the layers that keep random ones.

    Only the head may differ, by its number of classes, and the stem of a net for small images.
    """
    if str(weights) == "none":
        return tuple(key for key, _ in model.named_children())
    architecture = MODELS[name]
    if str(weights) == "default":
        state, source = _published(name), f"the set of published weights of {name}"
    else:
        state, source = read_state(place(weights)), str(weights)
    wanted = model.state_dict()
    left = {architecture.stem} if architecture.stem and image_size <= SMALL_SIDE else set()
    head = [key for key in wanted if key.startswith(f"{architecture.head}.")]
    if any(key not in state or state[key].shape != wanted[key].shape for key in head):
        left.add(architecture.head)
    prefixes = tuple(f"{part}." for part in left)
    state, wanted = (
        {key: value for key, value in tensors.items() if not key.startswith(prefixes)}
        for tensors in (state, wanted)
    )
    check_fit(state, wanted, source)
    model.load_state_dict(state, strict=False)
    return tuple(sorted(left))


def _published(name: str) -> dict[str, Tensor]:
    source, remedy = MODELS[name].published, "give --weights FILE, or none for random ones"
    if MODELS[name].shipped_for is not None:
        return read_state(SMALL_NETS["digits"] / WEIGHTS)
    if source is None:
        raise UserError(f"{name} has no published weights: {remedy}")
    try:
        found = models.get_model_weights(source).DEFAULT
        return dict(found.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        wrong = f"cannot download the weights of {source} ({str(error).splitlines()[0]})"
        raise UserError(f"{wrong}: check the network, or {remedy}") from error


def _resnet18(num_classes: int, image_size: int) -> Any:
    model = models.resnet18(num_classes=num_classes)
    if image_size <= SMALL_SIDE:  # so that the last map is an eighth of the image's side
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = nn.Identity()
    return model


def _resnet50_v1(num_classes: int, _: int) -> Any:
    """ResNet50 as first published: each stage shrinks in its first convolution."""
    model = models.resnet50(num_classes=num_classes)
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    return model


def _vit(layers: int, heads: int, dim: int, patch: int) -> Callable[[int, int], Any]:
    def make(num_classes: int, image_size: int) -> Any:
        sizes = (image_size, patch, layers, heads, dim, 4 * dim)
        return models.VisionTransformer(*sizes, num_classes=num_classes)

    return make


_FOR_SMALL = f"the paper's, with a stem for images of {SMALL_SIDE} pixels and less"
_FOR_QUICK = "six convolutions, for --quick and digits"
MODELS: dict[str, Architecture] = {
    "resnet18": Architecture(_resnet18, "fc", _FOR_SMALL, "resnet18", "layer4", stem="conv1"),
    "resnet50": Architecture(
        lambda n, _: models.resnet50(num_classes=n), "fc", "torchvision's", "resnet50", "layer4"
    ),
    "resnet50-v1": Architecture(
        _resnet50_v1, "fc", "its stages shrink in their first convolution", layer="layer4"
    ),
    "vit-b-16": Architecture(
        _vit(12, 12, 768, 16), "heads", "the paper's", "vit_b_16", fixed_side=224, attention=True
    ),
    "deit-tiny": Architecture(
        _vit(12, 3, 192, 16), "heads", "a small vision transformer", fixed_side=224, attention=True
    ),
    "small-net": Architecture(
        lambda n, _: SmallNet(n),
        "head",
        _FOR_QUICK,
        layer="features",
        shipped_for="synthetic-mnist",
    ),
    "tiny-vit": Architecture(
        _vit(3, 2, 48, 4), "heads", "three layers, for --quick", attention=True
    ),
}


class ZeroShot(nn.Module):
    """The image tower of a CLIP-like model and the texts' features: [N,C,H,W] -> [N,C].

    Logits are scale * cosine + bias. The text tower is not kept.
    """

    texts: Tensor  # [C,K] of length 1
    scale: Tensor
    bias: Tensor

    def __init__(self, model: Any, texts: Tensor) -> None:
        super().__init__()
        self.vision = model.vision_model
        self.projection = getattr(model, "visual_projection", None) or nn.Identity()
        bias = getattr(model, "logit_bias", None)
        shift = torch.zeros(1) if bias is None else bias.detach().clone().view(1)
        self.register_buffer("texts", nn.functional.normalize(texts.detach().clone(), dim=1))
        self.register_buffer("scale", model.logit_scale.detach().exp().clone().view(1))
        self.register_buffer("bias", shift)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the prompts."""
        features = self.projection(self.vision(pixel_values=images).pooler_output)
        cosines = nn.functional.normalize(features, dim=1) @ self.texts.T
        logits: Tensor = self.scale * cosines + self.bias
        return logits


def zero_shot(model: Any, tokenizer: Any, prompts: Sequence[str]) -> ZeroShot:
    """A classifier of prompts from a model of transformers and its tokenizer."""
    parts = ("vision_model", "get_text_features", "logit_scale")
    if not all(hasattr(model, part) for part in parts):
        raise UserError(
            f"clip: needs a CLIP-like model, with {_SHAPE}, got {type(model).__name__}: for a plain"
            " classifier write transformers:NAME"
        )
    # SigLIP was trained on texts of one length.
    fixed = "siglip" in str(model.config.model_type)
    padding = {"padding": "max_length", "max_length": 64} if fixed else {"padding": True}
    tokens = tokenizer(list(prompts), truncation=True, return_tensors="pt", **padding)
    with torch.no_grad():
        found = model.eval().get_text_features(**tokens)
    return ZeroShot(model, getattr(found, "pooler_output", found))


def check_prompts(prompts: Any) -> list[str]:
    """The prompts, two or more different texts; raise for anything else."""
    texts = [one.strip() if isinstance(one, str) else one for one in prompts or ()]
    wrong = isinstance(prompts, str) or not all(isinstance(one, str) and one for one in texts)
    if wrong or len(texts) < 2 or len({*texts}) < len(texts):
        raise UserError(
            f"clip: needs two or more different prompts, one per class, got {prompts!r:.200}: give"
            ' --prompts "a cat,a dog", or prompts=["a cat", "a dog"]'
        )
    return texts
