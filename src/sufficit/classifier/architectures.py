"""The classifiers of the paper's tables, as torchvision builds them, and weights for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sufficit.classifier.checkpoint import WEIGHTS, read_state
from sufficit.classifier.digit_net import SMALL_NETS, SmallNet
from sufficit.errors import UserError, unknown

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SMALL_SIDE = 64  # images up to this size get a stem that does not shrink them
_NORMS = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"), ("0", "1"))


@dataclass(frozen=True)
class Architecture:
    """How a model is built, which published weights fit it, what its head and last stage are."""

    build: Callable[[int, int], nn.Module]  # of classes and the image's side
    head: str
    layer: str | None = None
    published: str | None = None  # a model of torchvision
    stem: str | None = None  # what published weights do not fit where images are small
    fixed_side: int | None = None
    attention: bool = False
    shipped_for: str | None = None  # a data set that weights for it come with the package
    about: str = ""


def build(name: str, num_classes: int, image_size: int, *, folded: bool = False) -> nn.Module:
    """A model with random weights; `folded` has its batch norms inside its convolutions."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    wanted = MODELS[name].fixed_side
    if wanted is not None and image_size != wanted:
        raise UserError(f"{name} sees {wanted} x {wanted} pixels, not {image_size} x {image_size}")
    model = MODELS[name].build(num_classes, image_size).eval()
    return fold(model) if folded else model


def fold(model: nn.Module) -> nn.Module:
    """The same function with every batch norm inside the convolution before it, in place."""
    for module in model.modules():
        children = dict(module.named_children())
        for conv, norm in _NORMS:
            before, after = children.get(conv), children.get(norm)
            if isinstance(before, nn.Conv2d) and isinstance(after, nn.BatchNorm2d):
                setattr(module, conv, fuse_conv_bn_eval(before, after))
                setattr(module, norm, nn.Identity())
    return model


def fill_in(model: nn.Module, name: str, weights: str | Path, image_size: int) -> tuple[str, ...]:
    """Put published weights, or those of a file, into a model; say which layers kept random ones.

    All must fit but the head, which is left out where the number of classes differs.
    """
    if str(weights) == "none":
        return tuple(key for key, _ in model.named_children())
    architecture = MODELS[name]
    if str(weights) == "default":
        state, told = _published(name), f"the published weights of {name}"
    else:
        state, told = read_state(Path(weights)), str(weights)
    wanted, left = model.state_dict(), set()
    if architecture.stem and image_size <= SMALL_SIDE:
        left.add(architecture.stem)
    if _differs(state, wanted, architecture.head):
        left.add(architecture.head)
    state = {k: v for k, v in state.items() if not _within(k, left)}
    _check(state, {k: v for k, v in wanted.items() if not _within(k, left)}, told)
    model.load_state_dict(state, strict=False)
    return tuple(sorted(left))


def _published(name: str) -> dict[str, Tensor]:
    from torchvision import models

    source = MODELS[name].published
    if MODELS[name].shipped_for is not None:
        return read_state(SMALL_NETS["digits"].folder / WEIGHTS)
    if source is None:
        raise UserError(
            f"{name} has no published weights: give --weights FILE, or none for random ones"
        )
    try:
        found: dict[str, Tensor] = models.get_model_weights(source).DEFAULT.get_state_dict(
            progress=False, check_hash=True
        )
        return found
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"the weights of {source} could not be had ({str(error).splitlines()[0]}): check the"
            " network, or give --weights FILE, or none for random ones"
        ) from error


def _differs(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], head: str) -> bool:
    keys = [key for key in wanted if _within(key, {head})]
    return any(key not in state or state[key].shape != wanted[key].shape for key in keys)


def _within(key: str, modules: set[str]) -> bool:
    return any(key.startswith(f"{module}.") for module in modules)


def _check(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], told: str) -> None:
    """Raise unless both have the same tensors of the same shapes; counts of steps may be absent."""
    missing = [k for k in wanted if k not in state and not k.endswith("num_batches_tracked")]
    extra = [k for k in state if k not in wanted]
    wrong = [k for k in wanted if k in state and wanted[k].shape != state[k].shape]
    if missing or extra or wrong:
        first = [*missing, *extra, *wrong][0]
        raise UserError(
            f"{told} does not fit the model: {len(missing)} tensors are missing, {len(extra)}"
            f" unknown, {len(wrong)} of another shape, the first is {first}: is it another"
            " architecture?"
        )


def _resnet18(num_classes: int, image_size: int) -> nn.Module:
    from torchvision.models import resnet18

    model: Any = resnet18(num_classes=num_classes)
    if image_size <= SMALL_SIDE:  # the last map is then an eighth of the image's side
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = nn.Identity()
    return model  # type: ignore[no-any-return]  # torchvision has no types


def _resnet50(num_classes: int, image_size: int) -> nn.Module:
    from torchvision.models import resnet50

    model: nn.Module = resnet50(num_classes=num_classes)
    return model


def _resnet50_v1(num_classes: int, image_size: int) -> nn.Module:
    """ResNet50 as it was first published: stages shrink in their first convolution."""
    model: Any = _resnet50(num_classes, image_size)
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    return model  # type: ignore[no-any-return]  # torchvision has no types


def _vit(layers: int, heads: int, dim: int, patch: int) -> Callable[[int, int], nn.Module]:
    def make(num_classes: int, image_size: int) -> nn.Module:
        from torchvision.models import VisionTransformer

        model: nn.Module = VisionTransformer(
            image_size=image_size,
            patch_size=patch,
            num_layers=layers,
            num_heads=heads,
            hidden_dim=dim,
            mlp_dim=4 * dim,
            num_classes=num_classes,
        )
        return model

    return make


def _small(num_classes: int, image_size: int) -> nn.Module:
    return SmallNet(num_classes, width=24)


MODELS: dict[str, Architecture] = {
    "resnet18": Architecture(
        _resnet18,
        "fc",
        "layer4",
        "resnet18",
        stem="conv1",
        about=f"the paper's, with a stem for images of {SMALL_SIDE} pixels and less",
    ),
    "resnet50": Architecture(_resnet50, "fc", "layer4", "resnet50", about="as torchvision has it"),
    "resnet50-v1": Architecture(
        _resnet50_v1, "fc", "layer4", about="its stages shrink in their first convolution"
    ),
    "vit-b-16": Architecture(
        _vit(12, 12, 768, 16),
        "heads",
        None,
        "vit_b_16",
        fixed_side=224,
        attention=True,
        about="the paper's",
    ),
    "deit-tiny": Architecture(
        _vit(12, 3, 192, 16),
        "heads",
        fixed_side=224,
        attention=True,
        about="a small vision transformer",
    ),
    "small-net": Architecture(
        _small,
        "head",
        "features",
        shipped_for="synthetic-mnist",
        about="six convolutions, for --quick and digits",
    ),
    "tiny-vit": Architecture(
        _vit(3, 2, 48, 4), "heads", attention=True, about="three layers, for --quick"
    ),
}
