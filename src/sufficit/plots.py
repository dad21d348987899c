"""Pictures of scores: curves, heatmaps over images, sheets of masks."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sufficit.files import writing
from sufficit.metrics.curves import MeanCurve
from sufficit.metrics.scores import Scores
from sufficit.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SHOW, HIDE, QUIET = "#1f2937", "#0f766e", "#c2410c", "#9ca3af"
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's colours, told apart by the colour-blind too; not the yellow, which is faint."""
STROKES = ("-", (0, (6, 1.5)), (0, (4, 1, 1, 1)))  # where there are more methods than colours
FORMATS = (".pdf", ".svg", ".eps", ".png")
_FONTS: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "path"}
_FONTS |= {"svg.hashsalt": "sufficit"}  # names inside a file are not drawn by chance
_UNDATED: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
TITLES = {
    "insertion_pixel": "Insertion by pixel value",
    "deletion_pixel": "Deletion by pixel value",
    "insertion_percent": "Insertion by percentage",
    "deletion_percent": "Deletion by percentage",
}
_OWN_MATH = re.compile(r"\$(\\geq )?\\alpha(_\{min\})?\$")  # all that figures have of it
METHOD_TITLES = TITLES | {"show": r"MSI's Show(>$\alpha$)", "hide": r"MSI's Hide(>$\alpha$)"}


@dataclass(frozen=True)
class Look:
    """How wide a figure is, and how large its letters."""

    width: float | None = None  # inches; None: as its panels need
    font: float = 9  # points, of titles; the rest is smaller

    def columns(self, panels: int, most: int = 3) -> int:
        """How many panels stand side by side."""
        fits = most if self.width is None else max(1, min(4, round(self.width / 1.65)))
        return min(fits, max(1, panels))


USUAL = Look()


@dataclass(frozen=True)
class Panel:
    """A line a method: (where, how high); `mark` is a dotted line across."""

    title: str
    across: str
    up: str
    lines: Mapping[str, tuple[Sequence[float], Any]]
    mark: float | None = None
    unit: bool = True  # heights lie in 0..1


def save(figure: "Figure", path: Path, *, dpi: float = 150, tight: bool = True) -> None:
    """Write a figure in the format of the path's suffix: the same bytes each time, fonts inside.

    `tight` cuts it to what is drawn; without it a figure is as wide as it was made.
    """
    from matplotlib import rc_context

    kind = path.suffix.removeprefix(".").lower()
    box = "tight" if tight else None
    content = BytesIO()
    _take_names_literally(figure)
    with rc_context(_FONTS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a box stands for it
        figure.savefig(
            content,
            format=kind,
            dpi=dpi,
            bbox_inches=box,
            facecolor="white",
            metadata=_UNDATED.get(kind),
        )
    written = content.getvalue()
    if kind == "eps":
        written = re.sub(rb"%%CreationDate:[^\n]*\n", b"", written)
    with writing(path) as part:
        part.write_bytes(written)


def _take_names_literally(figure: "Figure") -> None:
    """Dollars in the names of files and methods are no mathematics."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if isinstance(text, Text) and "$" in _OWN_MATH.sub("", text.get_text()):
            text.set_parse_math(False)


def curves_figure(scores: Scores, title: str = "") -> "Figure":
    """Each curve averaged over the images, and MSI over alpha_min where it was searched for."""
    curves = scores.mean_curves()
    kind = scores.plan.schedules[0].score
    panels = [name for name in TITLES if name in curves]
    msi = "hide" in curves
    figure, axes = axes_for(len(panels) + msi + (scores.search is not None))
    rest = iter(axes)
    for name in panels:
        axis, curve = next(rest), curves[name]
        colour = SHOW if name.startswith("insertion") else HIDE
        _mean_line(axis, curve, colour, None)
        share = name.endswith("percent")
        _dress(axis, TITLES[name], "share of pixels" if share else "alpha", kind)
    if msi:
        axis = next(rest)
        for name, colour in (("show", SHOW), ("hide", HIDE)):
            label = rf"{name.title()}(>$\alpha$)"
            _mean_line(axis, curves[name], colour, label)
        axis.legend(frameon=False, fontsize=8)
        _dress(axis, f"MSI's curves from alpha_min {scores.alpha_min:g}", "alpha", kind)
    if scores.search is not None:
        _search_panel(next(rest), scores)
    mean = f"mean over {len(scores)} images"
    words = f"{title}: {mean}" if title else mean.capitalize()
    figure.suptitle(words, fontsize=10, color=INK)
    return figure


def methods_figure(scores: Mapping[str, Scores], quiet: Sequence[str] = ()) -> "Figure":
    """Each curve averaged over the images, a line a method; quiet ones are grey and dashed."""
    first = next(iter(scores.values()))
    kind = first.plan.schedules[0].score
    found = {method: one.mean_curves() for method, one in scores.items()}
    panels = []
    for name in (name for name in METHOD_TITLES if name in next(iter(found.values()))):
        curves = {method: curves[name] for method, curves in found.items()}
        lines = {method: (curve.grid, curve.values) for method, curve in curves.items()}
        panels.append(curve_panel(name, kind, lines))
    searches = {method: one.search for method, one in scores.items() if one.search is not None}
    if searches:
        means = {method: (found.alphas, found.means) for method, found in searches.items()}
        panels.append(alpha_panel(means, first.alpha_min))
    return lines_figure(panels, quiet, words=f"Mean over {len(first)} images")


def curve_panel(
    name: str, kind: str, lines: Mapping[str, tuple[Sequence[float], Any]], title: str = ""
) -> Panel:
    """One of the curves by its name, a line a method."""
    across = "share of pixels" if name.endswith("percent") else r"$\alpha$"
    return Panel(title or METHOD_TITLES[name], across, kind, lines)


def alpha_panel(
    means: Mapping[str, tuple[Sequence[float], Any]], alpha: float, images: int | None = None
) -> Panel:
    """Mean MSI over alpha_min, a line a method, and where the methods are compared.

    `images` says of how many, where these are not all.
    """
    title = rf"MSI over $\alpha_{{min}}$, compared at {alpha:g}"
    title += "" if images is None else f" ({images} image{'' if images == 1 else 's'})"
    return Panel(title, r"$\alpha_{min}$", "mean MSI", means, mark=alpha, unit=False)


def lines_figure(
    panels: Sequence[Panel],
    quiet: Sequence[str] = (),
    look: Look = USUAL,
    words: str = "",
) -> "Figure":
    """Panels side by side, under one legend of the methods."""
    figure, axes = axes_for(len(panels), look)
    methods = list(panels[0].lines)
    styles = _looks(methods, [method for method in quiet if method in methods])
    for axis, panel in zip(axes, panels, strict=False):
        for method, (where, height) in panel.lines.items():
            axis.plot(where, height, label=method, linewidth=look.font / 6, **styles[method])
        if panel.mark is not None:
            axis.axvline(panel.mark, color=QUIET, linestyle=":", linewidth=1)
        _dress(axis, panel.title, panel.across, panel.up, look.font)
        if not panel.unit:
            axis.set_ylim(auto=True)
            axis.relim()
            axis.autoscale(axis="y")
    _legend(figure, axes[0], look)
    if words:
        figure.suptitle(words, fontsize=look.font + 1, color=INK)
    return figure


def _legend(figure: "Figure", axis: "Axes", look: Look) -> None:
    """The methods' names below all panels, as many in a line as fit."""
    lines, names = axis.get_legend_handles_labels()
    letters = max(len(name) for name in names) + 6
    fits = int(figure.get_figwidth() * 72 / (0.6 * (look.font - 1) * letters))
    figure.legend(
        lines,
        names,
        loc="outside lower center",
        ncols=max(1, min(len(names), fits)),
        frameon=False,
        fontsize=look.font - 1,
        columnspacing=1.2,
        handlelength=1.8,
    )


def sizes_figure(
    points: Mapping[str, tuple[Estimate, Estimate]],
    quiet: Sequence[str] = (),
    look: Look = USUAL,
) -> "Figure":
    """Mask size across, base score up, a point a method with its intervals; lines of equal MSI."""
    figure, (axis, *_) = axes_for(1, look)
    styles = _looks(list(points), quiet)
    for number, (method, (size, base)) in enumerate(points.items()):
        colour, marker = styles[method]["color"], "osD^vPX<>h"[number % 10]
        axis.plot([size.low, size.high], [base.mean] * 2, color=colour, linewidth=1)
        axis.plot([size.mean] * 2, [base.low, base.high], color=colour, linewidth=1)
        axis.plot(
            [size.mean], [base.mean], marker, color=colour, markersize=look.font / 1.8, label=method
        )
    _dress(axis, "", r"mask penalty: share of pixels $\geq \alpha_{min}$", "base score", look.font)
    axis.set_ylim(auto=True)
    axis.autoscale()
    _equal_msi(axis, look)
    _legend(figure, axis, look)
    return figure


def _equal_msi(axis: "Axes", look: Look) -> None:
    """Lines along which base score less mask size is the same, labelled where they leave."""
    (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
    left = min(left, 0)
    for tenth in range(-20, 11, 2):
        msi = tenth / 10
        above = right + msi > high
        x, y = (high - msi, high) if above else (right, right + msi)
        if x <= left or y <= low:
            continue
        axis.plot([left, x], [left + msi, y], color="#d1d5db", linewidth=0.6, zorder=0)
        axis.annotate(
            f"MSI {msi:+.1f}" if msi else "MSI 0",
            (x, y),
            (0, 2) if above else (2, 0),
            textcoords="offset points",
            ha="center" if above else "left",
            va="bottom" if above else "center",
            fontsize=look.font - 3,
            color="#6b7280",
            annotation_clip=False,
        )
    axis.set_xlim(left, right)
    axis.set_ylim(low, high)


def _looks(methods: Sequence[str], quiet: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The colour and line of each method."""
    loud = [method for method in methods if method not in quiet]
    looks: dict[str, dict[str, Any]] = {
        method: {
            "color": LINES[k % len(LINES)],
            "linestyle": STROKES[k // len(LINES) % len(STROKES)],
        }
        for k, method in enumerate(loud)
    }
    dashes = ((0, (4, 2)), (0, (1, 1.5)))
    for number, method in enumerate(quiet):
        looks[method] = {"color": QUIET, "linestyle": dashes[number % 2]}
    return looks


def overlay(image: Tensor, heatmap: Tensor) -> Tensor:
    """A heatmap over its image: [C,H,W], [H,W] -> [H,W,3] in 0..1."""
    from matplotlib import colormaps

    grey = image.detach().cpu().float().mean(0, keepdim=True).expand(3, -1, -1).permute(1, 2, 0)
    values = heatmap.detach().cpu().float()
    coloured = colormaps["inferno"](values.numpy())[..., :3]
    weight = 0.7 * values[..., None]
    return (grey * (1 - weight) + torch.from_numpy(np.asarray(coloured)).float() * weight).clamp(
        0, 1
    )


def axes_for(panels: int, look: Look = USUAL) -> tuple["Figure", list["Axes"]]:
    """So many panels, up to three side by side or as many as fit the width."""
    from matplotlib.figure import Figure

    columns = look.columns(panels)
    rows = max(1, -(-panels // columns))
    width = 3.4 * columns if look.width is None else look.width
    each = min(width / columns, 3.4)
    figure = Figure(figsize=(width, (0.8 * each + 0.1) * rows + 0.2), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for spare in grid[panels:]:
        spare.set_axis_off()
    return figure, grid


def _mean_line(axis: "Axes", curve: MeanCurve, colour: str, label: str | None) -> None:
    axis.plot(curve.grid, curve.values, color=colour, label=label, linewidth=1.6)
    axis.fill_between(curve.grid, curve.values, color=colour, alpha=0.12, linewidth=0)


def _search_panel(axis: "Axes", scores: Scores) -> None:
    search = scores.search
    if search is None:
        return
    axis.plot(search.alphas, search.means, color=INK, marker="o", markersize=3, linewidth=1.4)
    axis.axvline(scores.alpha_min, color=QUIET, linestyle=":", linewidth=1)
    _dress(axis, f"MSI over alpha_min, best at {scores.alpha_min:g}", "alpha_min", "mean MSI")
    low, high = float(search.means.min()), float(search.means.max())
    axis.set_ylim(low - 0.1 * (high - low) - 0.01, high + 0.1 * (high - low) + 0.01)


def _dress(axis: "Axes", title: str, across: str, up: str, font: float = 9) -> None:
    axis.set_title(title, fontsize=font, color=INK)
    axis.set_xlabel(across, fontsize=font - 1)
    axis.set_ylabel(up, fontsize=font - 1)
    axis.tick_params(labelsize=font - 2)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1.02)
    axis.spines[["top", "right"]].set_visible(False)


def sheet_figure(
    images: Tensor,
    heatmaps: Mapping[str, Tensor],
    row_titles: Sequence[str],
    captions: Mapping[str, Sequence[str]] | None = None,
    *,
    under: Mapping[str, Mapping[str, Tensor]] | None = None,
    look: Look = USUAL,
) -> "Figure":
    """A row an image, a column a method: [N,C,H,W], each [N,H,W]; captions stand under the maps.

    `under` are rows of further pictures under each image's maps: {words: {method: [N,C,H,W]}}.
    """
    deep, further = 1 + len(under or {}), list((under or {}).items())
    lines = max(1 + title.count("\n") for title in row_titles)
    figure, grid = _sheet_axes(images, 1 + len(heatmaps), deep, lines, look)
    for i, image in enumerate(images):
        first, last = grid[deep * i], grid[deep * (i + 1) - 1]
        _picture(first[0], image)
        first[0].set_xlabel(row_titles[i], fontsize=look.font - 2, color=INK)
        for j, (name, maps) in enumerate(heatmaps.items(), 1):
            first[j].imshow(overlay(image, maps[i]).numpy())
            for k, (_, pictures) in enumerate(further, 1):
                _picture(grid[deep * i + k][j], pictures[name][i])
            if captions and name in captions:
                last[j].set_xlabel(captions[name][i], fontsize=look.font - 2, color=INK)
        for k, (words, _) in enumerate(further, 1):
            _words(grid[deep * i + k][0], words, look)
    for axis, title in zip(grid[0], ["image", *heatmaps], strict=True):
        axis.set_title(title, fontsize=look.font, color=INK)
    return figure


def _sheet_axes(
    images: Tensor, columns: int, deep: int, lines: int, look: Look
) -> tuple["Figure", Any]:
    """Empty panels, `deep` of them an image, with room for lines of words under each image."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = deep * len(images)
    width = 1.75 * columns if look.width is None else look.width
    side = width / columns * images.shape[2] / images.shape[3]
    height = rows * side + len(images) * lines * 1.3 * (look.font - 2) / 72 + 0.3
    near = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
    figure = Figure(figsize=(width, height), layout=near)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axis in grid.flatten():
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_visible(False)
    return figure, grid


def _words(axis: "Axes", words: str, look: Look) -> None:
    """Words in the place of a picture."""
    axis.text(
        0.95, 0.5, words, fontsize=look.font - 2, color=INK, ha="right", va="center",
        transform=axis.transAxes,
    )  # fmt: skip


def _picture(axis: "Axes", image: Tensor) -> None:
    shown = image.detach().cpu().float()
    if shown.shape[0] == 3:
        axis.imshow(shown.permute(1, 2, 0).numpy())
    else:
        axis.imshow(shown.mean(0).numpy(), cmap="gray", vmin=0, vmax=1)
