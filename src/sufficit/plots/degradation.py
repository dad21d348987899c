"""The figure of `check-metric`."""

from typing import TYPE_CHECKING

from sufficit.metrics.columns import heading
from sufficit.plots.style import INK, LINES, QUIET

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


def check_figure(frame: "pandas.DataFrame", base: str, n: int) -> "Figure":
    """One row per column, best on top: the share of pairs in the right order, by degradation."""
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys(frame["column"]))
    kinds = [kind for kind in dict.fromkeys(frame["degradation"]) if kind != "all"]
    figure = Figure(figsize=(6.9, 0.8 + 0.24 * len(columns)), layout="constrained")
    axis = figure.subplots()
    places = {column: len(columns) - 1 - i for i, column in enumerate(columns)}
    for k, kind in enumerate(kinds):
        own = frame[frame["degradation"] == kind]
        rows = [places[column] for column in own["column"]]
        axis.plot(own["by_mean"], rows, "o", ms=4, color=LINES[k % len(LINES)], label=kind)
    whole = frame[frame["degradation"] == "all"]
    rows = [places[column] for column in whole["column"]]
    axis.hlines(rows, whole["by_mean_low"], whole["by_mean_high"], color=INK, linewidth=1.4)
    axis.plot(whole["by_mean"], rows, "|", ms=9, mew=2, color=INK, label="all, 95 % interval")
    axis.axvline(0.5, color=QUIET, linestyle=":", linewidth=1)
    axis.set_yticks([*places.values()], [heading(column).long for column in places], fontsize=8)
    axis.set_xlim(-0.03, 1.03)
    axis.set_xlabel("pairs of levels in the right order, by means", fontsize=8)
    axis.set_title(f"{base}, made worse; {n} images", fontsize=9, loc="left")
    axis.legend(frameon=False, fontsize=7, loc="lower left", bbox_to_anchor=(1.0, 0.0))
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return figure
