"""Masks of the image itself, whatever its heatmaps are: each is asked once for all methods."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.perturbation.fills import rows_of
from sufficit.perturbation.predict import predict_views
from sufficit.perturbation.predictions import HIDDEN_ROWS
from sufficit.perturbation.sampling import uniforms

_GROUP = 32  # images whose masks are in memory at once
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


def predict_hidden(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Tensor,
    targets: Tensor,
    masks: Sequence[ImageMask],
    *,
    names: Sequence[str],
    seed: int,
    fill: str | Tensor = "black",
    batch_size: int | None = None,
) -> dict[str, Tensor]:
    """Hide each mask in each image and ask the model: [N,C,H,W], [MN,H,W], [N] -> each [MN,V].

    By their names in `Predictions`. Heatmaps of M methods come one after the other, as everywhere.
    """
    size, width = (images.shape[2], images.shape[3]), len(masks)
    cells = {grid: cells_of(size, grid) for grid in {mask.grid for mask in masks}}
    named = torch.empty(len(images), width, dtype=torch.int32, device="cpu")
    confidences = torch.empty(len(images), width, dtype=torch.float32, device="cpu")
    sums = torch.zeros(len(heatmaps), width, dtype=torch.float64, device="cpu")
    for start in range(0, len(images), _GROUP):
        rows = torch.arange(start, min(start + _GROUP, len(images)), device="cpu")
        hidden = torch.zeros(len(rows), width, *size, dtype=torch.bool, device="cpu")
        for grid, pixels in cells.items():
            table = _table(masks, grid, [names[row] for row in rows.tolist()], seed)
            hidden |= table[..., pixels]
            for first in range(0, len(heatmaps), len(images)):  # method by method
                maps = heatmaps[first + start : first + start + len(rows)].cpu().double()
                own = torch.zeros(len(rows), grid**2, dtype=torch.float64, device="cpu")
                own.index_add_(1, pixels.flatten(), maps.flatten(1))
                sums[first + rows] += (table.double() @ own[..., None])[..., 0]
        views = (rows - start).repeat_interleave(width), torch.arange(len(rows) * width)
        found = predict_views(
            classifier,
            images[start : start + len(rows)],
            ~hidden.flatten(0, 1).to(classifier.device),
            views,
            targets=targets.cpu()[rows].repeat_interleave(width),
            fill=rows_of(fill, rows.tolist()),
            batch_size=batch_size,
        )
        named[rows] = found.named.view(-1, width).to(named)
        confidences[rows] = found.confidences.view(-1, width)
    asked = (one.repeat(len(heatmaps) // len(images), 1) for one in (named, confidences))
    return dict(zip(HIDDEN_ROWS, (*asked, sums), strict=True))


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
    found = torch.zeros(len(names), len(masks), grid**2, dtype=torch.bool, device="cpu")
    for v, mask in enumerate(masks):
        if mask.grid == grid:
            for row, name in enumerate(names):
                found[row, v, mask.cells(seed, name)] = True
    return found
