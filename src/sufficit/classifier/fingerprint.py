"""Is this the classifier an adapter was trained on? Told by a sketch of its weights."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError

TOLERANCE = 0.02  # bfloat16 moves a line of the sketch by up to 0.005, training by far more
_LARGEST = 1e30  # what is infinite in one precision need not be so in another
_known: "WeakKeyDictionary[nn.Module, tuple[object, Fingerprint]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Fingerprint:
    """What a classifier is recognised by, whatever its device, layout and precision."""

    architecture: str  # a digest of the names and shapes of its tensors
    sketch: tuple[float, ...]  # two numbers a tensor, of the order of 1; mean and std


def fingerprint(classifier: Classifier) -> Fingerprint:
    """The fingerprint of a classifier; computed again only when its weights have changed."""
    key = (_state(classifier.bare), classifier.mean, classifier.std)
    known = _known.get(classifier.bare)
    if known is None or known[0] != key:
        known = (key, _take(classifier, _tensors(classifier.bare)))
        _known[classifier.bare] = known
    return known[1]


@lru_cache(maxsize=64)  # the same two are compared at every explanation
def same(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether two fingerprints are of one classifier, up to a change of precision."""
    if one.architecture != other.architecture or len(one.sketch) != len(other.sketch):
        return False
    return all(abs(a - b) <= TOLERANCE for a, b in zip(one.sketch, other.sketch, strict=True))


def read(saved: object) -> Fingerprint:
    """A fingerprint as JSON holds it."""
    try:
        architecture, sketch = saved["architecture"], saved["sketch"]  # type: ignore[index]
        return Fingerprint(str(architecture), _numbers(sketch))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError("the adapter's fingerprint can't be read: save the adapter anew") from error


def _numbers(sketch: Sequence[float]) -> tuple[float, ...]:
    numbers = tuple(float(value) for value in sketch)
    if not all(map(math.isfinite, numbers)):
        raise ValueError("not finite")
    return numbers


def digest(*tensors: Tensor) -> str:
    """What tells tensors from others: shapes, types and values, to the bit.

    >>> [digest(torch.zeros(2)) == digest(other) for other in (torch.zeros(2), torch.ones(2))]
    [True, False]
    """
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """What the model computes with: its parameters and buffers of floats, by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in named if tensor.is_floating_point()}


@torch.no_grad()
def _state(model: nn.Module) -> list[object]:
    """What changes when a tensor does: its place, and how often it was written to.

    Writing through `.data` is not counted, nor is any writing to inference tensors: the sums of the
    first and the last parameters tell most of that, for one small reading. It comes last: a GPU
    that is busy answers when it is done.
    """
    parameters = list(model.parameters())
    ends = [tensor.sum(dtype=torch.float32) for tensor in parameters[:1] + parameters[-2:]]
    known = [*parameters, *model.buffers()]
    counts = [0 if tensor.is_inference() else tensor._version for tensor in known]
    places = [tensor.data_ptr() for tensor in known]
    return [places, counts, torch.stack(ends).tolist() if ends else []]


@torch.no_grad()
def _take(classifier: Classifier, tensors: dict[str, Tensor]) -> Fingerprint:
    shapes = [f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()]
    architecture = hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]
    lines = [_line(tensor) for tensor in tensors.values()]
    values = torch.cat(lines).tolist() if lines else []
    seen = [*(classifier.mean or ()), *(classifier.std or ())]
    return Fingerprint(architecture, tuple(round(value, 4) for value in [*values, *seen]))


def _line(tensor: Tensor) -> Tensor:
    """The tensor along a fixed wave of mean square 1, over its length; log of the length: [2]."""
    flat = tensor.contiguous().flatten().double().cpu()
    flat = flat.nan_to_num(nan=0.0, posinf=_LARGEST, neginf=-_LARGEST).clamp(-_LARGEST, _LARGEST)
    wave = torch.arange(1, len(flat) + 1, dtype=torch.float64, device="cpu").cos() * 2**0.5
    length = flat.norm().clamp(min=1e-12)
    return torch.stack([(flat @ wave) / length, length.log()])
