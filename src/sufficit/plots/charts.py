"""Charts of scores: mean curves, MSI over alpha_min, base score over mask penalty."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sufficit.errors import UserError, unknown
from sufficit.metrics.columns import ALPHA, ZERO_LABEL, ZERO_LINE, heading_of
from sufficit.metrics.scores import MethodScores, Scores
from sufficit.plots import style
from sufficit.plots.style import HIDE, INK, LINES, QUIET, SHOW, USUAL, Look, axes_for, dress
from sufficit.statistics import Estimate

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


STROKES = ("-", (0, (6, 1.5)), (0, (4, 1, 1, 1)))  # where there are more methods than colours
CURVES = ("insertion_pixel", "deletion_pixel", "insertion_percent", "deletion_percent")
PAPER_CURVES = ("show", "hide", "insertion_percent", "deletion_percent")


@dataclass(frozen=True)
class Panel:
    """One chart of lines, one per method: (x, y); `mark` is a dotted vertical line."""

    title: str
    across: str
    up: str
    lines: Mapping[str, tuple[Sequence[float], Any]]
    mark: float | None = None
    unit: bool = True  # y is in 0..1
    colours: Mapping[str, str] = field(default_factory=dict)  # of lines that are no methods


def curves_figure(of: Scores, title: str = "") -> "Figure":
    """Draw every mean curve of one method, and MSI over alpha_min where it was searched for."""
    scores = MethodScores.of(of)
    groups: list[tuple[str, ...]] = [(name,) for name in CURVES if name in scores.curves]
    groups += [("show", "hide")] if "hide" in scores.curves else []
    figure, axes = axes_for(len(groups) + (scores.alphas is not None))
    for axis, names in zip(axes, groups, strict=False):
        for name in names:
            curve = scores.curves[name]
            colour = SHOW if name.startswith(("insertion", "show")) else HIDE
            label = heading_of(name).long
            axis.plot(curve.grid, curve.values, color=colour, label=label, linewidth=1.6)
            axis.fill_between(curve.grid, curve.values, color=colour, alpha=0.12, linewidth=0)
        words = heading_of(names[0]).long
        if len(names) > 1:
            words = f"MSI's curves from alpha_min {scores.alpha_min:g}"
            axis.legend(frameon=False, fontsize=8)
        dress(axis, words, _across(names[0]), scores.schedule.score)
    if scores.alphas is not None:
        axis = axes[len(groups)]
        alphas = scores.alphas
        axis.plot([*alphas], [*alphas.values()], color=INK, marker="o", markersize=3, linewidth=1.4)
        axis.axvline(scores.alpha_min, color=QUIET, linestyle=":", linewidth=1)
        words = f"MSI over alpha_min, best at {scores.alpha_min:g}"
        dress(axis, words, "alpha_min", "mean MSI", unit=False)
    words = f"{title}: mean" if title else "Mean"
    figure.suptitle(f"{words} over {scores.n} images", fontsize=10, color=INK)
    return figure


def methods_figure(
    scores: Mapping[str, MethodScores],
    quiet: Sequence[str] = (),
    names: Sequence[str] | None = None,
    look: Look = USUAL,
) -> "Figure":
    """Draw mean curves, one line per method; quiet ones are grey and dashed.

    `names` chooses curves; without it all are drawn, and MSI over alpha_min if it was searched.
    """
    first = next(iter(scores.values()))
    wanted = [c for c in (*CURVES, "show", "hide") if c in first.curves] if names is None else names
    panels = [curve_panel(name, scores) for name in wanted]
    if names is None:
        searched = alpha_panel(scores)
        if searched is not None:
            panels.append(searched)
    words = f"Mean over {first.n} images" if names is None else ""
    return lines_figure(panels, quiet, look, words)


def curve_panel(name: str, scores: Mapping[str, MethodScores], title: str | None = None) -> Panel:
    """Return the panel of one mean curve, one line per method."""
    lines = {}
    for method, found in scores.items():
        if name not in found.curves:
            raise unknown("curve in this run", name, found.curves)
        curve = found.curves[name]
        if (~curve.values.isnan()).sum() > 1:  # by rank a map without an order has no curve
            lines[method] = (curve.grid, curve.values)
    kind = next(iter(scores.values())).schedule.score
    return Panel(heading_of(name).long if title is None else title, _across(name), kind, lines)


def parts_panel(scores: MethodScores) -> Panel:
    """Return the panel of one method: mean score of what is kept, hidden and left over alpha."""
    curves = scores.curves
    kept = "insertion_pixel" if "insertion_pixel" in curves else "show"
    wanted = {"kept": kept, "complement": "deletion_pixel", "hidden": "hide"}
    lines = {n: (curves[c].grid, curves[c].values) for n, c in wanted.items() if c in curves}
    colours = {"kept": SHOW, "complement": style.REST, "hidden": HIDE}
    return Panel("", ALPHA, scores.schedule.score, lines, mark=scores.alpha_min, colours=colours)


def alpha_panel(
    scores: Mapping[str, MethodScores], alpha_curve: Mapping[str, Any] | None = None
) -> Panel | None:
    """Return the panel of mean MSI over alpha_min, and where the methods are compared.

    Of all images where it was searched, else of the sample in `alpha_curve` (as run.json has it);
    None where there is neither.
    """
    lines: dict[str, tuple[Sequence[float], Any]] = {
        m: ([*s.alphas], [*s.alphas.values()]) for m, s in scores.items() if s.alphas
    }
    alpha = next(iter(scores.values())).alpha_min
    of = ""
    if not lines and alpha_curve is not None:
        means = alpha_curve["mean_msi"]
        n = alpha_curve["images"]
        lines = {m: (alpha_curve["alphas"], means[m]) for m in scores if m in means}
        of = f" ({n} image{'' if n == 1 else 's'})"
    title = f"MSI over alpha_min, compared at {alpha:g}{of}"
    panel = Panel(title, "alpha_min", "mean MSI", lines, mark=alpha, unit=False)
    return panel if lines else None


def alpha_figure(
    scores: Mapping[str, MethodScores],
    alpha_curve: Mapping[str, Any] | None = None,
    quiet: Sequence[str] = (),
    look: Look = style.PAPER,
) -> "Figure":
    """Draw mean MSI over alpha_min, one line per method."""
    panel = alpha_panel(scores, alpha_curve)
    if panel is None:
        raise UserError(
            "this run has MSI at one alpha_min only: run compare again with --checks default, or"
            " with --alpha-min search"
        )
    return lines_figure([panel], quiet, look)


def lines_figure(
    panels: Sequence[Panel], quiet: Sequence[str] = (), look: Look = USUAL, words: str = ""
) -> "Figure":
    """Panels side by side, with one legend of the methods."""
    figure, axes = axes_for(len(panels), look)
    methods = list(panels[0].lines)
    styles = _styles(methods, [method for method in quiet if method in methods])
    for axis, panel in zip(axes, panels, strict=False):
        for name, (x, y) in panel.lines.items():
            own = {"color": panel.colours[name]} if panel.colours else styles[name]
            axis.plot(x, y, label=name, linewidth=look.font / 6, **own)
        if panel.mark is not None:
            axis.axvline(panel.mark, color=QUIET, linestyle=":", linewidth=1)
        dress(axis, panel.title, panel.across, panel.up, look.font, unit=panel.unit)
    _legend(figure, axes[0], look)
    if words:
        figure.suptitle(words, fontsize=look.font + 1, color=INK)
    return figure


def _legend(figure: "Figure", axis: "Axes", look: Look) -> None:
    """Write the methods' names below all panels, as many per row as fit."""
    lines, names = axis.get_legend_handles_labels()
    if not look.legend or not names:
        return
    # A letter is about 0.6 of the font's size wide; 6 letters are room for the line and the gap.
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
    summaries: Mapping[str, Mapping[str, Estimate]], quiet: Sequence[str] = (), look: Look = USUAL
) -> "Figure":
    """Base score over mask penalty, one point per method with its intervals; lines of equal MSI.

    Without a legend every point has its name next to it.
    """
    for column in ("mask_penalty", "base_score"):
        if any(column not in summary for summary in summaries.values()):
            raise UserError(f"sizes need the column {column}, which was not scored: score it too")
    figure, (axis, *_) = axes_for(1, look)
    styles = _styles(list(summaries), quiet)
    points = {}
    for number, (method, summary) in enumerate(summaries.items()):
        size = summary["mask_penalty"]
        base = summary["base_score"]
        if math.isnan(size.mean) or math.isnan(base.mean):
            continue
        colour = styles[method]["color"]
        marker = "osD^vPX<>h"[number % 10]
        axis.plot([size.low, size.high], [base.mean] * 2, color=colour, linewidth=1)
        axis.plot([size.mean] * 2, [base.low, base.high], color=colour, linewidth=1)
        points[method] = (size.mean, base.mean)
        axis.plot(
            size.mean,
            base.mean,
            linestyle="",
            label=method,
            color=colour,
            marker=marker,
            markersize=look.font / 1.8,
        )
    dress(axis, "", "mask penalty: share of pixels \u2265 alpha_min", "base score", look.font)
    axis.set_ylim(auto=True)
    axis.autoscale()
    _equal_msi(axis, look)
    for name in {*points} & {ZERO_LINE, ZERO_LABEL}:
        _zero_line(axis, points[name], look)
    if look.legend:
        _legend(figure, axis, look)
    else:
        _name_points(axis, points, {m: styles[m]["color"] for m in points}, look)
    return figure


def _equal_msi(axis: "Axes", look: Look) -> None:
    """Draw lines of equal MSI, which is base score minus mask penalty, labelled at their ends."""
    left, right = axis.get_xlim()
    low, high = axis.get_ylim()
    # Lines start at the axis, also where all points are far from it.
    left = min(left, 0)
    for tenth in range(-20, 11, 2):
        msi = tenth / 10
        above = right + msi > high
        x, y = (high - msi, high) if above else (right, right + msi)
        if x - left < 0.05 * (right - left) or y <= low:  # outside, or too short to be a line
            continue
        axis.plot([left, x], [left + msi, y], color=style.GRID, linewidth=0.6, zorder=0)
        shift, ha, va = ((0, 2), "center", "bottom") if above else ((2, 0), "left", "center")
        axis.annotate(
            f"MSI {msi:+.1f}" if msi else "MSI 0",
            (x, y),
            shift,
            textcoords="offset points",
            ha=ha,
            va=va,
            fontsize=look.font - 3,
            color=QUIET,
            annotation_clip=False,
        )
    axis.set_xlim(left, right)
    axis.set_ylim(low, high)


def _zero_line(axis: "Axes", everything: tuple[float, float], look: Look) -> None:
    """Draw the line of the MSI of marking the whole image: below it a map is worse."""
    (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
    size, base = everything
    axis.axline(everything, slope=1, color=INK, linestyle=(0, (3, 2)), linewidth=0.9, zorder=1)
    axis.set_xlim(left, right)
    axis.set_ylim(low, high)
    start = max(left, low - (base - size))
    middle = (start + min(right, size)) / 2
    axis.annotate(
        "zero line",
        (middle, middle + base - size),
        (-3, 4),
        textcoords="offset points",
        ha="right",
        fontsize=look.font - 3,
        color=INK,
    )


def _name_points(
    axis: "Axes", points: Mapping[str, tuple[float, float]], colours: Mapping[str, str], look: Look
) -> None:
    """Write each name beside its point, on the free side, lower where it would cover another."""
    left, right = axis.get_xlim()
    low, high = axis.get_ylim()
    figure = axis.get_figure(root=True)
    assert figure is not None
    width, height = (float(inches) * 72 * 0.77 for inches in figure.get_size_inches())  # the axes'
    # Points of the page, from the lower left corner of the axes.
    at = {
        name: ((x - left) / (right - left) * width, (y - low) / (high - low) * height)
        for name, (x, y) in points.items()
    }
    # Places that names must not cover: first of all the points.
    taken = [(x - 5, x + 5, y - look.font / 3) for x, y in at.values()]
    for name, (x, y) in sorted(at.items(), key=lambda item: -item[1][1]):
        length = 0.55 * look.font * len(name)
        others = [other for key, other in at.items() if key != name]
        near = min(others, key=lambda p: math.dist(p, (x, y)), default=(x - 1, y))
        side = -1 if x + length > width or near[0] > x > length else 1
        start = x + 6 if side > 0 else x - 6 - length
        line = y - look.font / 3
        for first, last, other in sorted(taken, key=lambda place: -place[2]):
            if first < start + length and start < last and abs(other - line) < look.font:
                line = other - look.font
        taken.append((start, start + length, line))
        label = axis.annotate(
            name,
            points[name],
            (7 * side, line - y),
            textcoords="offset points",
            color=colours[name],
            fontsize=look.font - 1,
            ha="left" if side > 0 else "right",
        )
        label.set_in_layout(False)  # a long name must not squeeze the chart


def _styles(methods: Sequence[str], quiet: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the colour and line style of each method."""
    loud = [method for method in methods if method not in quiet]
    styles: dict[str, dict[str, Any]] = {
        method: {"color": LINES[k % len(LINES)], "linestyle": STROKES[k // len(LINES) % 3]}
        for k, method in enumerate(loud)
    }
    dashes = ((0, (4, 2)), (0, (1, 1.5)))
    for number, method in enumerate(quiet):
        styles[method] = {"color": QUIET, "linestyle": dashes[number % 2]}
    for method in {*quiet} & {ZERO_LINE, ZERO_LABEL}:
        styles[method] = {"color": INK, "linestyle": (0, (3, 2))}
    return styles


def _across(curve: str) -> str:
    """Return the label of the axis along a curve."""
    return "share of pixels" if curve.endswith("percent") else ALPHA


def training_figure(history: "pandas.DataFrame", best: int, n: int) -> "Figure":
    """Draw scores on n held-out images, leakage and loss over epochs; `best` is dotted."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = axes_for(3)
    axes.append(axes[2].twinx())
    scores = {"base_score": SHOW, "mask_penalty": HIDE, "msi": INK}
    second = ("Leakage and chance, held-out images", "share of donor images")
    others = {"leak": HIDE, "leak_chance": QUIET}
    if "insertion" in history:  # the history of an order
        scores = {"insertion": SHOW, "msi": INK}
        second = ("The size with the highest MSI", "share of the image")
        others = {"size": HIDE}
    panels: tuple[tuple[str, str, dict[str, str]], ...] = (
        (f"On {n} held-out images", "score", scores),
        (*second, others),
        ("Training", "loss", {"loss": INK}),
        ("", "accuracy on masked images", {"accuracy": SHOW}),
    )
    marker = "o" if len(history) < 30 else None
    for axis, (title, up, colours) in zip(axes, panels, strict=True):
        dress(axis, title, "epoch", up, unit=False)
        axis.set_xlim(auto=True)
        for name, colour in colours.items():
            label = {"msi": "MSI", "leak_chance": "chance"}.get(name, name.replace("_", " "))
            line = history[["epoch", name]].dropna()  # an order is not scored in every epoch
            axis.plot(
                line["epoch"],
                line[name],
                color=colour,
                label=label,
                linewidth=1.6,
                marker=marker,
                markersize=3,
            )
        if len(colours) > 1:  # below the panel: inside, the legend would hide lines
            axis.legend(
                frameon=False,
                fontsize=7,
                loc="upper center",
                bbox_to_anchor=(0.5, -0.17),
                ncols=3,
            )
        axis.axvline(best, color=QUIET, linestyle=":", linewidth=1)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].axhline(0, color=QUIET, linewidth=0.6)
    axes[1].set_ylim(0, max(0.05, 1.1 * float(history[[*others]].max().max())))
    axes[3].set_ylim(0, 1.02)
    axes[3].yaxis.label.set_color(SHOW)
    axes[3].tick_params(colors=SHOW, labelcolor=SHOW)
    axes[3].spines["right"].set_visible(True)
    title = f"Training, epoch by epoch; epoch {best} is selected"
    figure.suptitle(title, fontsize=10, color=INK)
    return figure


def sanity_figure(frame: "pandas.DataFrame", threshold: float, n: int) -> "Figure":
    """Similarity to the original heatmaps as layers become random, a line per method.

    The frame is that of a sanity report on n images.
    """
    figure, axes = axes_for(2)
    figure.set_size_inches(9.6, 4.2)
    methods = list(frame["method"].unique())
    layers = list(frame["layer"].unique())
    last = len(layers)
    ticks = ["original", *(name if len(name) <= 23 else f"...{name[-20:]}" for name in layers)]
    places = list(range(last + 1))
    titles = {"rank_correlation": "Rank correlation", "ssim": "SSIM"}
    for axis, (column, title) in zip(axes, titles.items(), strict=True):
        bounds = [column, f"{column}_low", f"{column}_high"]
        dress(axis, title, "", "similarity to the original maps", unit=False)
        for number, method in enumerate(methods):
            colour = LINES[number % len(LINES)]
            rows = frame[frame["method"] == method]
            mean, low, high = ([1.0, *rows[name]] for name in bounds)  # the original equals itself
            # Every other line is dashed and above the next, so that equal lines are both visible.
            axis.plot(
                mean,
                color=colour,
                label=method,
                linestyle=(0, (4, 2)) if number % 2 else "-",
                linewidth=1.7,
                zorder=2 + (len(methods) - number) / len(methods),
            )
            axis.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_xticks(places, ticks, rotation=40, ha="right", rotation_mode="anchor")
        axis.set_ylim(float(np.nanmin([0.0, *frame[bounds[1]], *frame[column]])) - 0.04, 1.04)
    axes[0].axhline(threshold, color=QUIET, linestyle=":", linewidth=1)
    _legend(figure, axes[0], USUAL)
    words = f"Layers randomised from the output downwards: mean over {n} images, 95 % intervals"
    figure.suptitle(words, fontsize=10, color=INK)
    return figure
