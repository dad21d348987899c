"""The result of sanity checks: rows, sentences, a figure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from sufficit.plots import INK, LINES, QUIET
from sufficit.sanity.randomization import LabelTraining
from sufficit.similarity import estimate
from sufficit.statistics import Estimate

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THRESHOLD = 0.5  # at this rank correlation a quarter of the ranks' variance is shared
Verdict = Literal["passes", "insensitive", "undecided"]


@dataclass(frozen=True)
class Likeness:
    """Per image, the similarity of a method's heatmaps for the original and for a changed model."""

    method: str
    step: int | None  # randomised blocks; None for random labels
    layer: str  # the block randomised last
    rank_correlation: Tensor  # [N], NaN for constant heatmaps
    ssim: Tensor  # [N]


@dataclass(frozen=True)
class SanityReport:
    """The similarities of every method after each step of the cascade and after random labels."""

    cascade: tuple[Likeness, ...]
    random_labels: tuple[Likeness, ...]
    training: LabelTraining | None  # of the copy that learned random labels
    targets: Tensor  # [N] the explained classes
    threshold: float
    seed: int

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods in the order given."""
        return tuple(dict.fromkeys(found.method for found in self.cascade))

    def frame(self) -> "pandas.DataFrame":
        """A row per method and step: means over images with 95 % intervals; NaN is counted."""
        import pandas

        checks = [("cascade", found) for found in self.cascade]
        checks += [("random labels", found) for found in self.random_labels]
        rows = pandas.DataFrame([_row(check, found, self.seed) for check, found in checks])
        return rows.astype({"step": "Int64"})

    def cascade_of(self, method: str) -> list[Likeness]:
        """The similarities of one method, step by step."""
        return [found for found in self.cascade if found.method == method]

    def verdicts(self) -> dict[str, Verdict]:
        """The verdict of each method: its rank correlation at the end against the threshold."""
        return {name: _verdict(self._end(name), self.threshold) for name in self.methods}

    def sentences(self) -> dict[str, str]:
        """The finding for each method, in words."""
        return {name: self._sentence(name) for name in self.methods}

    def remark(self) -> str | None:
        """Whether the copy learned the random labels."""
        if self.training is None:
            return None
        found = self.training
        words = (
            f"The copy learned {found.accuracy:.0%} of {found.images} random labels in"
            f" {found.epochs} epochs (chance {found.chance:.0%})"
        )
        if found.learned:
            return f"{words}."
        return f"{words}: too little for a meaningful check. Train for more epochs."

    def figure(self) -> "Figure":
        """Rank correlation and SSIM over the cascade, a line per method."""
        return sanity_figure(self.frame(), self.threshold, len(self.targets))

    def _end(self, method: str) -> Estimate:
        return estimate(self.cascade_of(method)[-1].rank_correlation, seed=self.seed)

    def _sentence(self, method: str) -> str:
        end = self._end(method)
        verdict, missing = _verdict(end, self.threshold), _missing(end)
        if _too_few(end):
            words = f"undecided: {missing}"
        else:
            words = {
                "insensitive": "insensitive to the weights: rank correlation is still",
                "passes": "passes: rank correlation falls to",
                "undecided": "undecided, use more images: rank correlation is",
            }[verdict]
            words += f" {_value(end)} with all layers random"
            words += f" ({missing})" if end.n_nan else ""
        if verdict == "passes":
            steps = self.cascade_of(method)
            means = [float(found.rank_correlation.nanmean()) for found in steps]
            high = [number for number, mean in enumerate(means, 1) if mean >= self.threshold]
            layer = steps[high[-1] if high else 0].layer
            words += f", and stays below {self.threshold:g} once {layer} is random"
        for found in self.random_labels:
            if found.method == method:
                words += f"; {self._label_words(found)}"
        return f"{words}."

    def _label_words(self, likeness: Likeness) -> str:
        found = estimate(likeness.rank_correlation, seed=self.seed)
        if _too_few(found):
            return f"after training on random labels, {_missing(found)}"
        insensitive = _verdict(found, self.threshold) == "insensitive"
        words = "insensitive to the labels: " if insensitive else ""
        return f"{words}{_value(found)} after training on random labels"


def _row(check: str, found: Likeness, seed: int) -> dict[str, Any]:
    rank, ssim = (estimate(v, seed=seed) for v in (found.rank_correlation, found.ssim))
    return {
        "check": check,
        "method": found.method,
        "step": found.step,
        "layer": found.layer,
        "rank_correlation": rank.mean,
        "rank_correlation_low": rank.low,
        "rank_correlation_high": rank.high,
        "ssim": ssim.mean,
        "ssim_low": ssim.low,
        "ssim_high": ssim.high,
        "n": rank.n + rank.n_nan,
        "n_nan": rank.n_nan,  # images with a constant heatmap, which has no rank correlation
    }


def _verdict(found: Estimate, threshold: float) -> Verdict:
    """By the whole interval; a single image has none."""
    if _too_few(found) or np.isnan(found.low):
        return "undecided"
    if found.low >= threshold:
        return "insensitive"
    return "passes" if found.high < threshold else "undecided"


def _too_few(found: Estimate) -> bool:
    """Whether most images have no rank correlation."""
    return found.n == 0 or found.n < found.n_nan


def _value(found: Estimate) -> str:
    spread = f" ({found.low:.2f} .. {found.high:.2f})" if found.low < found.high else ""
    return f"{found.mean:.2f}{spread}"


def _missing(found: Estimate) -> str:
    return f"{found.n_nan} of {found.n + found.n_nan} images have a constant heatmap"


def sanity_figure(frame: "pandas.DataFrame", threshold: float, n: int) -> "Figure":
    """Similarity to the original heatmaps as layers become random, a line per method.

    The frame is that of a sanity report; random labels get a marker to the right.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.7))
    panels = figure.subplots(1, 2)
    columns = {"rank_correlation": "Rank correlation", "ssim": "SSIM"}
    for axis, (column, title) in zip(panels, columns.items(), strict=True):
        _panel(axis, frame, column)
        axis.set_title(title, fontsize=9, color=INK)
        axis.set_ylabel("similarity to the original maps", fontsize=8)
    panels[0].axhline(threshold, color=QUIET, linestyle=":", linewidth=1)
    lines, names = panels[0].get_legend_handles_labels()
    look: dict[str, Any] = {"bbox_to_anchor": (1, 0.6), "frameon": False, "fontsize": 8}
    figure.legend(lines, names, loc="center left", **look)
    words = f"Layers randomised from the output downwards: mean over {n} images, 95 % intervals"
    figure.suptitle(words, fontsize=10, color=INK)
    figure.tight_layout()
    return figure


def _panel(axis: "Axes", frame: "pandas.DataFrame", column: str) -> None:
    bounds = (column, f"{column}_low", f"{column}_high")
    cascade = frame[frame["check"] == "cascade"]
    labelled = frame[frame["check"] == "random labels"]
    methods = list(dict.fromkeys(cascade["method"]))
    layers = list(dict.fromkeys(cascade["layer"]))
    for number, method in enumerate(methods):
        colour = LINES[number % len(LINES)]
        rows = cascade[cascade["method"] == method]
        mean, low, high = ([1.0, *rows[name]] for name in bounds)  # the original equals itself
        # Every other line is dashed and above the next, so that equal lines are both visible.
        dashes = (0, (4, 2)) if number % 2 else "-"
        above = 2 + (len(methods) - number) / len(methods)
        axis.plot(mean, color=colour, label=method, linewidth=1.7, linestyle=dashes, zorder=above)
        axis.fill_between(range(len(mean)), low, high, color=colour, alpha=0.15, linewidth=0)
        for mean, low, high in labelled[labelled["method"] == method][list(bounds)].to_numpy():
            place = len(layers) + 1 + (number + 0.5) / len(methods)
            axis.plot([place] * 2, [low, high], color=colour, linewidth=1)
            axis.plot([place], [mean], color=colour, marker="D", markersize=4, linestyle="none")
    short = [name if len(name) <= 23 else f"...{name[-20:]}" for name in layers]
    ticks, places = ["original", *short], [float(place) for place in range(len(layers) + 1)]
    if len(labelled):
        ticks.append("random labels")
        places.append(len(layers) + 1.5)
        axis.axvline(len(layers) + 0.6, color=QUIET, linewidth=0.6)
    axis.set_xticks(places, ticks, rotation=40, ha="right", rotation_mode="anchor", fontsize=7)
    axis.tick_params(axis="y", labelsize=7)
    lowest = float(np.nanmin([0.0, *frame[f"{column}_low"], *frame[column]]))
    axis.set_ylim(lowest - 0.04, 1.04)
    axis.spines[["top", "right"]].set_visible(False)
