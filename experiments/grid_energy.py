"""Grid energy: does a heatmap show the cells of the features it was made from?

    energy = grid_energy(heatmaps, cell_of(classifier, images))

A grid comes from how a map is made, not from the image: a pixel shuffle, or patches drawn one by
one. The energy of a map at the period of a cell is compared with that around it: about 1 without a
grid. `smoothed` is the same map without one, to compare with.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sufficit import Classifier, UserError

Cell = tuple[float, float]  # height and width of a feature cell, in pixels
FEWEST_CELLS = 4  # per side: with fewer, a grid is as coarse as the object
ENOUGH_CELLS = 6  # from here on the first harmonic is clear of the object
_FLOOR = 1e-4  # share of a map's energy that is too little to see
_CLEAR = 1.5  # bins between a frequency of the grid and one that is compared with it
_LINE_CLEAR = 3.0  # the same along a line, where the object's own energy is near
_ANGLES = 96  # of half a circle
_DIRECTIONS = (((1, 0), (0, 1)), ((1, 1), (1, -1)))  # the axes, then the diagonals
_PADDED_PIXELS = 2**22  # transformed at a time


class Harmonic(NamedTuple):
    """Where to read a spectrum for one harmonic of a grid, along the axes or the diagonals."""

    on: Tensor  # places of the grid's frequencies
    around: Tensor  # places at the same distance from 0, away from the grid
    weights: Tensor  # of those places
    below: Tensor | None  # half a harmonic nearer to 0 on the same line; None if too near
    above: Tensor | None


def grid_energy(heatmaps: Tensor, period: float | Cell) -> Tensor:
    """Return the energy at a grid's frequencies over that around them: [N,H,W] -> [N].

    About 1 without a grid of that period in pixels, far above with one, 1 for a constant map.

    >>> x = torch.arange(64) % 8 == 0
    >>> hill = torch.hann_window(64).outer(torch.hann_window(64))
    >>> grid_energy(torch.stack([hill, hill * (0.9 + 0.1 * x)]), 8).round()
    tensor([ 1., 15.], dtype=torch.float64)
    """
    if heatmaps.ndim != 3:
        raise UserError(f"heatmaps must be [N,H,W], got {list(heatmaps.shape)}: reshape them")
    size = (heatmaps.shape[1], heatmaps.shape[2])
    cell = period if isinstance(period, tuple) else (float(period), float(period))
    if not fits(cell, size):
        raise UserError(
            f"period must be 4 pixels or more and fit {FEWEST_CELLS} times or more into"
            f" {size[0]} x {size[1]} pixels, or 2 and {ENOUGH_CELLS} times, got {period}: give the"
            " size of a feature cell"
        )
    many = max(1, _PADDED_PIXELS // math.prod(_padded(size, cell)))
    parts = [_grid_energy(some, size, cell) for some in heatmaps.split(many)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def fits(cell: Cell, size: tuple[int, int]) -> bool:
    """Whether a grid of such cells can be told from an object in an image of that size."""
    fewest = min(side / period for side, period in zip(size, cell, strict=True))
    shortest = 2 if fewest >= ENOUGH_CELLS else 4  # pixels: the first or second harmonic is there
    return fewest >= FEWEST_CELLS and min(cell) >= shortest


def _grid_energy(heatmaps: Tensor, size: tuple[int, int], cell: Cell) -> Tensor:
    maps = heatmaps.double()
    down, across = (torch.hann_window(s, dtype=maps.dtype, device=maps.device) for s in size)
    window = down[:, None] * across
    spread = maps.amax((1, 2)) > maps.amin((1, 2))
    maps = (maps - (maps * window).sum((1, 2), keepdim=True) / window.sum()) * window
    total = math.prod(size) * maps.square().sum((1, 2))
    power = torch.fft.fft2(maps, s=_padded(size, cell)).abs().square().flatten(1)
    shares = power / torch.where(spread, total, 1.0)[:, None]
    found = expected = torch.full_like(total, _FLOOR)
    for harmonic in _harmonics(size, cell, maps.device):
        background = shares[:, harmonic.around] @ harmonic.weights
        if harmonic.below is not None and harmonic.above is not None:
            # An object with straight edges has energy on the axes, with a grid and without.
            line = shares[:, harmonic.below].sum(1) * shares[:, harmonic.above].sum(1)
            background = torch.maximum(background, line.sqrt())
        found = found + shares[:, harmonic.on].sum(1)
        expected = expected + background
    return torch.where(spread, found / expected, 1.0)


def _padded(size: tuple[int, int], cell: Cell) -> tuple[int, int]:
    """Return the size to transform maps at: eight bins or more between two harmonics."""
    h, w = (
        side * 2 ** max(0, math.ceil(math.log2(8 * period / side)))
        for side, period in zip(size, cell, strict=True)
    )
    return h, w


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _harmonics(size: tuple[int, int], cell: Cell, device: torch.device) -> tuple[Harmonic, ...]:
    """Return the harmonics up to half a cycle per pixel, where there is something to compare."""
    sides, periods = (torch.tensor(pair, dtype=torch.float64) for pair in (size, cell))
    padded = _padded(size, cell)

    def place(frequencies: Tensor) -> Tensor:  # [P,2], cycles per pixel -> [P]
        rows, columns = (frequencies * torch.tensor(padded)).round().long().unbind(1)
        return (rows % padded[0] * padded[1] + columns % padded[1]).to(device)

    angles = (torch.arange(_ANGLES, dtype=torch.float64) + 0.5) * math.pi / _ANGLES
    circle = torch.stack([angles.sin(), angles.cos()], 1)
    cells = float((sides / periods).min())
    found = []
    for directions in _DIRECTIONS:
        for number in range(1, int(max(cell) / 2) + 1):
            clear_of_object = cells * (number - 0.5) >= _LINE_CLEAR
            if directions is _DIRECTIONS[0] and not clear_of_object:
                continue  # one straight edge has as much energy there as a grid
            steps = torch.tensor(directions, dtype=torch.float64) / periods
            steps = steps[(steps * number).abs().amax(1) <= 0.5]
            around, weights, on = [], [], []
            for step in steps:
                ring = circle * (step * number).norm()
                nearest = (ring * periods).round() / periods
                clear = ((ring - nearest) * sides).norm(dim=1) >= _CLEAR
                ring = ring[clear & (ring.abs().amax(1) <= 0.5)]
                if len(ring) < 3:
                    continue
                on.append(step * number)
                around.append(place(ring))
                weights.append(torch.full((len(ring),), 1 / len(ring), dtype=torch.float64))
            if not on:
                continue
            exact = torch.stack(on)
            below, above = (exact * (number + shift) / number for shift in (-0.5, 0.5))
            beside = clear_of_object and bool(above.abs().max() <= 0.5)
            near = (place(below), place(above)) if beside else (None, None)
            given = (torch.cat(around), torch.cat(weights).to(device))
            found.append(Harmonic(place(exact), *given, *near))
    return tuple(found)


def cell_of(classifier: Classifier, images: Tensor) -> Cell:
    """Height and width in pixels of a cell of the classifier's features."""
    with torch.no_grad():
        features, _logits = classifier.features(images[:1])
    h, w = features.shape[2:]
    return images.shape[2] / h, images.shape[3] / w


def smoothed(heatmaps: Tensor, cell: Cell) -> Tensor:
    """Blur maps by a Gaussian of half a cell, which removes a grid of it: [N,H,W] -> [N,H,W]."""
    down, across = (
        _blur(side, period / 2).to(heatmaps)
        for side, period in zip(heatmaps.shape[1:], cell, strict=True)
    )
    return (down @ heatmaps @ across.mT).clamp(0, 1)


def _blur(side: int, sigma: float) -> Tensor:
    """The weights of a Gaussian along a line, those of each place summing to 1: [n,n]."""
    places = torch.arange(side, dtype=torch.float64)
    weights = (-((places[:, None] - places) / sigma).square() / 2).exp()
    return weights / weights.sum(1, keepdim=True)
