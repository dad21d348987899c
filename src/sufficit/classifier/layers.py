"""Where a model's features are: find the layer, read its output, arrange it as a grid."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sufficit.errors import UserError, unknown

_POOLS = (nn.Flatten, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_LONG = 6  # blocks of one resolution that make a transformer, also after a stem of convolutions
_NOT_FEATURES = (nn.Identity, nn.Dropout, nn.Dropout2d, *_POOLS)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode inside; give each its own mode again outside."""
    # By attribute, not by model.eval(): a model may override that, and modes may be mixed.
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def hooked(model: nn.Module, layer: str, hook: Callable[..., Any]) -> RemovableHandle:
    """Call the hook with the layer's output at each call, until the handle's block ends."""
    return unwrapped(model).get_submodule(resolve(model, layer)).register_forward_hook(hook)


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled code as it was written inside, so that hooks fire."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import is slow
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def kept(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keep what a function makes: each copy to a GPU would wait for the GPU.

    While torch traces a program, as for an export, a tensor has no numbers that could be kept.
    """
    # A tensor that was made in inference mode could not be used where gradients are taken.
    plain = torch.inference_mode(False)(make)
    cached = lru_cache(maxsize=64)(plain)

    @wraps(make)
    def tensor_of(*arguments: object) -> Tensor:
        call = plain if torch.compiler.is_compiling() else cached
        tensor: Tensor = call(*arguments)
        return tensor

    return tensor_of


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile, DataParallel or DistributedDataParallel."""
    while True:
        if type(model).__name__ == "OptimizedModule":
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def check_name(layer: object) -> None:
    """Raise unless a layer is given by its name."""
    if not isinstance(layer, str):
        came = type(layer).__name__
        raise UserError(f"layer must be a name in model.named_modules(), got {came}: give its name")


def resolve(model: nn.Module, layer: str) -> str:
    """Return the layer's name in the bare model, from its name there or in the wrapped model.

    >>> resolve(nn.DataParallel(nn.Sequential(nn.ReLU())), "module.0")
    '0'
    """
    bare = unwrapped(model)
    # The usual case first, also before any check: a list of all modules takes a GPU's time.
    with suppress(AttributeError, TypeError):
        if layer:
            bare.get_submodule(layer)
            return layer
    check_name(layer)
    inside = dict(bare.named_modules(remove_duplicate=False))
    del inside[""]
    wanted = dict(model.named_modules()).get(layer)
    names = [name for name, module in inside.items() if module is wanted]
    if not names:
        raise unknown("layer", layer, inside)
    return str(names[0])


def find(model: nn.Module, forward: Callable[[], object], inputs: Tensor) -> str:
    """Return the last layer whose output still has a grid.

    In a transformer that is the LayerNorm before the last attention (what grad-cam's users choose);
    in a CNN the last module, pooling aside, whose output is a map of more than one cell.
    """
    calls = _calls(model, forward, inputs)
    kinds = [type(module).__name__.lower() for _, module, *_ in calls]
    attentions = [i for i, kind in enumerate(kinds) if "attention" in kind]
    for i in reversed(range(attentions[-1] if attentions else 0)):
        norm = "layernorm" in kinds[i] or "rmsnorm" in kinds[i]
        if norm and math.prod(calls[i].grid) > 1:
            return calls[i].name
    for name, module, shape, grid in reversed(calls):
        if len(shape) == 4 and math.prod(grid) > 1 and not isinstance(module, _NOT_FEATURES):
            return name
    shown = [f"{name} {list(shape)}" for name, _, shape, _ in calls if len(shape) >= 3]
    listed = "; ".join(shown[-12:]) or ", ".join(name for name, *_ in calls[-12:])
    raise UserError(
        "no layer with a spatial output was found: name one with layer=..., and for an unusual"
        f" output give reshape=... too. Candidates: {listed or 'none (the model is one module)'}"
    )


def find_stages(
    model: nn.Module, forward: Callable[[], object], inputs: Tensor, last: str, most: int
) -> tuple[str, ...]:
    """Return the last layer after up to `most` - 1 that see other things, the coarsest last.

    In a pyramid (CNN, Swin, ConvNeXt) that is the last block at each finer resolution, if there is
    none the last layer there. In a transformer of one resolution it is a block at each equal share
    of the depth: of three stages, at one and two thirds.
    """
    every = _calls(model, forward, inputs)
    attends = any("attention" in type(call.module).__name__.lower() for call in every)
    features = [call for call in every if not isinstance(call.module, _NOT_FEATURES)]
    calls = [(name, module, grid) for name, module, _, grid in features if math.prod(grid) > 1]
    end = max((i for i, (name, *_) in enumerate(calls) if name == last), default=None)
    if end is None:  # a layer of an unusual output, which only its user's reshape can read
        return (last,)
    size = calls[end][2]
    calls = calls[:end]
    blocks = _blocks([(name, module) for name, module, grid in calls if grid == size])
    finer = sorted({grid for *_, grid in calls if math.prod(grid) > math.prod(size)})
    if attends and len(blocks) >= (_LONG if finer else most):
        # One more, because the last layer is inside the last block.
        ends = [(len(blocks) + 1) * k // most - 1 for k in range(1, most)]
        return (*(blocks[end] for end in ends), last)
    stages: list[str] = []
    for grid in finer[: most - 1]:
        there = [(name, module) for name, module, its in calls if its == grid]
        # A whole block, because its parts may be half-way to the next resolution.
        parts = [(name, module) for name, module in there if any(module.children())]
        whole = [(name, module) for name, module in parts if _weighted(module) > 1]
        stages.insert(0, (whole or parts or there)[-1][0])
    return (*stages, last)


def _weighted(block: nn.Module) -> int:
    """Return how many layers with weights a block has."""
    kinds = (nn.Conv2d, nn.Linear)
    return sum(isinstance(module, kinds) for module in block.modules())


def _blocks(calls: list[tuple[str, nn.Module]]) -> list[str]:
    """Return the layers of the shallowest list of three or more alike that have parts."""
    lists: dict[tuple[str, type], list[str]] = {}
    for name, module in calls:
        if any(module.children()):
            lists.setdefault((name.rpartition(".")[0], type(module)), []).append(name)
    long = [(parent.count("."), names) for (parent, _), names in lists.items() if len(names) > 2]
    return min(long, default=(0, []))[1]


class _Call(NamedTuple):
    """A call of a layer."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]  # of its output
    grid: tuple[int, ...]  # height and width of the output's cells, 0 x 0 if it has none


def _calls(model: nn.Module, forward: Callable[[], object], inputs: Tensor) -> list[_Call]:
    """Return the calls of all layers, in the order in which they finish."""
    calls: list[_Call] = []

    def note(name: str, module: nn.Module, _: object, output: object) -> None:
        tensor = first(output)
        grid = (0, 0)
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else ()
        if len(shape) == 4:
            grid = shape[1:3] if _channels_last(shape, inputs) else shape[2:]
        elif len(shape) == 3:
            grid = _token_grid(shape[1], inputs) or grid
        calls.append(_Call(name, module, shape, grid))

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if name:
                stack.enter_context(module.register_forward_hook(partial(note, name)))
        forward()
    return calls


def first(output: Any) -> Any:
    """Return a layer's output or, if that is a tuple or list, the first thing in it."""
    while isinstance(output, tuple | list) and output:
        output = output[0]
    return output


def with_first(output: Any, tensor: Tensor) -> Any:
    """Return a layer's output with another tensor in the place of the first.

    >>> with_first((torch.zeros(1), "attention"), torch.ones(1))
    (tensor([1.]), 'attention')
    """
    if not isinstance(output, tuple | list):
        return tensor
    made: Any = type(output)
    parts = [with_first(output[0], tensor), *output[1:]]
    return made(*parts) if hasattr(output, "_fields") else made(parts)  # a named tuple


def to_grid(output: Any, inputs: Tensor, layer: str = "") -> Tensor:
    """Arrange a map in either channel order, or tokens [N,T,K] with any prefix, as [N,K,h,w].

    Errors name the layer.
    """
    output = first(output)
    if not isinstance(output, Tensor) or output.ndim not in (3, 4):
        came = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise _no_grid(layer, str(came))
    if output.ndim == 4:
        return output.permute(0, 3, 1, 2) if _channels_last(output.shape, inputs) else output
    tokens = output.shape[1]
    size = list(inputs.shape[-2:])
    cells = _token_grid(tokens, inputs)
    if cells is None:
        raise _no_grid(layer, f"{tokens} tokens, which form no grid over {size}")
    grid: Tensor = output[:, -math.prod(cells) :].transpose(1, 2).unflatten(2, cells)
    return grid


def _no_grid(layer: str, came: str) -> UserError:
    """Return the error for a layer whose output has no grid."""
    which = f"layer {layer!r}" if layer else "this one"
    return UserError(
        f"a feature layer must give a grid, [N,K,h,w] or tokens [N,T,K], {which} gives {came}: name"
        " an earlier layer, leave the layer out to have one found, or turn its output into a grid"
        " with Classifier(reshape=...)"
    )


def _channels_last(shape: tuple[int, ...], inputs: Tensor) -> bool:
    """Return whether [N,a,b,c] is [N,h,w,K]: only that order has the image's proportions."""
    height, width = inputs.shape[-2:]
    _, a, b, c = shape
    # Proportions agree up to the rounding of strides.
    ab, bc = (abs(h * width - w * height) <= max(height, width) for h, w in ((a, b), (b, c)))
    return ab and not bc


def _token_grid(tokens: int, inputs: Tensor) -> tuple[int, int] | None:
    """Return the h x w, in the image's proportions, that leaves the fewest prefix tokens.

    A prefix has at most 8: a class token, one for distillation, or registers.
    """
    height, width = inputs.shape[-2:]
    for cells in range(tokens, max(tokens - 9, 1), -1):
        h = round(math.sqrt(cells * height / width))
        if h > 0 and cells % h == 0 and abs(h * width - cells // h * height) < min(height, width):
            return h, cells // h
    return None
