"""Copies of a classifier with random weights, block by block from the output, or random labels."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sufficit.classifier.classifier import Classifier, check_images, check_targets
from sufficit.errors import UserError
from sufficit.progress import Progress, bar
from sufficit.seeds import seeded

STEPS = 8  # blocks of a cascade, at most
EPOCHS = 30
RATE = 1e-3  # Adam's
Pairs = Iterable[tuple[Tensor, Tensor]]
"""A training loader: images in 0..1 [B,C,H,W] and their labels [B], batch by batch."""


@dataclass(frozen=True)
class Block:
    """Modules that are re-initialised in one step, and what they are called together."""

    name: str
    modules: tuple[str, ...]  # as in model.named_modules(), the last used first


@dataclass(frozen=True)
class LabelTraining:
    """How well a copy learned labels that were permuted over the images."""

    images: int
    epochs: int
    accuracy: float  # on the permuted labels it was trained on
    chance: float  # share of the commonest label

    @property
    def learned(self) -> bool:
        """Whether it came at least half the way from chance to all labels."""
        return self.accuracy >= (1 + self.chance) / 2


def copied(classifier: Classifier) -> Classifier:
    """The same classifier over a copy of its bare model."""
    try:
        model = copy.deepcopy(classifier.bare)
    except Exception as error:
        raise UserError(
            f"the model can't be copied ({error}), and only a copy may be made random: build it so"
            " that copy.deepcopy(model) works"
        ) from error
    return Classifier(
        model,
        classifier.layer,
        classifier.mean,
        classifier.std,
        classes=classifier.classes,
        view=classifier.view,
        reshape=classifier.reshape,
    )


def cascade(classifier: Classifier, images: Tensor, steps: int = STEPS) -> list[Block]:
    """What to re-initialise, from the output to the input, in at most `steps` blocks.

    The block nearest the output stands alone; where there are too many, neighbours go together.
    """
    if steps < 1:
        raise UserError(f"steps must be 1 or more, got {steps}")
    units = _units(classifier, images)
    if not units:
        raise UserError("the model has no weights that could be made random")
    blocks = _blocks(units)
    if steps == 1:
        return [_joined(blocks)]
    if len(blocks) > steps:
        return [blocks[0], *_merged(blocks[1:], steps - 1)]
    return blocks


def randomise(model: nn.Module, block: Block, seed: int) -> None:
    """Re-initialise a block's modules in place.

    What a module gets depends on the seed and its name: not on the device, nor on its block.
    """
    for name in block.modules:
        with seeded(crc32(f"{seed} {name}".encode())):  # the CPU's generator reads 32 bits
            _reset(model.get_submodule(name))


def train_on_random_labels(
    classifier: Classifier,
    loader: Pairs,
    *,
    epochs: int = EPOCHS,
    seed: int = 0,
    progress: bool | None = None,
) -> tuple[Classifier, LabelTraining]:
    """A copy with random weights, trained by Adam on labels permuted over the loader's images.

    The images are read once and kept in memory, since each must keep its label.
    """
    if epochs < 1:
        raise UserError(f"epochs must be 1 or more, got {epochs}")
    images, labels, size = _read(loader)
    generator = torch.Generator().manual_seed(seed)
    labels = labels[torch.randperm(len(labels), generator=generator)]
    student = _fresh(classifier, images, seed)
    _check_classes(student, images, labels)
    total = epochs * -(-len(labels) // size)
    with bar("training on random labels", progress) as tick, seeded(seed):
        _train(student, images, labels, (size, total), generator, tick)
    accuracy = _accuracy(student, images, labels, size)
    student.to(dtype=classifier.dtype)
    chance = float(labels.bincount().max()) / len(labels)
    return student, LabelTraining(len(labels), epochs, accuracy, chance)


def _units(classifier: Classifier, images: Tensor) -> dict[str, list[str]]:
    """Modules with weights of their own by the module they run in, the last used first.

    A module that is never called itself, as the projection inside nn.MultiheadAttention, goes with
    the nearest one around it that is.
    """
    model = classifier.bare
    order = _order_of_use(classifier, images)
    homes: dict[str, list[str]] = {name: [] for name in order}
    for name, module in model.named_modules():
        if _has_weights(module):
            homes[_called(name, homes)].append(name)
    return {home: found for home, found in homes.items() if found}


def _order_of_use(classifier: Classifier, images: Tensor) -> list[str]:
    """Names of the modules called in a forward pass, the last called first; the model is last."""
    last: dict[str, int] = {}
    calls = 0

    def listen(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def note(_: nn.Module, __: object) -> None:
            nonlocal calls
            calls += 1
            last[name] = calls

        return module.register_forward_pre_hook(note)

    handles = [listen(name, module) for name, module in classifier.bare.named_modules()]
    try:
        with torch.no_grad(), classifier.in_eval_mode():
            classifier.plain_logits_of(classifier.normalize(images[:1]))
    finally:
        for handle in handles:
            handle.remove()
    return sorted(last, key=lambda name: -last[name])


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False)) or _has_statistics(module)


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(getattr(module, "running_mean", None), Tensor)


def _called(name: str, called: dict[str, list[str]]) -> str:
    while name not in called:
        name = name.rpartition(".")[0]
    return name


def _blocks(units: dict[str, list[str]]) -> list[Block]:
    """Runs of modules of one part of the model: the coarsest cut with no run over half of all."""
    deepest = max(name.count(".") + 1 for name in units)
    for depth in range(1, deepest + 1):
        runs = [(cut, list(run)) for cut, run in groupby(units, key=lambda name: _cut(name, depth))]
        if max(len(run) for _, run in runs) <= len(units) / 2:
            break
    return [Block(cut or "(model)", tuple(m for u in run for m in units[u])) for cut, run in runs]


def _cut(name: str, depth: int) -> str:
    """The first parts of a name.

    >>> _cut("layer4.1.conv2", 2)
    'layer4.1'
    """
    return ".".join(name.split(".")[:depth])


def _merged(blocks: list[Block], groups: int) -> list[Block]:
    """Neighbouring blocks joined to so many, the larger ones nearer the input.

    >>> [block.name for block in _merged([Block(name, ()) for name in "edcba"], 3)]
    ['e', 'd to c', 'b to a']
    """
    small, more = divmod(len(blocks), groups)
    sizes = [small] * (groups - more) + [small + 1] * more
    rest = iter(blocks)
    return [_joined([next(rest) for _ in range(size)]) for size in sizes]


def _joined(blocks: list[Block]) -> Block:
    """One block of several.

    >>> _joined([Block("encoder.layer_2", ()), Block("encoder.layer_1", ())]).name
    'encoder.layer_2 to layer_1'
    """
    first, last = blocks[0].name, blocks[-1].name
    place = first.rpartition(".")[0]
    if place and last.rpartition(".")[0] == place:
        last = last.removeprefix(f"{place}.")
    name = first if len(blocks) == 1 else f"{first} to {last}"
    return Block(name, tuple(module for block in blocks for module in block.modules))


def _reset(module: nn.Module) -> None:
    """By its own reset_parameters, or else each weight's values permuted; both drawn on the CPU."""
    reset = getattr(module, "reset_parameters", None)
    with torch.inference_mode(False), torch.no_grad():
        if callable(reset):
            device = next(_own_tensors(module)).device
            module.to("cpu")
            reset()
            module.to(device)
            return
        for weight in module.parameters(recurse=False):
            order = torch.randperm(weight.numel()).to(weight.device)
            weight.copy_(weight.flatten()[order].view_as(weight))
        if _has_statistics(module):
            module.get_buffer("running_mean").zero_()
            module.get_buffer("running_var").fill_(1)


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _read(loader: Pairs) -> tuple[Tensor, Tensor, int]:
    """All images and labels of a loader, and the size of its batches."""
    images, labels = [], []
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UserError(
                f"random_labels must yield (images, labels), got {type(batch).__name__}:"
                " give a DataLoader of pairs"
            )
        check_images(batch[0])
        found = check_targets(batch[1], len(batch[0]))
        assert found is not None
        images.append(batch[0].cpu())
        labels.append(found.cpu())
    if sum(map(len, labels)) < 2:
        raise UserError("random_labels must yield two images or more: is the loader used up?")
    return torch.cat(images), torch.cat(labels), max(2, len(labels[0]))


def _check_classes(student: Classifier, images: Tensor, labels: Tensor) -> None:
    with torch.no_grad():
        classes = student(images[:1]).shape[1]
    if int(labels.max()) >= classes:
        raise UserError(
            f"labels must lie in 0..{classes - 1}, the model has {classes} classes, got"
            f" {int(labels.max())}"
        )


def _fresh(classifier: Classifier, images: Tensor, seed: int) -> Classifier:
    """A copy with random weights throughout, in float32 and not frozen."""
    student = copied(classifier).to(dtype=torch.float32)
    (everything,) = cascade(student, images, steps=1)
    randomise(student.bare, everything, seed)
    for weight in student.bare.parameters():
        weight.requires_grad_(weight.is_floating_point())
    return student


def _train(
    student: Classifier,
    images: Tensor,
    labels: Tensor,
    extent: tuple[int, int],
    generator: torch.Generator,
    tick: Progress | None,
) -> None:
    size, total = extent
    optimizer = torch.optim.Adam(student.bare.parameters(), lr=RATE)
    student.bare.train()
    done = 0
    with torch.inference_mode(False), torch.enable_grad():
        while done < total:
            for batch in torch.randperm(len(labels), generator=generator).split(size):
                done += 1
                if len(batch) > 1:  # batch normalisation has no variance over one image
                    logits = student.logits_of(student.normalize(images[batch])).float()
                    loss = F.cross_entropy(logits, labels[batch].to(logits.device))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                if tick:
                    tick(done, total)
    student.bare.eval().zero_grad()


def _accuracy(student: Classifier, images: Tensor, labels: Tensor, size: int) -> float:
    with torch.no_grad():
        found = [student(batch).argmax(1).cpu() for batch in images.split(size)]
    return float((torch.cat(found) == labels).double().mean())
