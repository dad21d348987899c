"""Is this the classifier that an adapter was trained on? A sketch of its weights decides."""

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError

TOLERANCE = 0.02  # bfloat16 moves a number of the sketch by up to 0.005, training by far more
_MAX_VALUE = 1e30  # infinities of one precision are finite in another
_taken: "WeakKeyDictionary[nn.Module, tuple[object, Fingerprint]]" = WeakKeyDictionary()
"""The state of each model when its fingerprint was taken, and the fingerprint."""


@dataclass(frozen=True)
class Fingerprint:
    """Identifies a classifier on any device, in any memory layout and precision."""

    architecture: str  # a digest of the names and shapes of its tensors
    sketch: tuple[float, ...]  # two numbers per tensor, of the order of 1; mean and std


def fingerprint(classifier: Classifier) -> Fingerprint:
    """Return the fingerprint of a classifier, computed again only if its weights have changed."""
    key = (_state(classifier.bare), classifier.mean, classifier.std, classifier.output)
    # Every drawing of an adapter asks for it: to read all weights again would take its time.
    if classifier.bare not in _taken or _taken[classifier.bare][0] != key:
        _taken[classifier.bare] = (key, _take(classifier))
    return _taken[classifier.bare][1]


@lru_cache(maxsize=16)
def same(one: Fingerprint, other: Fingerprint) -> bool:
    """Return whether both belong to one classifier, in the same or another precision."""
    if one.architecture != other.architecture or len(one.sketch) != len(other.sketch):
        return False
    return all(abs(a - b) <= TOLERANCE for a, b in zip(one.sketch, other.sketch, strict=True))


def read(saved: Any) -> Fingerprint:
    """Return the fingerprint that a JSON file holds."""
    try:
        architecture = saved["architecture"]
        sketch = tuple(map(float, saved["sketch"]))
        if all(map(math.isfinite, sketch)):
            return Fingerprint(str(architecture), sketch)
        raise ValueError("not finite")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        wrong = "the adapter's fingerprint can't be read: save the adapter again"
        raise UserError(wrong) from error


def digest(*tensors: Tensor) -> str:
    """Return a short digest of the tensors' shapes, dtypes and bits.

    >>> [digest(torch.zeros(2)) == digest(other) for other in (torch.zeros(2), torch.ones(2))]
    [True, False]
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


@torch.no_grad()
def _state(model: nn.Module) -> list[object]:
    """Return what changes with the weights: their addresses, and how often each was written to.

    Torch counts no write through `.data` or to inference tensors. The sums of the first and last
    parameters show most of those for one small read. To read all weights takes far longer.
    """
    parameters = list(model.parameters())
    ends = [tensor.sum(dtype=torch.float32) for tensor in parameters[:1] + parameters[-2:]]
    sums = torch.stack(ends).tolist() if ends else []
    every = [*parameters, *model.buffers()]
    writes = [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in every]
    return [writes, sums]


@torch.no_grad()
def _take(classifier: Classifier) -> Fingerprint:
    """Compute the fingerprint of a classifier."""
    named = [*classifier.bare.named_parameters(), *classifier.bare.named_buffers()]
    tensors = {name: tensor for name, tensor in named if tensor.is_floating_point()}
    shapes = [f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()]
    shapes += [] if classifier.output == "logits" else [f"output {classifier.output}"]
    architecture = hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]
    values = [value for tensor in tensors.values() for value in _sketch(tensor).tolist()]
    values += [*(classifier.mean or ()), *(classifier.std or ())]
    return Fingerprint(architecture, tuple(round(value, 4) for value in values))


def _sketch(tensor: Tensor) -> Tensor:
    """Return two numbers of a tensor: its direction along a fixed wave, and log of its length: [2].

    Rounding to another precision hardly moves them; training does.
    """
    flat = tensor.contiguous().flatten().double().cpu().nan_to_num(nan=0.0)
    flat = flat.clamp(-_MAX_VALUE, _MAX_VALUE)
    wave = torch.arange(1, len(flat) + 1, dtype=torch.float64, device="cpu").cos() * 2**0.5
    length = flat.norm().clamp(min=1e-12)
    return torch.stack([(flat @ wave) / length, length.log()])
