"""Where a model's features are: find the layer, listen to it, lay its output out as a grid."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sufficit.errors import UserError, unknown

_NOT_FEATURES = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout2d,
    nn.Flatten,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
)


@dataclass(frozen=True)
class _Step:
    name: str
    module: nn.Module
    shape: tuple[int, ...]


@contextmanager
def hooked(model: nn.Module, layer: str, hook: Callable[..., Any]) -> Iterator[None]:
    """The hook sees the layer's output at each call, and is gone afterwards."""
    module = unwrapped(model).get_submodule(resolve(model, layer))
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def tapped(model: nn.Module, layer: str) -> Iterator[list[Any]]:
    """A list that receives a copy of the layer's output at each call.

    A copy, because what comes next may write over the output.
    """
    seen: list[Any] = []
    with hooked(model, layer, lambda _, __, output: seen.append(_copy(output))):
        yield seen


def _copy(output: Any) -> Any:
    if isinstance(output, tuple | list) and output:
        return _copy(output[0])
    return output.clone() if isinstance(output, Tensor) else output


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled code runs as it was written inside, so that hooks fire."""
    if "torch._dynamo" not in sys.modules:  # nothing can have been compiled; spare the import
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DataParallel or DistributedDataParallel."""
    while True:
        if type(model).__name__ == "OptimizedModule":
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def resolve(model: nn.Module, layer: str) -> str:
    """The layer's name in the bare model; it may be given as the wrapped model spells it.

    >>> resolve(nn.DataParallel(nn.Sequential(nn.ReLU())), "module.0")
    '0'
    """
    bare = unwrapped(model)
    if layer and _holds(bare, layer):
        return layer
    wanted = dict(model.named_modules()).get(layer)
    inside: dict[str, nn.Module] = {name: m for name, m in bare.named_modules() if name}
    found = [name for name, module in inside.items() if module is wanted]
    if not found:
        raise unknown("layer", layer, inside)
    return found[0]


def _holds(model: nn.Module, layer: str) -> bool:
    try:
        model.get_submodule(layer)
    except AttributeError:
        return False
    return True


def find(model: nn.Module, forward: Callable[[], object], inputs: Tensor) -> str:
    """The last layer that still has a grid.

    In a transformer that is the LayerNorm before the last attention (what grad-cam's users choose);
    in a CNN the last module whose output is a map larger than one cell and no mere pooling.
    """
    steps = _trace(model, forward)
    layer = _before_last_attention(steps, inputs) or _last_map(steps, inputs)
    if layer is None:
        names = [f"{step.name} {list(step.shape)}" for step in steps if len(step.shape) >= 3]
        listed = "; ".join(names[-12:]) or ", ".join([s.name for s in steps][-12:])
        raise UserError(
            "no layer with a spatial output was found: name one with layer=..., and for an unusual"
            " output give reshape=... too. Candidates:"
            f" {listed or 'none (the model has no submodules)'}"
        )
    return layer


def to_grid(output: Any, inputs: Tensor) -> Tensor:
    """[N,K,h,w] from a map in either channel order, or from tokens [N,T,K] with any prefix."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor) or output.ndim not in (3, 4):
        came = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise UserError(
            f"features must be [N,K,h,w] or tokens [N,T,K], got {came}: give reshape=..."
        )
    if output.ndim == 4:
        return output.permute(0, 3, 1, 2) if _channels_last(output.shape, inputs) else output
    cells = _token_grid(output.shape[1], inputs)
    if cells is None:
        raise UserError(
            f"{output.shape[1]} tokens do not form a grid over {list(inputs.shape[-2:])}: give"
            " reshape=..."
        )
    h, w = cells
    grid: Tensor = output[:, -h * w :].transpose(1, 2).unflatten(2, (h, w))
    return grid


def _trace(model: nn.Module, forward: Callable[[], object]) -> list[_Step]:
    """Every module's output shape in the order in which they finish."""
    steps: list[_Step] = []
    handles = []

    def listen(name: str, module: nn.Module) -> None:
        def note(_: nn.Module, __: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple | list) and output else output
            shape = tuple(first.shape) if isinstance(first, Tensor) else ()
            steps.append(_Step(name, module, shape))

        handles.append(module.register_forward_hook(note))

    try:
        for name, module in model.named_modules():
            if name:
                listen(name, module)
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return steps


def _before_last_attention(steps: list[_Step], inputs: Tensor) -> str | None:
    attentions = [
        i for i, step in enumerate(steps) if "attention" in type(step.module).__name__.lower()
    ]
    if not attentions:
        return None
    norms = (step for step in reversed(steps[: attentions[-1]]) if _is_norm(step.module))
    return next((step.name for step in norms if _has_grid(step.shape, inputs)), None)


def _last_map(steps: list[_Step], inputs: Tensor) -> str | None:
    maps = (
        step
        for step in reversed(steps)
        if len(step.shape) == 4
        and not isinstance(step.module, _NOT_FEATURES)
        and _has_grid(step.shape, inputs)
    )
    return next((step.name for step in maps), None)


def _is_norm(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "layernorm" in name or "rmsnorm" in name


def _has_grid(shape: tuple[int, ...], inputs: Tensor) -> bool:
    if len(shape) == 4:
        h, w = shape[1:3] if _channels_last(shape, inputs) else shape[2:]
        return h * w > 1
    return len(shape) == 3 and _token_grid(shape[1], inputs) is not None


def _channels_last(shape: tuple[int, ...] | torch.Size, inputs: Tensor) -> bool:
    """Whether [N,a,b,c] is [N,h,w,K]: only that order has the image's proportions."""
    _, a, b, c = shape
    return not _like_image(b, c, inputs) and _like_image(a, b, inputs)


def _like_image(h: int, w: int, inputs: Tensor) -> bool:
    """Whether h x w has the proportions of the image, up to the rounding of strides."""
    height, width = inputs.shape[-2:]
    return abs(h * width - w * height) <= max(height, width)


def _token_grid(tokens: int, inputs: Tensor) -> tuple[int, int] | None:
    """The h x w, in the image's proportions, that leaves the fewest prefix tokens (at most 8)."""
    height, width = inputs.shape[-2:]
    for prefix in range(min(9, tokens - 1)):
        cells = tokens - prefix
        h = round(math.sqrt(cells * height / width))
        if (
            h > 0
            and cells % h == 0
            and cells > 1
            and abs(h * width - cells // h * height) < min(height, width)
        ):
            return h, cells // h
    return None
