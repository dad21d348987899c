"""What the words on the command line stand for; imported by the commands alone, with torch."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sufficit.classifier import layers
from sufficit.classifier.checkpoint import View
from sufficit.classifier.classifier import Classifier
from sufficit.data.images import BadImageError, read_image
from sufficit.errors import UserError, unknown
from sufficit.explainers import EXPLAINERS, Method
from sufficit.explainers.lax import OURS, Lax, name_of
from sufficit.metrics.registry import COLUMNS
from sufficit.perturbation.fills import FILLS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def alpha_from(text: str) -> float | Literal["search"]:
    """A number, or the word search."""
    if text == "search":
        return "search"
    try:
        return float(text)
    except ValueError as error:
        raise UserError(f"--alpha-min must be a number in 0..1 or search, got {text!r}") from error


def columns_from(text: str | None) -> tuple[str, ...]:
    """The columns named with commas between them, or all."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else COLUMNS


def methods_from(text: str) -> dict[str, Method]:
    """Methods named with commas between them; a folder is the adapter in it, under its name.

    >>> methods_from("gradcam, layercam")
    {'gradcam': 'gradcam', 'layercam': 'layercam'}
    """
    found: dict[str, Method] = {}
    for word in filter(None, map(str.strip, text.split(","))):
        name, method = _method(word)
        if found.get(name, method) != method:
            raise UserError(
                f"two methods are called {name}, and files are named after them: rename the folder"
                f" {word}"
            )
        found[name] = method
    return found


def _method(word: str) -> tuple[str, Method]:
    """The name and the method a word stands for."""
    if word in EXPLAINERS:
        return word, word
    if Path(word).is_dir() or word.startswith(OURS):
        return name_of(word), Lax.from_pretrained(word)
    if word == "lax":
        raise UserError(
            "lax is learned for each model: give the folder of its adapter, --method PATH;"
            " sufficit train-lax makes one, and sufficit:digits is there for the model of that name"
        )
    raise unknown("method", word, [*EXPLAINERS, "the folder of a LAX adapter"])


def classifier_from(
    model: str,
    weights: str,
    num_classes: int | None,
    size: str | None,
    device: str,
    precision: str,
    layer: str | None = None,
) -> Classifier:
    """A model by name on its device, in its precision, with the size of what it sees."""
    chosen = device_from(device)
    options = {} if num_classes is None else {"num_classes": num_classes}
    classifier = Classifier.load(model, weights=None if weights == "none" else weights, **options)
    if weights == "none":
        warnings.warn("the model has random weights: its scores mean nothing", stacklevel=2)
    classifier.view = classifier.view or View(channels=classifier.channels)
    if size is not None:
        classifier.view = replace(classifier.view, crop=size_from(size), resize=None)
    if layer is not None:
        classifier.layer = layers.resolve(classifier.model, layer)
    layout = torch.channels_last if chosen.type == "cuda" else None
    return classifier.to(chosen, DTYPES[precision], layout)


def size_from(text: str) -> tuple[int, int]:
    """Height and width from 224 or 224x320.

    >>> size_from("224"), size_from("224x320")
    ((224, 224), (224, 320))
    """
    try:
        sides = [int(part) for part in text.lower().split("x")]
        h, w = sides * 2 if len(sides) == 1 else sides
    except ValueError as error:
        raise UserError(f"--size must be like 224 or 224x320, got {text!r}") from error
    if min(h, w) < 1:
        raise UserError(f"--size must be positive, got {text!r}")
    return h, w


def device_from(name: str) -> torch.device:
    """A device that works here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        if name.partition(":")[0] not in ("cpu", "cuda", "mps"):
            raise unknown("device", name, ("auto", "cpu", "cuda", "cuda:1", "mps")) from error
        reason = str(error).splitlines()[0]
        raise UserError(f"device {name} can't be used here ({reason}): try auto or cpu") from error
    return device


def fill_from(text: str, classifier: Classifier) -> str | Tensor:
    """A fill by name, or the picture in a file."""
    if text in FILLS:
        return text
    if not Path(text).is_file():
        raise unknown("fill", text, [*FILLS, "an image file"])
    try:
        return read_image(Path(text), classifier.view)
    except BadImageError as error:
        raise UserError(f"--fill {text}: {error}") from error
