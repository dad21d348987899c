"""The images of a run that are shown: chosen at its end, read again, and drawn in figures."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sufficit import plots
from sufficit.errors import UserError, unknown
from sufficit.metrics.plan import ask, make_plan
from sufficit.perturbation.fills import check_fill
from sufficit.perturbation.heatmaps import check_heatmaps
from sufficit.perturbation.predictions import ROWS, Predictions
from sufficit.report.content import Choice, Shown
from sufficit.runs.config import RunConfig
from sufficit.runs.job import Job
from sufficit.runs.maps import heatmaps_from_file, unpack
from sufficit.runs.rows import StoredRows
from sufficit.runs.store import (
    HEATMAPS,
    PIXELS,
    SCORES,
    Store,
    UnitFile,
    read_tensors,
    save_tensors,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sufficit.runs.results import RunResults


SHOWN = "shown.safetensors"


def write_shown(
    job: Job, store: Store, choice: Choice, places: npt.NDArray[np.int64]
) -> dict[str, str]:
    """Write the pixels, maps and predictions of the images to show; return them with reasons.

    `places` has the number and the unit of every image that was scored, in the order of the rows.
    """
    numbers, units = places.T
    drawn = [number for number in job.shown_by_seed if number in numbers]
    parts: dict[str, list[Tensor]] = {}
    shown, facts = dict[str, str](), dict[str, Any](reasons=[], numbers=[], rows=[])
    for number, reason in choice.chosen(drawn).items():
        row = int(np.flatnonzero(numbers == number)[0])
        pixels = store.read(PIXELS, units[row])
        # A worker whose processor rounds otherwise may have kept another of two images that tie.
        if number not in pixels.facts["numbers"]:
            continue
        maps = store.read(HEATMAPS, units[row])
        wanted = [f"{name}/{part}" for name in job.sources for part in ROWS]
        scores = store.read(SCORES, units[row], names=wanted)
        place = maps.facts["numbers"].index(number)
        kept = {name: one[place] for name, one in (maps.tensors | scores.tensors).items()}
        kept["pixels"] = pixels.tensors["pixels"][pixels.facts["numbers"].index(number)]
        for name, tensor in kept.items():
            parts.setdefault(name, []).append(tensor)
        facts |= {name: maps.facts[name] for name in ("final", "controls", "shape")}
        for name, value in (("reasons", reason), ("numbers", number), ("rows", row)):
            facts[name].append(value)
        shown[maps.facts["names"][place]] = reason
    tensors = {name: torch.stack(some) for name, some in parts.items()}
    if isinstance(job.fill, Tensor):
        tensors["fill"] = job.fill
    if job.plan.sampling is not None:
        tensors |= _curves_of_shown(job, UnitFile(tensors, facts))
    save_tensors(store.folder / SHOWN, tensors, facts)
    return shown


def _curves_of_shown(job: Job, kept: UnitFile) -> dict[str, Tensor]:
    """Predictions for the whole curves of images that were asked a few masks."""
    images, device = unpack(kept.tensors["pixels"]), job.classifier.device
    maps = heatmaps_from_file(kept, job.config.seed)
    drawn = torch.cat([maps[name] for name in job.sources])
    targets = kept.tensors[f"{job.ranked[0]}/targets"]
    plan = replace(job.plan.of_bands(), calls=None)
    given = (job.classifier, images.to(device), drawn.to(device), targets, plan)
    found = ask(*given, job.fill, batch_size=job.config.batch_size)
    return {
        f"{name}/{part}": getattr(found, part)[k * len(images) : (k + 1) * len(images)]
        for k, name in enumerate(job.sources)
        for part in ROWS
    }


def read_shown(
    folder: Path, config: RunConfig, methods: Sequence[str], rows: StoredRows
) -> Shown | None:
    """The images that a run kept to be looked at, if there are any."""
    if not (folder / SHOWN).exists():
        return None
    kept = read_tensors(folder / SHOWN)
    tensors: dict[str, Any] = kept.tensors
    facts, maps = kept.facts, heatmaps_from_file(kept, config.seed)
    images, counts = unpack(tensors["pixels"]), {len(t) for n, t in tensors.items() if n != "fill"}
    if counts != {len(facts["rows"])}:
        raise ValueError(f"{SHOWN} holds {sorted(counts)} images and {len(facts['rows'])} rows")
    for found in maps.values():
        check_heatmaps(found, images)
    if "fill" in tensors:
        check_fill(tensors["fill"], images)
    plan = make_plan(**config.plan_options() | {"calls": "exact"})
    predictions = {
        name: Predictions(
            bands=plan.asks,
            weighed=plan.weighs,
            **{part: tensors[f"{name}/{part}"] for part in ROWS},
        )
        for name in methods
    }
    return Shown(
        tuple(facts["rows"]),
        rows.some(methods[0], facts["rows"], ["image"])["image"].tolist(),
        images,
        {name: maps[name] for name in methods},
        chosen="the best, the worst, the most disputed, and some drawn by the seed",
        reasons=tuple(facts["reasons"]),
        predictions=predictions,
        fill=tensors.get("fill", config.fill),
    )


KINDS = ("sheet", "curves", "alpha", "sizes")
ORDERS = ("best", "worst", "disputed")
NAMES = 1000  # of images, at most, that a message suggests


def draw(
    results: "RunResults",
    show: str = "sheet",
    methods: Sequence[str] | None = None,
    *,
    images: Sequence[str] = ("best", "disputed", "worst"),
    columns: Sequence[str] = ("msi",),
    kept: bool = False,
    rest: bool = False,
    curves: Sequence[str] | None = plots.PAPER_CURVES,
    look: plots.Look = plots.PAPER,
    data: str | Path | None = None,
    rows: Sequence[int] | None = None,
    titles: Sequence[str] | None = None,
) -> "Figure":
    """Draw a sheet of images, mean curves, MSI over alpha_min, or sizes; numbers are the run's.

    `rows` and `titles` of a sheet are those that the words `images` and the classes give.
    """
    if show not in KINDS:
        raise unknown("figure", show, KINDS)
    chosen = [m for m in results.methods if m not in results.unranked]
    chosen = chosen if methods is None else list(methods)
    for method in chosen:
        if method not in results.methods:
            raise unknown("method in this run", method, results.methods)
    if not chosen:
        raise UserError("a figure needs at least one method: name one with --methods")
    labels = results.labels()
    scores = {labels[method]: results.scores[method] for method in chosen}
    quiet = [labels[method] for method in results.unranked if method in chosen]
    if show == "curves":
        return plots.methods_figure(scores, quiet, curves, look)
    if show == "alpha":
        curve = results.record.get("alpha_curve")
        if curve is not None:
            curve = {**curve, "mean_msi": {labels[m]: msi for m, msi in curve["mean_msi"].items()}}
        return plots.alpha_figure(scores, curve, quiet, look)
    if show == "sizes":
        return plots.sizes_figure({labels[m]: results.summaries[m] for m in chosen}, quiet, look)
    rows = rows_named(results, images, chosen) if rows is None else rows
    heads = {method: labels[method].replace(" (", "\n(") for method in chosen}
    for column in columns:
        for method in chosen:
            if column not in (known := results.rows.columns(method)):
                raise unknown("column in this run", column, known)
    pixels, found = results.images(rows, data), results.heatmaps(rows, chosen)
    captions = {heads[m]: one for m, one in _captions(results, rows, columns, found).items()}
    maps = {heads[method]: drawn for method, drawn in found.items()}
    under = plots.masked_images(pixels, maps, results.fill, results.alpha_min, kept=kept, rest=rest)
    titles = results.class_names(rows) if titles is None else titles
    return plots.sheet_figure(pixels, maps, titles, captions, under=under, look=look)


def _captions(
    results: "RunResults", rows: Sequence[int], columns: Sequence[str], maps: Mapping[str, Tensor]
) -> dict[str, list[str]]:
    """What is written under each map: its scores."""
    values = {m: results.rows.some(m, rows, columns) for m in maps}
    return {
        m: plots.score_captions({c: found[c].tolist() for c in columns})
        for m, found in values.items()
    }


def rows_named(results: "RunResults", words: Sequence[str], methods: Sequence[str]) -> list[int]:
    """Rows of images, each once: by name, a number for the first ones, best:2, disputed, ...

    The best has the highest mean MSI of the methods, the most disputed the widest spread; those
    that are not ranked count if no other is among the methods.
    """
    found = dict.fromkeys(row for word in words for row in _rows_for(results, word, methods))
    if not found:
        raise UserError("a sheet needs at least one image: name one with --images")
    return list(found)


def _rows_for(results: "RunResults", word: str, methods: Sequence[str]) -> list[int]:
    rows, first = results.rows, results.methods[0]
    alike = []
    for row, name in enumerate(rows.names(first)):
        if name == word:
            return [row]
        alike += [row] if name.endswith(f"/{word}") else []
    if word.isdecimal():
        return list(range(min(int(word), results.n)))
    order, _, count = word.partition(":")
    if order in ORDERS and (count.isdecimal() or not count):
        counted = [method for method in methods if method not in results.unranked] or methods
        msi = np.stack([rows.column(method, "msi") for method in counted])
        whole = np.flatnonzero(~np.isnan(msi).any(axis=0))
        by = {"best": -msi.mean(0), "worst": msi.mean(0), "disputed": -np.ptp(msi, axis=0)}
        ranked: list[int] = whole[np.argsort(by[order][whole], kind="stable")].tolist()
        return ranked[: int(count or 1)]
    if len(alike) == 1:
        return alike
    raise unknown(
        "image in this run", word, [*ORDERS, "a number", *islice(rows.names(first), NAMES)]
    )
