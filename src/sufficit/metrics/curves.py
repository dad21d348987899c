"""Curves of scores over a grid: their areas, and their means over images."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sufficit.perturbation.predictions import ScoreKind


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


def averaged(pieces: Iterable[dict[str, Curve]], kind: ScoreKind) -> dict[str, MeanCurve]:
    """Return each curve's mean over the images of all pieces, NaN ignored."""
    sums: dict[str, tuple[tuple[float, ...], Tensor, Tensor]] = {}
    for curves in pieces:
        for name, curve in curves.items():
            values: Tensor = getattr(curve, kind)
            _, total, count = sums.get(name, ((), torch.tensor(0.0), torch.tensor(0)))
            total, count = total + values.nansum(0), count + (~values.isnan()).sum(0)
            sums[name] = (curve.grid, total, count)
    return {name: MeanCurve(grid, total / count) for name, (grid, total, count) in sums.items()}


def area(values: Tensor, grid: Sequence[float]) -> Tensor:
    """Return the trapezoid area under each curve: [N,P] -> [N].

    >>> area(torch.tensor([[0.0, 1.0, 1.0]]), (0.0, 0.5, 1.0))
    tensor([0.7500], dtype=torch.float64)
    """
    widths = torch.tensor(grid, dtype=torch.float64, device=values.device).diff()
    middles = (values[:, 1:] + values[:, :-1]).double() / 2
    return (middles * widths).sum(1)


def mean_height(values: Tensor, grid: Sequence[float]) -> Tensor:
    """Return area over width, or the height at the only point of a grid: [N,P] -> [N]."""
    width = grid[-1] - grid[0]
    return area(values, grid) / width if width > 0 else values[:, 0].double()
