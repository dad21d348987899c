"""Where a model's features are: find the layer, read its output, arrange it as a grid."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

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


class _LayerCall(NamedTuple):
    name: str
    module: nn.Module
    shape: tuple[int, ...]  # of the output, () if it is no tensor


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, every module is in eval mode; outside, each has its own mode again."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def hooked(model: nn.Module, layer: str, hook: Callable[..., Any]) -> Iterator[None]:
    """Inside, the hook gets the layer's output at each call."""
    module = unwrapped(model).get_submodule(resolve(model, layer))
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def recorded(model: nn.Module, layer: str) -> Iterator[list[Any]]:
    """A list that gets a copy of the layer's output at each call: later layers may overwrite it."""
    seen: list[Any] = []

    def record(_: nn.Module, __: object, output: Any) -> None:
        while isinstance(output, tuple | list) and output:
            output = output[0]
        seen.append(output.clone() if isinstance(output, Tensor) else output)

    with hooked(model, layer, record):
        yield seen


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, compiled code runs as it was written, so that hooks fire."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import is slow
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
    """The layer's name in the bare model, from its name there or in the wrapped model.

    >>> resolve(nn.DataParallel(nn.Sequential(nn.ReLU())), "module.0")
    '0'
    """
    bare = unwrapped(model)
    if layer:
        with suppress(AttributeError):
            bare.get_submodule(layer)
            return layer
    inside: dict[str, nn.Module] = {name: m for name, m in bare.named_modules() if name}
    wanted = dict(model.named_modules()).get(layer)
    found = [name for name, module in inside.items() if module is wanted]
    if not found:
        raise unknown("layer", layer, inside)
    return found[0]


def find(model: nn.Module, forward: Callable[[], object], inputs: Tensor) -> str:
    """The last layer whose output still has a grid.

    In a transformer that is the LayerNorm before the last attention (what grad-cam's users choose);
    in a CNN the last module, pooling aside, whose output is a map of more than one cell.
    """
    calls = _trace(model, forward)
    layer = _before_last_attention(calls, inputs) or _last_map(calls, inputs)
    if layer is None:
        names = [f"{call.name} {list(call.shape)}" for call in calls if len(call.shape) >= 3]
        listed = "; ".join(names[-12:]) or ", ".join([call.name for call in calls][-12:])
        raise UserError(
            "no layer with a spatial output was found: name one with layer=..., and for an unusual"
            " output give reshape=... too. Candidates:"
            f" {listed or 'none (the model has no submodules)'}"
        )
    return layer


def to_grid(output: Any, inputs: Tensor) -> Tensor:
    """[N,K,h,w] from a map in either channel order, or from tokens [N,T,K] with any prefix."""
    output = _first(output)
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


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) and output else output


def _trace(model: nn.Module, forward: Callable[[], object]) -> list[_LayerCall]:
    """Every module's output shape, in the order in which the modules finish."""
    calls: list[_LayerCall] = []

    def note(name: str, module: nn.Module, _: object, output: object) -> None:
        first = _first(output)
        shape = tuple(first.shape) if isinstance(first, Tensor) else ()
        calls.append(_LayerCall(name, module, shape))

    named = [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_hook(partial(note, name)) for name, module in named]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _before_last_attention(calls: list[_LayerCall], inputs: Tensor) -> str | None:
    kinds = [type(call.module).__name__.lower() for call in calls]
    attentions = [i for i, kind in enumerate(kinds) if "attention" in kind]
    for i in reversed(range(attentions[-1] if attentions else 0)):
        norm = "layernorm" in kinds[i] or "rmsnorm" in kinds[i]
        if norm and _has_grid(calls[i].shape, inputs):
            return calls[i].name
    return None


def _last_map(calls: list[_LayerCall], inputs: Tensor) -> str | None:
    for name, module, shape in reversed(calls):
        features = len(shape) == 4 and not isinstance(module, _NOT_FEATURES)
        if features and _has_grid(shape, inputs):
            return name
    return None


def _has_grid(shape: tuple[int, ...], inputs: Tensor) -> bool:
    if len(shape) == 4:
        h, w = shape[1:3] if _channels_last(shape, inputs) else shape[2:]
        return h * w > 1
    return len(shape) == 3 and _token_grid(shape[1], inputs) is not None


def _channels_last(shape: tuple[int, ...] | torch.Size, inputs: Tensor) -> bool:
    """Whether [N,a,b,c] is [N,h,w,K]: only that order has the image's proportions."""
    height, width = inputs.shape[-2:]

    def like_image(h: int, w: int) -> bool:  # up to the rounding of strides
        return abs(h * width - w * height) <= max(height, width)

    _, a, b, c = shape
    return not like_image(b, c) and like_image(a, b)


def _token_grid(tokens: int, inputs: Tensor) -> tuple[int, int] | None:
    """The h x w, in the image's proportions, that leaves the fewest prefix tokens (at most 8)."""
    height, width = inputs.shape[-2:]
    for cells in range(tokens, max(tokens - 9, 1), -1):
        h = round(math.sqrt(cells * height / width))
        if h > 0 and cells % h == 0:
            w = cells // h
            if abs(h * width - w * height) < min(height, width):
                return h, w
    return None
