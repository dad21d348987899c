"""Copies of a classifier with random weights, block by block from the output."""

import copy
from dataclasses import dataclass
from itertools import chain, groupby, islice
from zlib import crc32

import torch
from torch import Tensor, nn

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.seeds import seeded

STEPS = 8  # most blocks of a cascade


@dataclass(frozen=True)
class Block:
    """Modules that are re-initialised in one step, and their common name."""

    name: str
    modules: tuple[str, ...]  # as in model.named_modules(), last used first


def copied(classifier: Classifier) -> Classifier:
    """Return the classifier with a copy of its bare model."""
    try:
        return classifier.over(copy.deepcopy(classifier.bare))
    except Exception as error:
        raise UserError(
            f"Cannot copy the model ({error}), and only a copy may be randomised: make"
            " copy.deepcopy(model) work"
        ) from error


def cascade(classifier: Classifier, images: Tensor, steps: int = STEPS) -> list[Block]:
    """Return the blocks to re-initialise, from the output to the input, at most `steps`.

    Neighbouring blocks are merged if there are too many, but the one at the output stays alone.
    """
    if steps < 1:
        raise UserError(f"steps must be 1 or more, got {steps}")
    units = _units(classifier, images)
    if not units:
        raise UserError("The model has no weights to randomise: a sanity check needs some")
    # Modules are grouped by the first parts of their names, as few as leave no group over half.
    for depth in range(1, max(name.count(".") for name in units) + 2):
        cut = lambda name, depth=depth: ".".join(name.split(".")[:depth])  # noqa: E731  # a key
        runs = [(name, list(run)) for name, run in groupby(units, key=cut)]
        if max(len(run) for _, run in runs) <= len(units) / 2:
            break
    blocks = [
        Block(name or "(model)", tuple(chain(*(units[unit] for unit in run)))) for name, run in runs
    ]
    if len(blocks) <= steps:
        return blocks
    sizes = [len(blocks)]
    if steps > 1:  # the larger groups are nearer the input
        small, more = divmod(len(blocks) - 1, steps - 1)
        sizes = [1] + [small] * (steps - 1 - more) + [small + 1] * more
    rest = iter(blocks)
    return [_joined(list(islice(rest, size))) for size in sizes]


def randomise(model: nn.Module, block: Block, seed: int) -> None:
    """Re-initialise a block's modules in place.

    The new weights depend on the seed and the module's name, not on the device or the block.
    """
    for name in block.modules:
        with seeded(crc32(f"{seed} {name}".encode())):  # the CPU's generator reads 32 bits
            _reset(model.get_submodule(name))


def _units(classifier: Classifier, images: Tensor) -> dict[str, list[str]]:
    """Return modules with weights of their own by the module that calls them, last used first.

    A module that is never called itself, as the projection inside nn.MultiheadAttention, belongs to
    the nearest parent that is called.
    """
    calls: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
        for name, module in classifier.bare.named_modules()
    ]
    try:
        with torch.no_grad(), classifier.in_eval_mode():
            classifier.plain_logits_of(classifier.normalize(images[:1]))
    finally:
        for handle in handles:
            handle.remove()
    homes: dict[str, list[str]] = {name: [] for name in reversed(calls)}
    for name, module in classifier.bare.named_modules():
        if any(True for _ in module.parameters(recurse=False)) or _has_statistics(module):
            home = name
            while home not in homes:
                home = home.rpartition(".")[0]
            homes[home].append(name)
    return {home: modules for home, modules in homes.items() if modules}


def _has_statistics(module: nn.Module) -> bool:
    """Return whether a module keeps running statistics, as batch norms do."""
    return isinstance(getattr(module, "running_mean", None), Tensor)


def _joined(blocks: list[Block]) -> Block:
    """Return one block of several.

    >>> _joined([Block("encoder.layer_2", ()), Block("encoder.layer_1", ())]).name
    'encoder.layer_2 to layer_1'
    """
    first = blocks[0].name
    last = blocks[-1].name
    place = first.rpartition(".")[0]
    if place and last.rpartition(".")[0] == place:
        last = last.removeprefix(f"{place}.")
    name = first if len(blocks) == 1 else f"{first} to {last}"
    return Block(name, tuple(module for block in blocks for module in block.modules))


def _reset(module: nn.Module) -> None:
    """Call the module's reset_parameters, or else permute the values of each weight; on the CPU."""
    reset = getattr(module, "reset_parameters", None)
    with torch.inference_mode(False), torch.no_grad():
        if callable(reset):
            # On the CPU, whose generator draws the same numbers on every machine.
            own = chain(module.parameters(recurse=False), module.buffers(recurse=False))
            device = next(own).device
            module.to("cpu")
            reset()
            module.to(device)
            return
        for weight in module.parameters(recurse=False):
            order = torch.randperm(weight.numel()).to(weight.device)
            weight.copy_(weight.flatten()[order].view_as(weight))
        # Statistics of trained weights would keep a part of what the model has learned.
        if _has_statistics(module):
            module.get_buffer("running_mean").zero_()
            module.get_buffer("running_var").fill_(1)
