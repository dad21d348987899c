"""The picture of a sanity check."""

from typing import TYPE_CHECKING

import numpy as np

from sufficit.plots import INK, LINES, QUIET

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
