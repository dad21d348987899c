"""The numbers of a page: what the viewer's script reads, and the files a reader can download."""

import base64
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import pandas
from torch import Tensor

from sufficit.perturbation import bands
from sufficit.perturbation.bands import Band
from sufficit.perturbation.predictions import Predictions
from sufficit.provenance import plain
from sufficit.report.content import Content
from sufficit.report.encoding import encode_fill, encode_heatmaps

MOST_POINTS = 201  # of the slider
MOST_ROWS = 3000  # of the table of all images
VIEWS = ("kept", "hidden", "rest")


def slider_grid(content: Content) -> tuple[float, ...]:
    """The alphas of the slider: those of the curves, and every alpha_min."""
    values = content.first.schedule.values
    return stops(values, {found.alpha_min for found in content.scores.values()})


def stops(values: Sequence[float], own: Iterable[float]) -> tuple[float, ...]:
    """As many alphas of the curves as a slider needs, and every alpha_min.

    >>> stops((0.0, 0.5, 1.0), [0.4])
    (0.0, 0.4, 0.5, 1.0)
    """
    kept = values[:: -(-len(values) // MOST_POINTS)]
    return tuple(sorted({*kept, 1.0, *own}))


def viewer_data(content: Content) -> dict[str, Any]:
    """All that the script needs to show masks and what the model predicts for them."""
    grid, methods, shown = slider_grid(content), content.methods, content.shown
    maps = encode_heatmaps(shown.heatmaps, grid)
    curves = {method: curves_of(content, method, grid) for method in methods}
    msi = {method: rounded(content.scores[method]["msi"][list(shown.rows)]) for method in methods}
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
    """Per image shown, the predictions for what is kept, hidden and left at each alpha."""
    scores = content.scores[method]
    shares = shares_of(content.shown.heatmaps[method], grid)
    answers = answers_along(scores.shown, scores.alpha_min, grid)
    return [{"share": share} | found for share, found in zip(shares, answers, strict=True)]


def shares_of(heatmaps: Tensor, grid: Sequence[float]) -> list[list[float | None]]:
    """Per image, the share of its pixels above each alpha: [N,H,W] -> N."""
    counts = bands.runs(heatmaps.cpu(), [bands.show(a) for a in grid]).diff(dim=2)[:, :, 0]
    return [rounded(share) for share in counts / heatmaps[0].numel()]


def answers_along(
    predictions: Predictions, alpha_min: float, grid: Sequence[float]
) -> list[dict[str, Any]]:
    """Per image, the predictions for what is kept, hidden and left at each alpha.

    For each view there are probabilities, None where the model was not asked; hits as one text of
    1, 0 and ?; and the predicted class, where it is known and not the target.
    """
    asked: dict[str, list[Band]] = {
        "kept": [bands.show(a) for a in grid],
        "hidden": [bands.hide(alpha_min, a) for a in grid],
        "rest": [bands.rest(a) for a in grid],
    }
    found: list[dict[str, Any]] = [{} for _ in predictions.targets]
    for name, wanted in asked.items():
        places = [i for i, band in enumerate(wanted) if band in set(predictions.bands)]
        known = [wanted[i] for i in places]
        rows = zip(
            found,
            predictions.of(known, "confidence"),
            predictions.of(known, "accuracy").tolist(),
            predictions.classes_of(known).tolist(),
            strict=True,
        )
        for one, confidences, accuracies, classes in rows:
            values: list[float | None] = [None] * len(grid)
            said: list[int | None] = [None] * len(grid)
            hits = ["?"] * len(grid)
            row = zip(places, rounded(confidences), accuracies, classes, strict=True)
            for i, confidence, accuracy, predicted in row:
                values[i] = confidence
                hits[i] = "?" if math.isnan(accuracy) else str(int(accuracy))
                said[i] = predicted if accuracy == 0 and predicted >= 0 else None
            one |= {name: values, f"{name}_hits": "".join(hits), f"{name}_said": said}
    return found


def classes_in(answers: dict[str, Any]) -> set[int]:
    """The classes that the model predicts for one image and method, without the target."""
    return {n for view in VIEWS for n in answers[f"{view}_said"] if n is not None}


def rounded(values: Tensor) -> list[float | None]:
    """Four digits, None for NaN: [N] -> N."""
    return [None if math.isnan(value) else round(value, 4) for value in values.tolist()]


def script_safe(content: object) -> str:
    r"""JSON that is safe inside a script element, with any text in it.

    >>> script_safe({"name": "</script><!--"})
    '{"name":"\\u003c/script\\u003e\\u003c!--"}'
    """
    text = json.dumps(plain(content), separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def downloads(content: Content) -> list[tuple[str, str, str]]:
    """(file name, what it holds, data address) of every file that a reader can download."""
    found = [
        ("methods.csv", "every mean with its interval", methods_csv(content), "text/csv"),
        ("report.json", "means, comparisons and facts", json_text(content), "application/json"),
    ]
    if (table := images_csv(content)) is not None:
        found.append(("images.csv", "the scores of every image", table, "text/csv"))
    return [(name, what, _address(text, kind)) for name, what, text, kind in found]


def json_text(content: Content) -> str:
    """Facts, means and comparisons as JSON."""
    found = {
        "title": content.title,
        "facts": asdict(content.facts) | {"n": len(content.names)},
        "alpha_min": {name: found.alpha_min for name, found in content.scores.items()},
        "score": content.first.schedule.score,
        "methods": {
            method: {column: asdict(e) for column, e in content.summaries[method].items()}
            for method in content.methods
        },
        "standing": asdict(content.standing),
    }
    return json.dumps(plain(found), indent=2, ensure_ascii=False) + "\n"


def methods_csv(content: Content) -> str:
    """One row per method and column: mean, interval, and the number of images."""
    rows = [
        {"method": _text(method), "column": column} | asdict(estimate)
        for method in content.methods
        for column, estimate in content.summaries[method].items()
    ]
    return str(pandas.DataFrame(rows).to_csv(index=False, lineterminator="\n"))


def images_csv(content: Content) -> str | None:
    """One row per method and image with all columns; None if a page should not hold as many."""
    if len(content.names) * len(content.scores) > MOST_ROWS:
        return None
    frames = []
    for method in content.methods:
        found = content.scores[method]
        targets = [_text(content.class_name(target)) for target in found.targets.tolist()]
        values = {column: values.numpy() for column, values in found.columns.items()}
        names = [_text(name) for name in content.names]
        facts = {"method": _text(method), "image": names, "target": targets}
        frames.append(pandas.DataFrame(facts | values))
    return str(pandas.concat(frames).round(4).to_csv(index=False, lineterminator="\n"))


def _text(name: str) -> str:
    """A name with escapes for raw bytes of a file name, which are no text."""
    return name.encode("utf-8", "backslashreplace").decode()


def _address(text: str, kind: str) -> str:
    """Text as a data address for a link."""
    content = base64.b64encode(_text(text).encode()).decode()
    return f"data:{kind};charset=utf-8;base64,{content}"
