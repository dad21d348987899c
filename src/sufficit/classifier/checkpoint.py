"""A classifier on disk: its description in JSON, its weights in safetensors."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile, is_zipfile

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from sufficit.errors import GoneError, UserError
from sufficit.files import check_output, local_file, make_folder, writing

if TYPE_CHECKING:
    from sufficit.classifier.classifier import Classifier

DESCRIPTION = "classifier.json"
WEIGHTS = "classifier.safetensors"
MAX_SIDE = 2**14  # pixels
MAX_VALUES = 2**26  # of an image as the model sees it
OUTPUTS = ("logits", "probabilities")  # what a model gives
INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")


@dataclass(frozen=True)
class View:
    """What the model sees of an image: the middle `crop` (height, width), or all of it."""

    crop: tuple[int, int] | None = None
    resize: int | None = None  # of the shorter side before the crop; None: just covers the crop
    channels: int = 3
    stretch: bool = False  # resize the whole image to the crop, at the cost of its proportions
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        crop = (1, 1) if self.crop is None else self.crop
        resize = 1 if self.resize is None else self.resize
        sides = (*crop, resize) if isinstance(crop, tuple | list) and len(crop) == 2 else (0,)
        if not all(isinstance(side, int) and side > 0 for side in sides):
            came = f"{self.crop!r} and {self.resize!r}"
            raise UserError(f"a View's crop (height, width) and resize must be pixels, got {came}")
        if max(sides) > MAX_SIDE or crop[0] * crop[1] * self.channels > MAX_VALUES:
            raise UserError(
                f"sides must be 1..{MAX_SIDE} pixels, and an image at most {MAX_VALUES} values, got"
                f" {(self.crop, self.resize, self.channels)}: choose a smaller size"
            )


def check_mean_std(
    mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return the mean and std of a model's images, one number per channel, or None twice."""
    if mean is None and std is None:
        return None, None
    with suppress(TypeError):  # None, or one number for all channels
        means, stds = (tuple(map(float, values)) for values in (mean, std))  # type: ignore[arg-type]
        if len(means) == len(stds) > 0 and all(map(math.isfinite, means + stds)) and min(stds) > 0:
            return means, stds
    raise UserError(
        "mean and std must both be given, one number per channel, finite and the std above 0, got"
        f" {mean!r} and {std!r}: write mean=(0.5, 0.5, 0.5), or leave out both"
    )


@dataclass(frozen=True)
class Recipe:
    """How to build the architecture again: "torchvision:resnet18" and its constructor's options."""

    source: str
    options: dict[str, Any] = field(default_factory=dict)


SAVED_OPTIONS: dict[str, set[str]] = {
    "torchvision": {"attention_dropout", "aux_logits", "drop_rate", "dropout", "groups"}
    | {"image_size", "init_weights", "num_classes", "replace_stride_with_dilation"}
    | {"stochastic_depth_prob", "transform_input", "width_mult", "width_per_group"}
    | {"zero_init_residual"},
    "timm": {"depth", "drop_path_rate", "drop_rate", "dynamic_img_size", "embed_dim", "global_pool"}
    | {"img_size", "in_chans", "num_classes", "num_heads", "output_stride", "patch_size"},
    "transformers": {"image_size", "num_channels", "num_classes", "num_labels"},
    "clip": {"prompts"},
    "sufficit": {"channels", "num_classes", "width"},
}
"""The options a saved classifier may have: shapes, and nothing that reads other files."""


def refused_options(recipe: Recipe) -> list[str]:
    """Return the options of a known source that a saved classifier may not have."""
    allowed = SAVED_OPTIONS.get(recipe.source.partition(":")[0], recipe.options)
    return [name for name in recipe.options if name not in allowed]


def check_saving(classifier: "Classifier") -> None:
    """Raise for a classifier that `save` can't describe."""
    if classifier.recipe is None:
        raise UserError(
            "the architecture has no name to save (those of python:FILE.py:FUNCTION have none): use"
            ' Classifier.load, or recipe=Recipe("torchvision:resnet18", dict(num_classes=10)), or'
            " keep a twin in memory with train_twin(classifier, loader) in Python"
        )
    refused = refused_options(classifier.recipe)
    if refused:
        raise UserError(
            f"cannot save the option {refused[0]!r}, because Classifier.load would reject it: save"
            " the weights only, and pass the option to Classifier.load(..., weights=FILE)"
        )
    if classifier.reshape is not None:
        raise UserError("cannot save reshape, a function: choose a layer that needs none")


def save(classifier: "Classifier", folder: Path) -> Path:
    """Write weights and description to the folder, the description last."""
    check_saving(classifier)
    assert classifier.recipe is not None
    names = ("layer", "mean", "std", "classes", "output")
    description = {
        "recipe": asdict(classifier.recipe),
        **{name: getattr(classifier, name) for name in names},
        "view": classifier.view and asdict(classifier.view),
    }
    check_output(folder)
    make_folder(folder)
    # The description goes into place after the weights: a folder that has one is complete.
    with writing(folder / DESCRIPTION) as words, writing(folder / WEIGHTS) as weights:
        words.write_text(json.dumps(description, indent=2) + "\n")
        weights.write_bytes(weights_as_bytes(classifier.bare))
    return folder


def weights_as_bytes(model: nn.Module) -> bytes:
    """Return the model's state dict as safetensors; its own save_file hides that a disk is full."""
    from safetensors.torch import save as as_bytes

    state = model.state_dict().items()
    return as_bytes({key: value.detach().cpu().contiguous().clone() for key, value in state})


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict from .safetensors, .pt or .pth into a model, without running a pickle."""
    # "module." is what DataParallel puts before each name.
    state = {key.removeprefix("module."): value for key, value in read_state(path).items()}
    check_fit(state, model.state_dict(), str(path))
    model.load_state_dict(state, strict=False)  # counts of batches may be missing


def check_fit(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], source: str) -> None:
    """Raise unless both have the same tensors of the same shapes.

    How many batches a batch norm has seen, which only training reads, may be missing.
    """
    counts = {key for key in wanted if key.endswith("num_batches_tracked")}
    missing = sorted(wanted.keys() - state.keys() - counts)
    extra = sorted(state.keys() - wanted.keys())
    wrong = [k for k in wanted if k in state and wanted[k].shape != state[k].shape]
    if missing or extra or wrong:
        shapes = [f"{k} {list(state[k].shape)}, not {list(wanted[k].shape)}" for k in wrong[:1]]
        raise UserError(
            f"{source} does not fit the model: {len(missing)} missing {missing[:3]}, {len(extra)}"
            f" unknown {extra[:3]}, {len(wrong)} of another shape {shapes}: check the architecture"
            " and the number of classes"
        )


@contextmanager
def limited_by(path: Path) -> Iterator[None]:
    """Refuse a model larger than the file inside: a few words could allocate all memory."""
    if not path.is_file():
        raise UserError(f"no weights file at {path}")
    # A weight takes one byte or more, and some are made twice while a model is built.
    left = 2 * path.stat().st_size

    def count(module: nn.Module, name: str, weights: nn.Parameter | None) -> None:
        nonlocal left
        left -= 0 if weights is None else weights.numel()
        if left < 0:
            wrong = "its description asks for a larger model than the file can fill"
            raise UserError(f"{path} could not be read: {wrong}")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def read_state(path: Path) -> dict[str, Tensor]:
    """Return the state dict in a .safetensors, .pt or .pth file, without running a pickle."""
    if not path.is_file():
        raise UserError(f"no weights file at {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            with local_file(path) as file:
                return load_file(file)
        with local_file(path) as file:
            state = load_tensors(file)
    except GoneError:
        raise
    except Exception as error:
        # torch's own words for a whole model that was pickled fill a screen
        pickled = isinstance(error, UnpicklingError)
        reason = "it holds more than tensors, or is corrupt" if pickled else error
        remedy = "give .safetensors, or a state dict: torch.save(model.state_dict(), FILE)"
        raise UserError(f"{path} could not be read as weights ({reason}): {remedy}") from error
    # Where training scripts keep the weights in their checkpoints, Lightning's among them.
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise UserError(f"{path} holds no state dict (names to tensors): save model.state_dict()")
    return state


def load_tensors(file: Path) -> Any:
    """Return what torch.save wrote, tensors and plain values only.

    Raise for a file that announces more bytes than it has.
    """
    # A small zip may unpack to more than the memory holds; torch.save writes none like it.
    if is_zipfile(file):
        with ZipFile(file) as archive:  # torch.save compresses nothing
            announced = sum(info.file_size for info in archive.infolist())
        if announced > file.stat().st_size:
            raise ValueError("it holds more bytes than the file has")
    return torch.load(file, map_location="cpu", weights_only=True)


def read_view(saved: dict[str, Any]) -> View:
    """Return the view that `save` wrote; ValueError for values that no view may have."""
    crop = saved["crop"] and tuple(int(side) for side in saved["crop"])
    resize = saved["resize"] and int(saved["resize"])
    channels = int(saved["channels"])
    interpolation = saved["interpolation"]
    if channels < 1:
        raise ValueError(f"no image has {channels} channels")
    if len(crop or (1, 1)) != 2 or interpolation not in INTERPOLATIONS:
        raise ValueError(f"no view has the crop {crop}, {interpolation!r}")
    return View(crop or None, resize or None, channels, bool(saved["stretch"]), str(interpolation))
