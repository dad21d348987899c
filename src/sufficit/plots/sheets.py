"""Sheets: one row per image, one column per method."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sufficit.classifier.classifier import check_images
from sufficit.errors import UserError
from sufficit.metrics.columns import heading_of
from sufficit.perturbation.fills import masked
from sufficit.perturbation.heatmaps import check_heatmaps, resize
from sufficit.plots.regions import region_on
from sufficit.plots.style import INK, USUAL, Look, figure_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def overlay(image: Tensor, heatmap: Tensor, title: str = "") -> "Figure":
    """Draw a heatmap in 0..1 over its image in 0..1: [C,H,W], [H,W] or smaller."""
    shapes = [list(one.shape) if isinstance(one, Tensor) else one for one in (image, heatmap)]
    if not (isinstance(image, Tensor) and image.ndim == 3):
        raise UserError(f"an overlay needs one image [C,H,W], got {shapes[0]}: take images[0]")
    if not (isinstance(heatmap, Tensor) and heatmap.ndim == 2):
        raise UserError(f"an overlay needs one heatmap [H,W], got {shapes[1]}: take heatmaps[0]")
    check_images(image[None])
    drawn = resize(heatmap[None], (image.shape[1], image.shape[2]))
    check_heatmaps(drawn, image[None])
    figure = figure_class()(figsize=(3.4, 3.4 * image.shape[1] / image.shape[2] + 0.3))
    axis = figure.subplots()
    axis.imshow(blend(image, drawn[0]).numpy())
    axis.set_axis_off()
    axis.set_title(title, fontsize=9, color=INK)
    return figure


def blend(image: Tensor, heatmap: Tensor) -> Tensor:
    """Return a heatmap over its image: [C,H,W], [H,W] -> [H,W,3] in 0..1."""
    from matplotlib import colormaps

    grey = image.detach().cpu().float().mean(0, keepdim=True).expand(3, -1, -1).permute(1, 2, 0)
    values = heatmap.detach().cpu().float()
    coloured = torch.from_numpy(np.asarray(colormaps["inferno"](values.numpy())[..., :3])).float()
    # Where the map is 0 the image shows; a full colour would hide what it marks.
    weight = 0.7 * values[..., None]
    return (grey * (1 - weight) + coloured * weight).clamp(0, 1)


def score_captions(columns: Mapping[str, Sequence[float]]) -> list[str]:
    r"""Return the caption of each of n heatmaps, one line per column: {column: [n]} -> n.

    >>> score_captions({"base_score": [0.5, 0.75], "msi": [0.25, -0.5]})
    ['base 0.50\nMSI +0.25', 'base 0.75\nMSI -0.50']
    """
    lines = [
        [f"{heading_of(name).short} {v:{'+.2f' if name == 'msi' else '.2f'}}" for v in values]
        for name, values in columns.items()
    ]
    return ["\n".join(row) for row in zip(*lines, strict=True)]


def masked_images(
    images: Tensor,
    heatmaps: Mapping[str, Tensor],
    fill: str | Tensor,
    alpha: float,
    *,
    kept: bool,
    rest: bool,
) -> dict[str, Mapping[str, Tensor]]:
    """Return the images through each mask and its complement, as the model sees them.

    [n,C,H,W], each [n,H,W] -> {title: {method: [n,C,H,W]}}.
    """
    masks = {method: maps > alpha for method, maps in heatmaps.items()}
    wanted = {f"above {alpha:g}": masks} if kept else {}
    wanted |= {"the rest": {method: ~mask for method, mask in masks.items()}} if rest else {}
    return {
        title: {m: masked(images, mask, fill) for m, mask in found.items()}
        for title, found in wanted.items()
    }


def sheet_figure(
    images: Tensor,
    heatmaps: Mapping[str, Tensor],
    row_titles: Sequence[str],
    captions: Mapping[str, Sequence[str]] | None = None,
    *,
    under: Mapping[str, Mapping[str, Tensor]] | None = None,
    regions: Collection[str] = (),
    look: Look = USUAL,
) -> "Figure":
    """Draw one row per image, one column per method: [N,C,H,W], [N,H,W].

    `regions` are the methods of which an outline is drawn, at 0.5. `under` has further images under
    each heatmap: {title: {method: [N,C,H,W]}}.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    deep = 1 + len(under or {})
    further = list((under or {}).items())
    columns = 1 + len(heatmaps)
    lines = max(1 + title.count("\n") for title in row_titles)
    width = 1.75 * columns if look.width is None else look.width
    side = width / columns * images.shape[2] / images.shape[3]
    height = len(images) * (deep * side + lines * 1.3 * (look.font - 2) / 72) + 0.3
    # The usual distances are made for axes with labels.
    near = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
    figure = figure_class()(figsize=(width, height), layout=near)
    grid = figure.subplots(deep * len(images), columns, squeeze=False)
    for axis in grid.flatten():
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    small = look.font - 2
    for i, image in enumerate(images):
        first, *more = grid[deep * i : deep * (i + 1)]
        _show(first[0], image)
        first[0].set_xlabel(row_titles[i], fontsize=small, color=INK)
        for j, (name, maps) in enumerate(heatmaps.items(), 1):
            paint = region_on if name in regions else blend
            first[j].imshow(paint(image, maps[i]).numpy())
            for row, (_, seen) in zip(more, further, strict=True):
                _show(row[j], seen[name][i])
            if captions and captions.get(name):
                last = grid[deep * (i + 1) - 1][j]
                last.set_xlabel(captions[name][i], fontsize=small, color=INK)
        for row, (title, _) in zip(more, further, strict=True):
            row[0].text(
                0.95,
                0.5,
                title,
                fontsize=small,
                color=INK,
                ha="right",
                va="center",
                transform=row[0].transAxes,
            )
    for axis, title in zip(grid[0], ["image", *heatmaps], strict=True):
        axis.set_title(title, fontsize=look.font, color=INK)
    return figure


def _show(axis: "Axes", image: Tensor) -> None:
    """Draw an image into a cell of the sheet."""
    shown = image.detach().cpu().float()
    colours = shown if len(shown) == 3 else shown.mean(0, keepdim=True)
    axis.imshow(colours.permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=1)  # grey if not RGB
