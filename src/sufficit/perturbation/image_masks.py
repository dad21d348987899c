"""Masks of the image itself, whatever its heatmaps are: each is asked once for all methods."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sufficit.errors import UserError
from sufficit.perturbation.sampling import uniforms

MOST_CELLS = 256  # per side of a grid


@dataclass(frozen=True, slots=True)
class ImageMask:
    """Hides cells of a grid over the image: the cell of this number, or some that are drawn.

    Drawn cells depend on the seed, the image's name and this number only.
    """

    grid: int  # cells per side
    number: int  # of the cell, in reading order, or of the draw
    drawn: int = 0  # how many cells are drawn; 0 for the one cell

    def __post_init__(self) -> None:
        cells = self.grid**2
        fits = self.number >= 0 if self.drawn else 0 <= self.number < cells
        if not (1 <= self.grid <= MOST_CELLS and fits and 0 <= self.drawn < cells):
            raise UserError(
                f"no image mask has {self}: a grid has 1 to {MOST_CELLS} cells per side, and a mask"
                " hides a cell of this grid, or draws fewer than all"
            )

    def cells(self, seed: int, name: str) -> list[int]:
        """Return the numbers of the hidden cells of an image.

        >>> ImageMask(4, 5).cells(0, "a.png"), ImageMask(4, 0, drawn=3).cells(0, "a.png")
        ([5], [14, 1, 7])
        """
        if not self.drawn:
            return [self.number]
        key = f"{self.grid} {self.drawn} {self.number}/{name}"
        order: list[int] = np.argsort(uniforms(seed, key, self.grid**2), kind="stable").tolist()
        return order[: self.drawn]


def hidden_pixels(
    masks: Sequence[ImageMask], size: tuple[int, int], names: Sequence[str], seed: int
) -> Tensor:
    """Return which pixels of each image each mask hides: bool [N,V,H,W]."""
    hidden = torch.zeros(len(names), len(masks), *size, dtype=torch.bool, device="cpu")
    # Each mask has cells on its own grid only: the others add nothing to it.
    for grid in {mask.grid for mask in masks}:
        hidden |= _table(masks, grid, names, seed)[..., cells_of(size, grid)]
    return hidden


def sums_over(
    heatmaps: Tensor, masks: Sequence[ImageMask], names: Sequence[str], seed: int
) -> Tensor:
    """Return the sum of each heatmap over the pixels that masks hide: [N,H,W] -> [N,V]."""
    size = (heatmaps.shape[1], heatmaps.shape[2])
    maps = heatmaps.cpu().double().flatten(1)
    sums = torch.zeros(len(maps), len(masks), dtype=torch.float64, device="cpu")
    # The pixels are summed by cell once, then the cells by mask: masks of pixels are not made.
    for grid in {mask.grid for mask in masks}:
        cells = torch.zeros(len(maps), grid**2, dtype=torch.float64, device="cpu")
        cells.index_add_(1, cells_of(size, grid).flatten(), maps)
        sums += (_table(masks, grid, names, seed).double() @ cells[..., None])[..., 0]
    return sums


def cells_of(size: tuple[int, int], grid: int) -> Tensor:
    """Return the cell that each pixel is in: [H,W].

    >>> cells_of((2, 4), 2)
    tensor([[0, 0, 1, 1],
            [2, 2, 3, 3]])
    """
    down, across = (torch.arange(side, device="cpu") * grid // side for side in size)
    return down[:, None] * grid + across


def _table(masks: Sequence[ImageMask], grid: int, names: Sequence[str], seed: int) -> Tensor:
    """Return which cells of a grid each mask hides, none of masks on other grids: [n,V,cells]."""
    table = torch.zeros(len(names), len(masks), grid**2, dtype=torch.bool, device="cpu")
    for v, mask in enumerate(masks):
        if mask.grid == grid:
            for row, name in enumerate(names):
                table[row, v, mask.cells(seed, name)] = True
    return table
