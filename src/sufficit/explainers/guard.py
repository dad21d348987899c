"""Call a user's code that gets the model: leave the model as it was, and draw the same again.

A function may call the model, hook it and draw random numbers. It must not change the model for
those that come after it, and an image's numbers must not depend on the images before it. What
Sufficit itself does to a model is undone where it is done: see `Classifier.in_eval_mode`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from sufficit.classifier.classifier import Classifier
from sufficit.classifier.layers import eval_mode, kept
from sufficit.classifier.source_code import run_user_code
from sufficit.errors import NotFiniteError, SkipError, UserError
from sufficit.seeds import random_state, seeded, unmoved

Found = TypeVar("Found")
Place = tuple[str, str]
"""Where something changed: a module or kind, and a name there."""
OF_CLASSIFIER = ("model", "mean", "std", "classes", "view", "reshape", "output", "score")
LASTING = ("_is_full_backward_hook",)  # attributes that torch leaves behind when a hook is removed
SHOWN = 3  # changes that an error names
_PART = 2**16  # numbers that are summed at a time
_ODD = -0x61C8864680B583EB  # spreads neighbours far apart
# Functions that drew random numbers: their first image is tried alone, which saves the batch.
_drawers: "WeakSet[Any]" = WeakSet()
# What a model's own forward pass changes, such as a counter: no function is to blame for it.
_volatile: "WeakKeyDictionary[nn.Module, set[Place]]" = WeakKeyDictionary()


# Four parameters say what to call, four with what: two classes for them would have no other use.
def call_guarded(
    what: str,
    function: object,
    call: Callable[[Sequence[int]], Found],
    joined: Callable[[list[Found]], Found],
    *,
    classifier: Classifier,
    images: Tensor,
    names: Sequence[object],
    seed: int,
) -> Found:
    """Return what `call` gives for the rows of a batch; raise if it changes the model.

    If it moves the random state, it is called again row by row, each with a state made from the
    seed and the image's name, so that an image's numbers do not depend on its batch. `what` names
    the function in errors.
    """
    rows = list(range(len(names)))

    def watched(row: int) -> tuple[Found, bool]:
        """Return what the function gives for an image, and whether it drew random numbers."""
        with seeded(crc32(f"{seed} {names[row]}".encode())):
            before = random_state()
            try:
                returned = run_user_code(f"{what} on image {names[row]}", lambda: call([row]))
            except NotFiniteError as error:
                # The call counted from the one image it had; here it is this row of the batch.
                raise NotFiniteError(str(error), [row]) from error
            except SkipError as error:
                reason = ", ".join(error.reasons.values())
                raise SkipError(str(error), {row: reason}) from error
            return returned, random_state() != before

    def one_by_one(numbers: Sequence[int]) -> list[Found]:
        return [watched(row)[0] for row in numbers]

    with unchanged(what, classifier, images), unmoved():
        if _has_drawn(function):
            first, draws = watched(0)
            if draws:
                return joined([first, *one_by_one(rows[1:])])
        before = random_state()
        try:
            words = what if len(rows) > 1 else f"{what} on image {names[0]}"
            returned = run_user_code(words, lambda: call(rows))
        except (NotFiniteError, SkipError):
            raise
        except UserError:
            if len(rows) > 1:
                one_by_one(rows)  # raises at the image that is to blame, if it is one
            raise
        if random_state() == before:
            return returned
        with suppress(TypeError):  # of an object without a hash
            _drawers.add(function)
        return joined(one_by_one(rows))


def join_tensors(parts: list[Tensor]) -> Tensor:
    """Join tensors of one image each; what is no tensor is left to whoever checks the result."""
    return torch.cat(parts) if all(isinstance(one, Tensor) for one in parts) else parts[0]


@contextmanager
def unchanged(what: str, classifier: Classifier, images: Tensor) -> Iterator[None]:
    """Put the model in eval mode, without gradients, inside; raise if the code inside changes it.

    Hooks, modes, attributes and gradients are restored. Weights are not: nobody has a copy.
    """
    grad_mode = torch.set_grad_enabled(torch.is_grad_enabled())
    with grad_mode, _gradients_aside(classifier.bare), eval_mode(classifier.model):
        before = _State.of(classifier)
        try:
            yield
        except BaseException:
            before.restore()
            raise
        changes = before.changes()
        if changes:
            _blame(what, before, changes, images)


def _blame(what: str, before: "_State", changes: Mapping[Place, str], images: Tensor) -> None:
    """Raise for changes that the model's own forward pass does not make."""
    classifier = before.classifier
    after = _State.of(classifier)
    # Run the model once without the function: what changes now, the model changes itself.
    before.restore()
    middle = _State.of(classifier)
    with torch.no_grad(), unmoved():
        classifier(images[:1])
    own = _volatile.setdefault(classifier.bare, set())
    own |= middle.changes().keys()
    blamed = [words for place, words in changes.items() if place not in own]
    if not blamed:
        after.restore()
        return
    before.restore()
    more = f" and {len(blamed) - SHOWN} more" if len(blamed) > SHOWN else ""
    raise UserError(
        f"{what} changed the model: {', '.join(blamed[:SHOWN])}{more}. All later scores would be"
        " those of another model: undo it there, as in try ... finally, or change a copy,"
        " copy.deepcopy(classifier.model)"
    )


@dataclass(frozen=True)
class _State:
    """The state of a model that a function could change: module dictionaries, tensor values."""

    classifier: Classifier
    modules: Mapping[str, nn.Module]
    own: Mapping[str, dict[str, Any]]  # of each module, a copy
    shared: dict[str, Any]  # hooks of all modules, a copy
    tensors: Mapping[str, Tensor]
    flags: Mapping[str, tuple[bool, int]]  # of each tensor: requires_grad, number of hooks
    sums: Mapping[str, object]
    settings: Mapping[str, Any]  # of the classifier
    dtype: torch.dtype

    @classmethod
    def of(cls, classifier: Classifier) -> "_State":
        modules = dict(classifier.bare.named_modules())
        tensors = _tensors(modules)
        everywhere = vars(torch_modules).items()
        hooks = {key: value for key, value in everywhere if key.startswith("_global_")}
        # A layer that the classifier found itself may become another with other images.
        chosen = ["layer"] if classifier.layer and classifier._found_at is None else []
        return cls(
            classifier=classifier,
            modules=modules,
            own={name: _copied(vars(module)) for name, module in modules.items()},
            shared=_copied(hooks),
            tensors=tensors,
            flags={name: _flags(tensor) for name, tensor in tensors.items()},
            sums=_checksums(tensors),
            settings={name: getattr(classifier, name) for name in (*OF_CLASSIFIER, *chosen)},
            dtype=torch.get_default_dtype(),
        )

    def changes(self) -> dict[Place, str]:
        """Return each change in words, by its place."""
        changes: dict[Place, str] = {}
        for name, module in self.modules.items():
            was = self.own[name]
            now = vars(module)
            for key in {**was, **now}:
                if not _same(was.get(key, _ABSENT), now.get(key, _ABSENT)):
                    changes[name, key] = _words(name, key, was.get(key), now.get(key))
        for key, hooks in self.shared.items():
            if not _same(hooks, vars(torch_modules)[key]):
                changes["torch", key] = "hooks of all modules"
        sums = _checksums(self.tensors)
        for name, tensor in self.tensors.items():
            if _flags(tensor) != self.flags[name]:
                changes["flags", name] = f"requires_grad or hooks of {name}"
            if sums[name] != self.sums[name]:
                changes["values", name] = f"the values of {name}"
        for name, value in self.settings.items():
            if getattr(self.classifier, name) is not value:
                changes["classifier", name] = f"classifier.{name}"
        if torch.get_default_dtype() != self.dtype:
            changes["torch", "dtype"] = "torch's default dtype"
        by_itself = _volatile.get(self.classifier.bare, ())
        return {
            place: words
            for place, words in changes.items()
            if place[1] not in LASTING and place not in by_itself
        }

    def restore(self) -> None:
        """Restore all but the values of tensors."""
        for name, module in self.modules.items():
            _put_back(vars(module), self.own[name])
            for key in vars(module).keys() - self.own[name].keys():
                del vars(module)[key]
        _put_back(vars(torch_modules), self.shared)
        for name, tensor in self.tensors.items():
            requires_grad, hooks = self.flags[name]
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            if not hooks and tensor._backward_hooks:
                tensor._backward_hooks.clear()
        for name, value in self.settings.items():
            setattr(self.classifier, name, value)
        torch.set_default_dtype(self.dtype)


_ABSENT = object()


def _copied(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy, also of the dictionaries inside: hooks, parameters, buffers, modules."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in own.items()}


def _put_back(own: dict[str, Any], copied: Mapping[str, Any]) -> None:
    """Put back what was copied, into the same dictionaries: a hook's handle knows its own."""
    for key, value in copied.items():
        now = own.get(key, _ABSENT)
        if _same(value, now):
            continue
        if isinstance(value, dict) and isinstance(now, dict):
            now.clear()
            now.update(value)
        else:
            own[key] = value


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are one object, equal numbers or words, or dictionaries of such."""
    if one is other:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(v, other[k]) for k, v in one.items())
    plain = (bool, int, float, complex, str, bytes, tuple)
    return isinstance(one, plain) and type(one) is type(other) and repr(one) == repr(other)


def _words(module: str, key: str, was: Any, now: Any) -> str:
    """Return a change of a module's attribute in words."""
    layer = f"layer {module!r}" if module else "the model"
    if "hooks" in key:
        return f"hooks of {layer}"
    if key == "training":
        return f"the mode of {layer}"
    if key in ("_parameters", "_buffers", "_modules"):
        changed = [name for name in {**was, **now} if was.get(name) is not now.get(name)]
        return f"{', '.join(changed)} of {layer}"
    return f"{key} of {layer}"


def _tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return every tensor that a module holds: parameters, buffers and plain attributes."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, module in modules.items():
        for key, value in chain(
            module._parameters.items(), module._buffers.items(), vars(module).items()
        ):
            if isinstance(value, Tensor):
                tensors.setdefault(id(value), (".".join(filter(None, [name, key])), value))
    return dict(tensors.values())


def _flags(tensor: Tensor) -> tuple[bool, int]:
    return tensor.requires_grad, len(tensor._backward_hooks or ())


def _checksums(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Return shape, dtype and a checksum of each tensor; a GPU is waited for once."""
    sums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    computed = {name: total for name, total in sums.items() if total is not None}
    numbers: dict[str, int] = {}
    if computed:
        home = next(iter(computed.values())).device
        stacked = torch.stack([total.to(home) for total in computed.values()])
        numbers = dict(zip(computed, stacked.tolist(), strict=True))
    return {
        name: (tuple(tensor.shape), tensor.dtype, numbers.get(name))
        for name, tensor in tensors.items()
    }


@kept
def _weights(device: torch.device) -> Tensor:
    """Return odd numbers as if drawn, so that no two changes cancel: [_PART]."""
    places = torch.arange(_PART, device=device) * _ODD
    return (places ^ places >> 31) * _ODD | 1


@torch.no_grad()
def _checksum(tensor: Tensor) -> Tensor | None:
    """Return the sum of a tensor's bits as integers, each times an odd number of its place.

    None where a tensor has no plain bits, as a sparse one.
    """
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # No more than 32 bits at a time: in 64 bits no bit of a product is lost.
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
    try:
        numbers = real.detach().reshape(-1).view(kinds[real.element_size()])
    except (RuntimeError, NotImplementedError, TypeError, KeyError):  # of a library's own kind
        return None
    weights = _weights(numbers.device)
    total = torch.zeros((), dtype=torch.int64, device=numbers.device)
    for part in numbers.split(_PART):
        total = total * 31 + (weights[: len(part)] * part).sum()
    return total


@contextmanager
def _gradients_aside(model: nn.Module) -> Iterator[None]:
    """Take the gradients off all weights inside; put them back outside."""
    weights = list(model.parameters())
    before = [weight.grad for weight in weights]
    _set_gradients(weights, [None] * len(weights))
    try:
        yield
    finally:
        _set_gradients(weights, before)


def _set_gradients(weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        if weight.grad is not gradient:
            weight.grad = gradient


def _has_drawn(function: object) -> bool:
    """Return whether a function has drawn random numbers before."""
    try:
        return function in _drawers
    except TypeError:  # of an object without a hash
        return False
