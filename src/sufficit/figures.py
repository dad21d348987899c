"""Pictures of scores: curves, heatmaps over images, sheets of masks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sufficit.files import writing
from sufficit.metrics.evaluate import Scores

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SHOW, HIDE, QUIET = "#1f2937", "#0f766e", "#c2410c", "#9ca3af"
LINES = (SHOW, HIDE, "#1d4ed8", "#7c3aed", "#be123c", "#4d7c0f", "#0891b2", "#a16207")
TITLES = {
    "insertion_pixel": "Insertion by pixel value",
    "deletion_pixel": "Deletion by pixel value",
    "insertion_percent": "Insertion by percentage",
    "deletion_percent": "Deletion by percentage",
}


def save(figure: "Figure", path: Path) -> None:
    """Write a figure in the format of the path's suffix."""
    with writing(path) as part:
        figure.savefig(part, dpi=150, bbox_inches="tight", facecolor="white")


def curves_figure(scores: Scores, title: str = "") -> "Figure":
    """Each curve averaged over the images, and MSI over alpha_min where it was searched for."""
    curves = scores.curves()
    kind = scores.plan.schedules[0].score
    panels = [name for name in TITLES if name in curves]
    msi = "hide" in curves
    figure, axes = _axes(len(panels) + msi + (scores.search is not None))
    rest = iter(axes)
    for name in panels:
        axis, curve = next(rest), curves[name]
        colour = SHOW if name.startswith("insertion") else HIDE
        _mean_line(axis, curve.grid, getattr(curve, kind), colour, None)
        share = name.endswith("percent")
        _dress(axis, TITLES[name], "share of pixels" if share else "alpha", kind)
    if msi:
        axis = next(rest)
        for name, colour in (("show", SHOW), ("hide", HIDE)):
            label = rf"{name.title()}(>$\alpha$)"
            _mean_line(axis, curves[name].grid, getattr(curves[name], kind), colour, label)
        axis.legend(frameon=False, fontsize=8)
        _dress(axis, f"MSI's curves from alpha_min {scores.alpha_min:g}", "alpha", kind)
    if scores.search is not None:
        _search_panel(next(rest), scores)
    mean = f"mean over {len(scores)} images"
    words = f"{title}: {mean}" if title else mean.capitalize()
    figure.suptitle(words, fontsize=10, color=INK)
    figure.tight_layout()
    return figure


def methods_figure(scores: Mapping[str, Scores], quiet: Sequence[str] = ()) -> "Figure":
    """Each curve averaged over the images, a line a method; quiet ones are grey and dashed."""
    first = next(iter(scores.values()))
    kind, searched = first.plan.schedules[0].score, first.search is not None
    found = {method: one.curves() for method, one in scores.items()}
    known = next(iter(found.values()))
    titles = TITLES | {"show": r"MSI's Show(>$\alpha$)", "hide": r"MSI's Hide(>$\alpha$)"}
    panels = [name for name in titles if name in known]
    figure, axes = _axes(len(panels) + searched)
    looks = _looks(list(scores), quiet)
    for axis, name in zip(axes, panels, strict=False):
        for method, curves in found.items():
            mean = getattr(curves[name], kind).nanmean(0)
            axis.plot(curves[name].grid, mean, label=method, linewidth=1.5, **looks[method])
        share = name.endswith("percent")
        _dress(axis, titles[name], "share of pixels" if share else "alpha", kind)
    if searched:
        _searches_panel(axes[len(panels)], scores, looks)
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(
        lines, names, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8
    )
    figure.suptitle(f"Mean over {len(first)} images", fontsize=10, color=INK)
    figure.tight_layout()
    return figure


def _looks(methods: Sequence[str], quiet: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The colour and line of each method."""
    loud = [method for method in methods if method not in quiet]
    looks: dict[str, dict[str, Any]] = {
        method: {"color": LINES[number % len(LINES)]} for number, method in enumerate(loud)
    }
    dashes = ((0, (4, 2)), (0, (1, 1.5)))
    for number, method in enumerate(quiet):
        looks[method] = {"color": QUIET, "linestyle": dashes[number % 2]}
    return looks


def _searches_panel(
    axis: "Axes", scores: Mapping[str, Scores], looks: Mapping[str, Mapping[str, Any]]
) -> None:
    alpha = next(iter(scores.values())).alpha_min
    searches = {method: one.search for method, one in scores.items() if one.search is not None}
    for method, search in searches.items():
        axis.plot(search.alphas, search.means, linewidth=1.4, **looks[method])
    axis.axvline(alpha, color=QUIET, linestyle=":", linewidth=1)
    _dress(axis, f"MSI over alpha_min, compared at {alpha:g}", "alpha_min", "mean MSI")
    axis.set_ylim(auto=True)
    axis.relim()
    axis.autoscale(axis="y")


def alpha_figure(
    alphas: Sequence[float], means: Mapping[str, Sequence[float]], alpha_min: float, title: str
) -> "Figure":
    """Mean MSI over alpha_min, a line a method; a dotted line where they were compared."""
    figure, axes = _axes(1)
    figure.set_size_inches(6, 3.6)
    for number, (method, values) in enumerate(means.items()):
        line = "-" if number < len(LINES) else "--"
        colour = LINES[number % len(LINES)]
        axes[0].plot(alphas, values, line, label=method, linewidth=1.4, color=colour)
    axes[0].axvline(alpha_min, color=QUIET, linestyle=":", linewidth=1)
    _dress(axes[0], title, "alpha_min", "mean MSI")
    axes[0].set_ylim(auto=True)
    axes[0].relim()
    axes[0].autoscale(axis="y")
    axes[0].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=7)
    return figure


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


def _axes(panels: int) -> tuple["Figure", list["Axes"]]:
    from matplotlib.figure import Figure

    columns = min(3, max(1, panels))
    rows = max(1, -(-panels // columns))
    figure = Figure(figsize=(3.4 * columns, 2.7 * rows))
    grid = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for spare in grid[panels:]:
        spare.set_axis_off()
    return figure, grid


def _mean_line(
    axis: "Axes", grid: tuple[float, ...], values: Tensor, colour: str, label: str | None
) -> None:
    mean = values.nanmean(0)
    axis.plot(grid, mean, color=colour, label=label, linewidth=1.6)
    axis.fill_between(grid, mean, color=colour, alpha=0.12, linewidth=0)


def _search_panel(axis: "Axes", scores: Scores) -> None:
    search = scores.search
    if search is None:
        return
    axis.plot(search.alphas, search.means, color=INK, marker="o", markersize=3, linewidth=1.4)
    axis.axvline(scores.alpha_min, color=QUIET, linestyle=":", linewidth=1)
    _dress(axis, f"MSI over alpha_min, best at {scores.alpha_min:g}", "alpha_min", "mean MSI")
    low, high = float(search.means.min()), float(search.means.max())
    axis.set_ylim(low - 0.1 * (high - low) - 0.01, high + 0.1 * (high - low) + 0.01)


def _dress(axis: "Axes", title: str, across: str, up: str) -> None:
    axis.set_title(title, fontsize=9, color=INK)
    axis.set_xlabel(across, fontsize=8)
    axis.set_ylabel(up, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1.02)
    axis.spines[["top", "right"]].set_visible(False)


def sanity_figure(frame: "pandas.DataFrame", threshold: float, n: int) -> "Figure":
    """Likeness to the original maps as layers become random, a line a method.

    The frame is that of a sanity report; after random labels there is a marker apart.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.7))
    panels = figure.subplots(1, 2)
    for axis, column, title in zip(
        panels, ("rank_correlation", "ssim"), ("Rank correlation", "SSIM"), strict=True
    ):
        _sanity_panel(axis, frame, column)
        axis.set_title(title, fontsize=9, color=INK)
        axis.set_ylabel("likeness to the original maps", fontsize=8)
    panels[0].axhline(threshold, color=QUIET, linestyle=":", linewidth=1)
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(
        lines, names, loc="center left", bbox_to_anchor=(1, 0.6), frameon=False, fontsize=8
    )
    words = f"Layers made random from the output downwards: mean over {n} images, 95 % intervals"
    figure.suptitle(words, fontsize=10, color=INK)
    figure.tight_layout()
    return figure


def _sanity_panel(axis: "Axes", frame: "pandas.DataFrame", column: str) -> None:
    fallen = frame[frame["check"] == "cascade"]
    methods = list(dict.fromkeys(fallen["method"]))
    layers = list(dict.fromkeys(fallen["layer"]))
    for number, method in enumerate(methods):
        colour = LINES[number % len(LINES)]
        rows = fallen[fallen["method"] == method]
        mean, low, high = _with_original(rows, column)
        # Every other line is dashed and lies above the next, so that equal ones are both seen.
        dashes = (0, (4, 2)) if number % 2 else "-"
        above = 2 + (len(methods) - number) / len(methods)
        axis.plot(mean, color=colour, label=method, linewidth=1.7, linestyle=dashes, zorder=above)
        axis.fill_between(range(len(mean)), low, high, color=colour, alpha=0.15, linewidth=0)
        labelled = frame[(frame["check"] == "random labels") & (frame["method"] == method)]
        if len(labelled):
            aside = len(layers) + 1 + (number + 0.5) / len(methods)
            _sanity_marker(axis, labelled, column, aside, colour)
    ticks = ["original", *(_short(layer) for layer in layers)]
    places = [float(place) for place in range(len(ticks))]
    if (frame["check"] == "random labels").any():
        ticks.append("random labels")
        places.append(len(layers) + 1.5)
        axis.axvline(len(layers) + 0.6, color=QUIET, linewidth=0.6)
    axis.set_xticks(places, ticks, rotation=40, ha="right", rotation_mode="anchor", fontsize=7)
    axis.tick_params(axis="y", labelsize=7)
    lowest = float(np.nanmin([0.0, *frame[f"{column}_low"], *frame[column]]))
    axis.set_ylim(lowest - 0.04, 1.04)
    axis.spines[["top", "right"]].set_visible(False)


def _with_original(rows: "pandas.DataFrame", column: str) -> list[list[float]]:
    """Mean, low and high over the steps, after the original's likeness to itself, which is 1."""
    return [[1.0, *rows[name]] for name in (column, f"{column}_low", f"{column}_high")]


def _sanity_marker(
    axis: "Axes", rows: "pandas.DataFrame", column: str, place: float, colour: str
) -> None:
    row = rows.iloc[0]
    axis.plot([place] * 2, [row[f"{column}_low"], row[f"{column}_high"]], color=colour, lw=1)
    axis.plot([place], [row[column]], color=colour, marker="D", markersize=4, linestyle="none")


def _short(name: str) -> str:
    """The end of a long name.

    >>> _short("vit.encoder.layers.encoder_layer_10")
    '...ers.encoder_layer_10'
    """
    return name if len(name) <= 23 else f"...{name[-20:]}"


def training_figure(history: "pandas.DataFrame", best: int, n: int) -> "Figure":
    """How an adapter became what it is, an epoch at a time: a row an epoch."""
    figure, axes = _axes(3)
    _epoch_lines(axes[0], history, {"base_score": SHOW, "mask_penalty": HIDE, "msi": INK})
    axes[0].axhline(0, color=QUIET, linewidth=0.6)
    _epoch_dress(axes[0], f"On {n} held-out images", "score", best)
    _epoch_lines(axes[1], history, {"leak": HIDE, "leak_chance": QUIET})
    axes[1].set_ylim(0, max(0.05, 1.1 * float(history[["leak", "leak_chance"]].max().max())))
    _epoch_dress(axes[1], "Leak beside chance, held-out images", "share of other images", best)
    _epoch_lines(axes[2], history, {"loss": INK})
    other = axes[2].twinx()
    _epoch_lines(other, history, {"accuracy": SHOW})
    other.set_ylim(0, 1.02)
    _epoch_dress(axes[2], "Training", "loss", best)
    other.set_ylabel("right on masked images", fontsize=8, color=SHOW)
    other.tick_params(labelsize=7, colors=SHOW)
    other.spines[["top"]].set_visible(False)
    words = f"Training, epoch by epoch; the adapter kept is that of epoch {best}"
    figure.suptitle(words, fontsize=10, color=INK)
    figure.tight_layout()
    return figure


def _epoch_lines(axis: "Axes", history: "pandas.DataFrame", colours: Mapping[str, str]) -> None:
    marker = "o" if len(history) < 30 else None
    for name, colour in colours.items():
        label = {"msi": "MSI", "leak_chance": "chance"}.get(name, name.replace("_", " "))
        axis.plot(
            history["epoch"],
            history[name],
            color=colour,
            label=label,
            linewidth=1.6,
            marker=marker,
            markersize=3,
        )
    if len(colours) > 1:
        axis.legend(frameon=False, fontsize=7)


def _epoch_dress(axis: "Axes", title: str, up: str, best: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.axvline(best, color=QUIET, linestyle=":", linewidth=1)
    axis.set_title(title, fontsize=9, color=INK)
    axis.set_xlabel("epoch", fontsize=8)
    axis.set_ylabel(up, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)


def sheet_figure(
    images: Tensor,
    heatmaps: dict[str, Tensor],
    row_titles: Sequence[str],
    captions: Mapping[str, Sequence[str]] | None = None,
) -> "Figure":
    """A row an image, a column a method: [N,C,H,W], each [N,H,W]; captions stand under the maps."""
    from matplotlib.figure import Figure

    rows, columns = len(images), 1 + len(heatmaps)
    figure = Figure(figsize=(1.75 * columns, 2.05 * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axis in grid.flatten():
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_visible(False)
    for i, image in enumerate(images):
        _picture(grid[i][0], image)
        grid[i][0].set_xlabel(row_titles[i], fontsize=7, color=INK)
        for j, (name, maps) in enumerate(heatmaps.items(), 1):
            grid[i][j].imshow(overlay(image, maps[i]).numpy())
            if captions and name in captions:
                grid[i][j].set_xlabel(captions[name][i], fontsize=7, color=INK)
    for axis, title in zip(grid[0], ["image", *heatmaps], strict=True):
        axis.set_title(title, fontsize=9, color=INK)
    return figure


def _picture(axis: "Axes", image: Tensor) -> None:
    shown = image.detach().cpu().float()
    if shown.shape[0] == 3:
        axis.imshow(shown.permute(1, 2, 0).numpy())
    else:
        axis.imshow(shown.mean(0).numpy(), cmap="gray", vmin=0, vmax=1)
