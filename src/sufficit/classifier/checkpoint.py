"""What a classifier is made of, and how it lies on disk: a description and safetensors."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from sufficit.errors import UserError
from sufficit.files import check_output, make_folder, writing

DESCRIPTION = "classifier.json"
WEIGHTS = "classifier.safetensors"
LARGEST = 2**14  # pixels of a side that a view may have
WAYS = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")


@dataclass(frozen=True)
class View:
    """What the model sees of a picture: the middle `crop` (height, width), or all of it.

    The shorter side is brought to `resize` first, or, without it, to what just covers the crop;
    with `stretch` the whole picture is brought to the crop's size, whatever its proportions.
    """

    crop: tuple[int, int] | None = None
    resize: int | None = None
    channels: int = 3
    stretch: bool = False
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        sides = () if self.crop is None else self.crop
        if not isinstance(sides, tuple | list) or len(sides) not in (0, 2):
            raise UserError(f"a View's crop must be (height, width), got {self.crop!r}")
        for side in (*sides, *(() if self.resize is None else (self.resize,))):
            if not isinstance(side, int) or side < 1:
                raise UserError(f"a View's crop and resize must be pixels, 1 or more, got {side!r}")


@dataclass(frozen=True)
class Recipe:
    """How to build the architecture again: "torchvision:resnet18" and its constructor's options."""

    source: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Parts:
    """What a Classifier is made of."""

    model: nn.Module
    recipe: Recipe | None = None
    layer: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    classes: tuple[str, ...] | None = None
    view: View | None = None
    reshape: Callable[[Any], Tensor] | None = None


SAVED_OPTIONS: dict[str, frozenset[str]] = {
    "torchvision": frozenset(
        {"attention_dropout", "aux_logits", "drop_rate", "dropout", "groups", "image_size"}
        | {"init_weights", "num_classes", "replace_stride_with_dilation", "stochastic_depth_prob"}
        | {"transform_input", "width_mult", "width_per_group", "zero_init_residual"}
    ),
    "timm": frozenset(
        {"depth", "drop_path_rate", "drop_rate", "dynamic_img_size", "embed_dim", "global_pool"}
        | {"img_size", "in_chans", "num_classes", "num_heads", "output_stride", "patch_size"}
    ),
    "transformers": frozenset({"image_size", "num_channels", "num_classes", "num_labels"}),
    "sufficit": frozenset({"channels", "folded", "image_size", "num_classes", "width"}),
}
"""What a saved classifier may ask of a source: shapes, and nothing that is read from elsewhere."""


def strange_options(recipe: Recipe) -> list[str]:
    """The options that a saved classifier may not have, of a source that it may have."""
    known = SAVED_OPTIONS.get(recipe.source.partition(":")[0], frozenset(recipe.options))
    return [name for name in recipe.options if name not in known]


def save(parts: Parts, folder: Path) -> Path:
    """Write description and weights; both appear whole or neither does."""
    from safetensors.torch import save as as_bytes

    if parts.recipe is None:
        raise UserError(
            "this model's architecture has no name to save: make it with Classifier.load, or give "
            'recipe=Recipe("torchvision:resnet18", {"num_classes": 10})'
        )
    if strange := strange_options(parts.recipe):
        raise UserError(
            f"a classifier with the option {strange[0]!r} is not saved, as it would not be loaded"
            " again: save its weights, and give the option to Classifier.load beside weights="
        )
    if parts.reshape is not None:
        raise UserError("reshape is a function, which is not saved: choose a layer that needs none")
    description = asdict(replace(parts, model=None))  # type: ignore[arg-type]  # dropped below
    del description["model"], description["reshape"]
    tensors = {
        key: value.detach().cpu().contiguous().clone()
        for key, value in parts.model.state_dict().items()
    }
    check_output(folder)
    make_folder(folder)
    with writing(folder / WEIGHTS) as weights, writing(folder / DESCRIPTION) as words:
        weights.write_bytes(as_bytes(tensors))  # save_file does not tell a full disk as an OSError
        words.write_text(json.dumps(description, indent=2) + "\n")
    return folder


def load_weights(model: nn.Module, path: Path) -> None:
    """Put a state dict from .safetensors, .pt or .pth into a model; no pickle is run."""
    state = {key.removeprefix("module."): value for key, value in read_state(path).items()}
    wanted = model.state_dict()
    missing = sorted(wanted.keys() - state.keys())
    extra = sorted(state.keys() - wanted.keys())
    wrong = [k for k in wanted.keys() & state.keys() if wanted[k].shape != state[k].shape]
    if missing or extra or wrong:
        first = wrong[0] if wrong else ""
        shapes = (
            f" ({first}: {list(wanted[first].shape)} wanted, {list(state[first].shape)} came)"
            if wrong
            else ""
        )
        raise UserError(
            f"{path} does not fit the model: {len(missing)} missing {missing[:3]}, {len(extra)}"
            f" unknown {extra[:3]}, {len(wrong)} of another shape{shapes}. Is it another"
            " architecture, or another number of classes?"
        )
    model.load_state_dict(state)


@contextmanager
def no_larger_than(path: Path) -> Iterator[None]:
    """Inside, a model that gets more weights than a file could fill is refused at once.

    A description of few words could else ask for all the memory there is.
    """
    if not path.is_file():
        raise UserError(f"no weights file at {path}")
    # A byte a weight or more; some are made twice while a model is built.
    left = 2 * path.stat().st_size

    def weigh(module: nn.Module, name: str, weights: nn.Parameter | None) -> None:
        nonlocal left
        left -= 0 if weights is None else weights.numel()
        if left < 0:
            raise UserError(f"{path} could not be read: a larger model is described than it fills")

    hook = register_module_parameter_registration_hook(weigh)
    try:
        yield
    finally:
        hook.remove()


def read_state(path: Path) -> dict[str, Tensor]:
    """A state dict from .safetensors, .pt or .pth; no pickle is run."""
    if not path.is_file():
        raise UserError(f"no weights file at {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"{path} could not be read as weights ({error}): give .safetensors, or a state dict"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise UserError(f"{path} holds no state dict (names to tensors): save model.state_dict()")
    return state


def read_view(saved: dict[str, Any]) -> View:
    """A view as `save` wrote it."""
    crop, resize, channels = saved["crop"], saved["resize"], int(saved["channels"])
    sides = [int(side) for side in [*(crop or ()), *([resize] if resize else ())]]
    if not all(0 < side <= LARGEST for side in sides) or (crop and len(crop) != 2):
        raise ValueError(f"sides of 1..{LARGEST} pixels wanted, got {crop} and {resize}")
    if not 0 < channels < LARGEST or saved["interpolation"] not in WAYS:
        raise ValueError(f"no view has {channels} channels, {saved['interpolation']!r}")
    return View(
        (sides[0], sides[1]) if crop else None,
        sides[-1] if resize else None,
        channels,
        bool(saved["stretch"]),
        str(saved["interpolation"]),
    )
