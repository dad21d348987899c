"""Pure arithmetic on curves: values [N,P] over a grid [P]."""

from collections.abc import Sequence

import torch
from torch import Tensor


def area(values: Tensor, grid: Sequence[float]) -> Tensor:
    """Trapezoid area under each curve: [N,P] -> [N].

    >>> area(torch.tensor([[0.0, 1.0, 1.0]]), (0.0, 0.5, 1.0))
    tensor([0.7500], dtype=torch.float64)
    """
    widths = torch.tensor(grid, dtype=torch.float64, device=values.device).diff()
    middles = (values[:, 1:] + values[:, :-1]).double() / 2
    return (middles * widths).sum(1)


def mean_height(values: Tensor, grid: Sequence[float]) -> Tensor:
    """Area over width: [N,P] -> [N]. A grid of one point has the height of that point."""
    width = grid[-1] - grid[0]
    return area(values, grid) / width if width > 0 else values[:, 0].double()


def from_point(grid: Sequence[float], start: float) -> tuple[float, ...]:
    """The part of a grid from start on, with start as a point of its own.

    >>> from_point((0.0, 0.5, 1.0), 0.7)
    (0.7, 1.0)
    """
    return (start, *(point for point in grid if point > start))
