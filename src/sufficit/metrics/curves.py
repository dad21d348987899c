"""The curves behind the columns: of each image, and averaged over images."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from sufficit.metrics.registry import CURVES, Schedule
from sufficit.perturbation.types import Predictions, ScoreKind


@dataclass(frozen=True)
class Curve:
    """The score of each image along a grid."""

    grid: tuple[float, ...]  # [P]
    accuracy: Tensor  # [N,P]
    confidence: Tensor  # [N,P]


@dataclass(frozen=True)
class MeanCurve:
    """The score along a grid, averaged over images."""

    grid: tuple[float, ...]  # [P]
    values: Tensor  # [P]


def curves_of(answers: Predictions, schedule: Schedule) -> dict[str, Curve]:
    """The curves by name, as far as they were asked for."""
    found = {}
    for name, (asks, axis) in CURVES.items():
        asked = asks(schedule)
        if set(asked) <= set(answers.bands):
            accuracy, confidence = (answers.of(asked, kind) for kind in ("accuracy", "confidence"))
            found[name] = Curve(getattr(schedule, axis), accuracy, confidence)
    return found


def averaged(pieces: Iterable[dict[str, Curve]], kind: ScoreKind) -> dict[str, MeanCurve]:
    """Each curve's mean over the images of all pieces, NaN left out."""
    grids: dict[str, tuple[float, ...]] = {}
    sums: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for curves in pieces:
        for name, curve in curves.items():
            values: Tensor = getattr(curve, kind)
            total, count = values.nansum(0), (~values.isnan()).sum(0)
            grids[name] = curve.grid
            sums[name] = sums[name] + total if name in sums else total
            counts[name] = counts[name] + count if name in counts else count
    return {name: MeanCurve(grids[name], sums[name] / counts[name]) for name in sums}
