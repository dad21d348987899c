"""The geometry of the charts; their strokes and words are in charts.html, colours in page.css."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sufficit.metrics.scores import AlphaSearch
from sufficit.report.content import Content
from sufficit.report.interpretation import Losses, Reading
from sufficit.statistics import Estimate

LINE_COLOURS = 8
LABEL_GAP = 15.0


@dataclass(frozen=True)
class Frame:
    """Where values lie in a picture of this size."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_low: float = 0.0
    x_high: float = 1.0
    y_low: float = 0.0
    y_high: float = 1.0

    def x(self, value: float) -> float:
        """From value to place across."""
        part = (value - self.x_low) / (self.x_high - self.x_low)
        return round(self.left + part * (self.width - self.left - self.right), 2)

    def y(self, value: float) -> float:
        """From value to place down."""
        part = (value - self.y_low) / (self.y_high - self.y_low)
        return round(self.height - self.bottom - part * (self.height - self.top - self.bottom), 2)

    def path(self, xs: Iterable[float], ys: Iterable[float]) -> str:
        """A line through the points, broken where there is none."""
        words, pen = [], "M"
        for x, y in zip(xs, ys, strict=True):
            if math.isnan(y):
                pen = "M"
                continue
            words.append(f"{pen}{self.x(x):g} {self.y(y):g}")
            pen = "L"
        return "".join(words)

    def ticks(self, axis: str, step: float) -> list[float]:
        """Multiples of a step within the range of an axis."""
        low, high = (getattr(self, f"{axis}_{end}") for end in ("low", "high"))
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return [round(i * step, 6) for i in range(first, last + 1)]


@dataclass(frozen=True)
class Line:
    """A line of a chart, and the class its colour comes from."""

    name: str
    style: str
    path: str


@dataclass(frozen=True)
class Panel:
    """One chart of lines."""

    title: str
    frame: Frame
    lines: tuple[Line, ...]
    across: str
    up: str
    mark: float | None = None  # an alpha_min
    note: str = ""


@dataclass(frozen=True)
class Dot:
    """A method in the scatter: its means, their intervals, and where its name stands."""

    name: str
    style: str
    penalty: Estimate
    base: Estimate
    label_x: float
    label_y: float
    anchor: str


@dataclass(frozen=True)
class Scatter:
    """Base score over mask penalty."""

    frame: Frame
    dots: tuple[Dot, ...]
    diagonals: tuple[
        tuple[float, str, float], ...
    ]  # MSI, the path of all points with it, its length


def styles(content: Content) -> dict[str, str]:
    """A class for each method's colour; those outside the contest are grey."""
    inside = list(content.standing.ranking)
    outside = [method for method in content.methods if method not in inside]
    found = {method: f"m{i % LINE_COLOURS}" for i, method in enumerate(inside)}
    found |= {method: f"m{i % LINE_COLOURS} dashed" for i, method in enumerate(inside) if i >= 8}
    return found | {method: f"grey g{i % 3}" for i, method in enumerate(outside)}


def mean_panels(content: Content) -> list[Panel]:
    """For each method the mean curves of what is kept, hidden and left."""
    return [_mean_panel(content, method) for method in content.methods]


def _mean_panel(content: Content, method: str) -> Panel:
    scores = content.scores[method]
    frame = Frame(260, 170, 28, 8, 8, 22)
    curves, kind = scores.mean_curves(), content.schedule(method).score
    wanted = {
        "kept": "insertion_pixel" if "insertion_pixel" in curves else "show",
        "rest": "deletion_pixel",
        "hidden": "hide",
    }
    lines = tuple(
        Line(name, name, frame.path(curve.grid, curve.values.tolist()))
        for name, curve in ((n, curves[c]) for n, c in wanted.items() if c in curves)
    )
    note = f"MSI {content.summaries[method]['msi'].mean:.3f}"
    return Panel(method, frame, lines, "alpha", kind, scores.alpha_min, note)


def percent_panels(content: Content) -> list[Panel]:
    """All methods' mean insertion and deletion curves by share of the pixels."""
    titles = {
        "insertion_percent": "Insertion: the top share shown",
        "deletion_percent": "Deletion: the top share taken away",
    }
    return [
        panel for name, title in titles.items() if (panel := _percent_panel(content, name, title))
    ]


def _percent_panel(content: Content, name: str, title: str) -> Panel | None:
    frame, colours = Frame(400, 260, 32, 10, 10, 24), styles(content)
    lines = []
    for method in content.methods:
        curve = content.scores[method].mean_curves().get(name)
        if curve is not None:
            lines.append(
                Line(method, colours[method], frame.path(curve.grid, curve.values.tolist()))
            )
    score = content.schedule(content.methods[0]).score
    return Panel(title, frame, tuple(lines), "share of pixels", score) if lines else None


def search_panel(content: Content) -> Panel | None:
    """Mean MSI over alpha_min, where it was searched or measured on some of the images."""
    searches = _searches(content)
    if not searches:
        return None
    values = [v for search in searches.values() for v in search.means.tolist() if not math.isnan(v)]
    low, high = _ends([*values, 0.0], 0.1)
    frame = Frame(400, 260, 40, 10, 10, 24, y_low=low, y_high=high)
    colours = styles(content)
    lines = tuple(
        Line(m, colours[m], frame.path(searches[m].alphas, searches[m].means.tolist()))
        for m in content.methods
        if m in searches
    )
    mark, note = content.first.alpha_min, _search_note(content)
    return Panel("MSI over alpha_min", frame, lines, "alpha_min", "mean MSI", mark, note)


def _searches(content: Content) -> dict[str, AlphaSearch]:
    found = {m: s.search for m, s in content.scores.items() if s.search is not None}
    return found or dict(content.alpha_curves.searches if content.alpha_curves else {})


def _search_note(content: Content) -> str:
    """On which images and curves MSI over alpha_min was measured."""
    curves, n = content.alpha_curves, len(content.names)
    if curves is None or content.first.search is not None:
        return "Mean MSI at every alpha_min tried; the dotted line is the one chosen."
    count, few = len(curves.rows), len(curves.rows) < n
    whole = "the one image" if n == 1 else f"all {n} images"
    which = f"{count} of the {n:,} images, spread evenly over them" if few else whole
    finer = content.schedule(content.methods[0]).value_step < curves.step
    why = " and ".join(["fewer images"] * few + ["coarser steps"] * finer)
    differs = f"; for {why} its MSI may differ a little from the table's" if why else ""
    return (
        f"Mean MSI on {which}, of curves in steps of {curves.step:g}. The dotted line is the"
        f" alpha_min of the table{differs}."
    )


def scatter(content: Content) -> Scatter:
    """Mean base score over mean mask penalty, lines of equal MSI behind."""
    points = {
        method: (summary["mask_penalty"], summary["base_score"])
        for method, summary in content.summaries.items()
        if all(_known(summary.get(name)) for name in ("mask_penalty", "base_score"))
    }
    x_low, x_high = _ends([0.0, *_reach(p for p, _ in points.values())], 0.1)
    y_low, y_high = _ends([0.0, *_reach(b for _, b in points.values())], 0.1)
    frame = Frame(440, 360, 40, 14, 14, 38, max(0.0, x_low), min(1.0, x_high), y_low, y_high)
    levels = [i / 4 for i in range(-8, 5)]
    diagonals = tuple(found for level in levels if (found := _diagonal(frame, level)))
    return Scatter(frame, tuple(_dots(content, points, frame)), diagonals)


def _known(estimate: Estimate | None) -> bool:
    return estimate is not None and not math.isnan(estimate.mean)


def _reach(found: Iterable[Estimate]) -> list[float]:
    ends = [value for e in found for value in (e.low, e.mean, e.high)]
    return [value for value in ends if not math.isnan(value)]


def _ends(values: Sequence[float], step: float) -> tuple[float, float]:
    """The multiples of a step around some values, never the same one twice."""
    low, high = math.floor(min(values) / step) * step, math.ceil(max(values) / step) * step
    return round(low, 6), round(high if high > low else low + step, 6)


def _diagonal(frame: Frame, level: float) -> tuple[float, str, float] | None:
    """The part of base = penalty + level that lies in the frame, and how long it is drawn."""
    start = max(frame.x_low, frame.y_low - level)
    stop = min(frame.x_high, frame.y_high - level)
    if stop <= start:
        return None
    path = frame.path((start, stop), (start + level, stop + level))
    length = math.hypot(frame.x(stop) - frame.x(start), frame.y(stop) - frame.y(start))
    return level, path, length


def _dots(
    content: Content, points: dict[str, tuple[Estimate, Estimate]], frame: Frame
) -> Iterable[Dot]:
    """Names stand beside their dots, moved down where another name is."""
    colours = styles(content)
    taken: list[tuple[float, float, str]] = []
    for method in sorted(points, key=lambda m: -points[m][1].mean):
        penalty, base = points[method]
        x, y = frame.x(penalty.mean), frame.y(base.mean)
        anchor = "start" if x < frame.width * 0.68 else "end"
        at = y - 6
        for other_x, other_y, side in sorted(taken, key=lambda place: place[1]):
            if side == anchor and abs(other_x - x) < 90 and abs(other_y - at) < LABEL_GAP:
                at = other_y + LABEL_GAP
        taken.append((x, at, anchor))
        aside = 8 if anchor == "start" else -8
        yield Dot(method, colours[method], penalty, base, x + aside, round(at, 2), anchor)


def whiskers(content: Content) -> tuple[Frame, dict[str, Estimate]]:
    """One axis for the intervals of the standing's column in the table."""
    column = content.standing.column
    found = {method: content.summaries[method][column] for method in content.methods}
    low, high = _ends([0.0, *_reach(found.values())], 0.1)
    return Frame(128, 22, 5, 5, 0, 0, low, high), found


def loss_bars(readings: Sequence[Reading]) -> dict[str, list[tuple[str, float, float]]]:
    """For each method the parts of 1 - MSI as (part, start, width) in percent of the longest."""
    totals = (sum(_parts(reading.losses).values()) for reading in readings)
    longest = max([1.0, *(total for total in totals if not math.isnan(total))])
    found = {}
    for reading in readings:
        start, bar = 0.0, []
        for part, value in _parts(reading.losses).items():
            width = 100 * value / longest if not math.isnan(value) else 0.0
            bar.append((part, round(start, 2), round(width, 2)))
            start += width
        found[reading.method] = bar
    return found


def _parts(losses: Losses) -> dict[str, float]:
    return {
        "size": losses.size,
        "short": losses.short,
        "outside": losses.outside,
        "weaker": losses.weaker,
    }
