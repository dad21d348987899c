"""The picture of a training run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sufficit.plots import HIDE, INK, QUIET, SHOW, axes_for

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def training_figure(history: "pandas.DataFrame", best: int, n: int) -> "Figure":
    """How an adapter became what it is, an epoch at a time: a row an epoch."""
    figure, axes = axes_for(3)
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
