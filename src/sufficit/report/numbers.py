"""The numbers of a report: what its script reads, and what a reader may take along."""

import base64
import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from sufficit.metrics.scores import Scores
from sufficit.perturbation import bands
from sufficit.perturbation.bands import Band
from sufficit.perturbation.predictions import Predictions
from sufficit.report.content import Content
from sufficit.report.encoding import encode_fill, encode_heatmaps
from sufficit.results import as_json, plain

MOST_POINTS = 201  # of the slider
MOST_ROWS = 3000  # of the table of all images
VIEWS = ("kept", "hidden", "rest")


def slider_grid(content: Content) -> tuple[float, ...]:
    """The alphas the slider stops at: those of the curves, and every alpha_min."""
    values = content.schedule(content.methods[0]).values
    return stops(values, {found.alpha_min for found in content.scores.values()})


def stops(values: Sequence[float], own: Iterable[float]) -> tuple[float, ...]:
    """Of the alphas of curves as many as a slider needs, and every alpha_min.

    >>> stops((0.0, 0.5, 1.0), [0.4])
    (0.0, 0.4, 0.5, 1.0)
    """
    kept = values[:: -(-len(values) // MOST_POINTS)]
    return tuple(sorted({*kept, 1.0, *own}))


def viewer_data(content: Content) -> dict[str, Any]:
    """All that the script needs to show masks and what the model says of them."""
    grid, methods, shown = slider_grid(content), content.methods, content.shown
    maps = encode_heatmaps(shown.heatmaps, grid)
    curves = {method: curves_of(content, method, grid) for method in methods}
    msi = {method: rounded(content.scores[method].msi[list(shown.rows)]) for method in methods}
    targets = content.first.targets[list(shown.rows)].tolist()
    images = [
        {
            "name": content.names[row],
            "target": content.class_name(target),
            "maps": [maps[method][i] for method in methods],
            "msi": [msi[method][i] for method in methods],
            "curves": [curves[method][i] for method in methods],
        }
        for i, (row, target) in enumerate(zip(shown.rows, targets, strict=True))
    ]
    starts = [grid.index(content.scores[method].alpha_min) for method in methods]
    named = {number for found in curves.values() for one in found for number in classes_in(one)}
    return {
        "grid": [round(alpha, 4) for alpha in grid],
        "starts": starts,
        "methods": methods,
        "best": methods.index(content.standing.best),
        "classes": {number: content.class_name(number) for number in sorted(named)},
        "fill": encode_fill(shown.images, content.fill),
        "images": images,
    }


def curves_of(content: Content, method: str, grid: Sequence[float]) -> list[dict[str, Any]]:
    """For each image shown the answers to what is kept, hidden and left at each alpha."""
    scores, rows = content.scores[method], list(content.shown.rows)
    shares = shares_of(content.shown.heatmaps[method], grid)
    answers = answers_along(scores, rows, grid)
    return [{"share": share} | found for share, found in zip(shares, answers, strict=True)]


def shares_of(heatmaps: Tensor, grid: Sequence[float]) -> list[list[float | None]]:
    """For each image the share of its pixels above each alpha: [N,H,W] -> N."""
    counts = bands.runs(heatmaps.cpu(), [bands.show(a) for a in grid]).diff(dim=2)[:, :, 0]
    return [rounded(share) for share in counts / heatmaps[0].numel()]


def answers_along(scores: Scores, rows: list[int], grid: Sequence[float]) -> list[dict[str, Any]]:
    """For each row the answers to what is kept, hidden and left at each alpha."""
    start = scores.alpha_min
    asked: dict[str, list[Band]] = {
        "kept": [bands.show(a) for a in grid],
        "hidden": [bands.hide(start, a) for a in grid],
        "rest": [bands.rest(a) for a in grid],
    }
    found: list[dict[str, Any]] = [{} for _ in rows]
    for name, wanted in asked.items():
        for i, (confidence, hits, said) in enumerate(_answers(scores.answers, rows, wanted)):
            found[i] |= {name: confidence, f"{name}_hits": hits, f"{name}_said": said}
    return found


def classes_in(answers: dict[str, Any]) -> set[int]:
    """The classes that the model named for one image and method, the target left out."""
    return {n for view in VIEWS for n in answers[f"{view}_said"] if n is not None}


def _answers(
    answers: Predictions, rows: list[int], wanted: list[Band]
) -> Iterable[tuple[list[float | None], str, list[int | None]]]:
    """For each row probabilities, None where the model wasn't asked; hits, which are 1, 0 or ?; and
    the class that came first where that is known and not the target.
    """
    known = set(answers.bands)
    asked = [band for band in wanted if band in known]
    places = [i for i, band in enumerate(wanted) if band in known]
    some = answers.rows(rows)
    confidences, accuracies = some.of(asked, "confidence"), some.of(asked, "accuracy")
    for row in zip(confidences, accuracies, some.classes_of(asked), strict=True):
        values: list[float | None] = [None] * len(wanted)
        said: list[int | None] = [None] * len(wanted)
        hits = ["?"] * len(wanted)
        confidence, accuracy, named = rounded(row[0]), row[1].tolist(), row[2].tolist()
        for place, value, hit, name in zip(places, confidence, accuracy, named, strict=True):
            values[place] = value
            hits[place] = "?" if math.isnan(hit) else str(int(hit))
            said[place] = name if hit == 0 and name >= 0 else None
        yield values, "".join(hits), said


def rounded(values: Tensor) -> list[float | None]:
    """Four digits, None for NaN: [N] -> N."""
    return [None if math.isnan(value) else round(value, 4) for value in values.tolist()]


def script_safe(content: object) -> str:
    r"""JSON that can stand inside a script element whatever the text in it.

    >>> script_safe({"name": "</script><!--"})
    '{"name":"\\u003c/script\\u003e\\u003c!--"}'
    """
    text = json.dumps(plain(content), separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def everything(content: Content) -> dict[str, Any]:
    """Facts, means and comparisons, as JSON holds them."""
    summaries = {method: as_json(content.summaries[method]) for method in content.methods}
    found: dict[str, Any] = plain(
        {
            "title": content.title,
            "facts": asdict(content.facts) | {"n": len(content.names)},
            "alpha_min": {name: found.alpha_min for name, found in content.scores.items()},
            "score": content.schedule(content.methods[0]).score,
            "methods": summaries,
            "standing": asdict(content.standing),
        }
    )
    return found


def json_text(content: Content) -> str:
    """Everything as text."""
    return json.dumps(everything(content), indent=2, ensure_ascii=False) + "\n"


def methods_csv(content: Content) -> str:
    """A row a method and column: mean, interval, and how many images it is of."""
    rows: list[Sequence[object]] = [
        ("method", "column", "mean", "low", "high", "n", "n_nan", "higher_is_better")
    ]
    for method in content.methods:
        for column, e in content.summaries[method].items():
            rows.append((method, column, e.mean, e.low, e.high, e.n, e.n_nan, e.higher_is_better))
    return _csv(rows)


def images_csv(content: Content) -> str | None:
    """A row a method and image with all columns; None for more rows than a page should hold."""
    if len(content.names) * len(content.scores) > MOST_ROWS:
        return None
    columns = list(dict.fromkeys(c for found in content.scores.values() for c in found.columns))
    rows: list[Sequence[object]] = [("method", "image", "target", *columns)]
    for method in content.methods:
        found = content.scores[method]
        values = [
            rounded(found[column]) if column in found.columns else [None] * len(found)
            for column in columns
        ]
        targets = map(content.class_name, found.targets.tolist())
        rows.extend((method, *row) for row in zip(content.names, targets, *values, strict=True))
    return _csv(rows)


def address(text: str, kind: str) -> str:
    """Text as a data address that a link can hold."""
    content = base64.b64encode(text.encode("utf-8", "backslashreplace")).decode()
    return f"data:{kind};charset=utf-8;base64,{content}"


def _csv(rows: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()
