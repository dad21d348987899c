"""What the words on the command line stand for; imported by the commands alone, with torch."""

from pathlib import Path
from typing import Literal

from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.classifier.loading import DTYPES, load_classifier
from sufficit.classifier.loading import device_named as device_from
from sufficit.data.images import BadImageError, read_image
from sufficit.errors import UserError, unknown
from sufficit.explainers.sources import methods_from
from sufficit.metrics.registry import COLUMNS
from sufficit.perturbation.fills import FILLS

__all__ = [
    "DTYPES",
    "alpha_from",
    "classifier_from",
    "columns_from",
    "device_from",
    "fill_from",
    "methods_from",
]


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


def classifier_from(
    model: str,
    weights: str,
    num_classes: int | None,
    size: str | None,
    device: str,
    precision: str,
    layer: str | None = None,
) -> Classifier:
    """The classifier that words of the command line name."""
    return load_classifier(
        model,
        weights=weights,
        num_classes=num_classes,
        size=size,
        device=device,
        precision=precision,
        layer=layer,
    )


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
