"""The images of a run that are shown: chosen at its end, read again, and drawn in figures."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sufficit import plots
from sufficit.data.batch import Batch
from sufficit.data.image_files import in_0_1
from sufficit.errors import UserError, unknown
from sufficit.explainers import EXPLAINERS
from sufficit.metrics.column import Columns
from sufficit.metrics.columns import ZERO_LINE
from sufficit.perturbation.bands import EVERYTHING, Band
from sufficit.perturbation.heatmaps import check_heatmaps
from sufficit.perturbation.predictions import ROWS, Predictions
from sufficit.probes.band import BandProbe
from sufficit.provenance import plain, typed
from sufficit.report.content import MOST_SHOWN, Choice, Shown
from sufficit.runs.config import RunConfig
from sufficit.runs.job import Job
from sufficit.runs.rows import StoredRows
from sufficit.runs.store import Store, read_tensors, save_tensors
from sufficit.runs.unit_rows import Rows
from sufficit.sources import CONTROLS, Fitted, Maps, noise
from sufficit.sources.certificate import Certificate, certificates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sufficit.runs.results import RunResults


SHOWN = "shown.safetensors"
STEP = 0.1  # of the slider, where a run asks some masks of each image only


def write_shown(
    job: Job, store: Store, choice: Choice, numbers: Sequence[int], units: Sequence[int]
) -> dict[str, str]:
    """Write the pixels, maps and answers of the images to show; return them with reasons.

    `numbers` and `units` are those of every image that was scored, in the order of the rows.
    """
    probe = job.first_probe
    if probe is None:
        return {}
    row_of = {number: row for row, number in enumerate(numbers)}
    # The images that a seed draws: some of them are shown for other reasons, so twice as many.
    some = islice((one for one in job.order.tolist() if one in row_of), 2 * MOST_SHOWN)
    chosen = choice.chosen(some)
    rows = [row_of[number] for number in chosen]
    # Read again: a run does not keep pixels, as it does not know which images it will show.
    batch, _ = job.reader.entries([job.entries[number] for number in chosen])
    if batch is None or batch.numbers != tuple(chosen):
        return {}  # an image has gone since it was scored
    places = {number: units[row] for number, row in zip(chosen, rows, strict=True)}
    kept = _stored_maps(store, places)
    if probe.keeps_answers:
        answers = _stored_answers(store, places)
    else:  # a small run of whole curves, for images that were asked a few masks
        probe = _coarse(job, probe)
        maps = heatmaps_of(kept, job.config.seed)
        ordered = {source.name: maps[source.name].to(batch.images.device) for source in job.sources}
        answers = {}
        for names, found in probe.grouped_answers(batch, ordered):
            answers |= _by_source(found, names)
    tensors = {f"maps/{name}": one.maps for name, one in kept.maps.items()}
    tensors |= {f"shares/{n}": m.shares for n, m in kept.maps.items() if m.shares is not None}
    for source, parts in answers.items():
        tensors |= {f"answers/{source}/{part}": values for part, values in parts.items()}
    # The images may be gone or changed when the report is made again.
    tensors["pixels"] = pack(batch.images.cpu())
    facts = {
        "rows": rows,
        "numbers": batch.numbers,
        "reasons": [*chosen.values()],
        "final": {name: one.final for name, one in kept.maps.items()},
        "shape": list(batch.images.shape[1:]),
        "bands": [astuple(band) for band in (EVERYTHING, *probe.bands)],
        "sizes": [astuple(band) for band in probe.sizes],
        "certificates": plain(_certificates(job, batch, kept)),
    }
    save_tensors(store.folder / SHOWN, tensors, facts)
    return dict(zip(batch.names, chosen.values(), strict=True))


def _certificates(job: Job, batch: Batch, kept: Rows) -> dict[str, list[Certificate]]:
    """Return what the model says of the regions of each fitted source."""
    return {
        source.name: certificates(
            job.classifier,
            batch,
            kept.maps[source.name].to(str(batch.images.device)),
            enough=source.enough,
        )
        for source in job.sources
        if isinstance(source, Fitted)
    }


def _coarse(job: Job, probe: BandProbe) -> BandProbe:
    """Return a probe of the curves that the viewer draws: coarse steps, all of their masks."""
    schedule = replace(job.schedule, value_step=max(STEP, job.config.value_step))
    wanted = ("msi", "insertion_pixel", "deletion_pixel")
    columns = [column for column in job.scoring.columns if column.name in wanted]
    coarse = tuple(replace(column, schedules=(schedule,)) for column in columns)
    return replace(probe, columns=coarse, most=None, curves=None)


def _by_source(found: Predictions, sources: Sequence[str]) -> dict[str, Columns]:
    """Return answers for all sources, one after the other, by source and part."""
    n = len(found.targets) // len(sources)
    return {
        source: {part: getattr(found, part)[k * n : (k + 1) * n] for part in ROWS}
        for k, source in enumerate(sources)
    }


def _stored_maps(store: Store, units: Mapping[int, int]) -> Rows:
    """Return the maps of some images, in their order; `units` has the unit of each image."""
    parts: dict[str, list[Maps]] = {}
    shape: tuple[int, ...] = ()
    for number, unit in units.items():
        found = store.read_maps(unit)
        shape = found.shape
        place = found.numbers.index(number)
        for name, one in found.maps.items():
            parts.setdefault(name, []).append(one.rows([place]))
    size = (shape[1], shape[2])
    maps = {name: Maps.joined(some, size) for name, some in parts.items()}
    return Rows(numbers=tuple(units), shape=shape, maps=maps)


def _stored_answers(store: Store, units: Mapping[int, int]) -> dict[str, Columns]:
    """Return what the model said of some images, as the run kept it."""
    parts: dict[str, dict[str, list[Tensor]]] = {}
    for number, unit in units.items():
        rows = store.read(unit, answers=True)
        place = rows.numbers.index(number)
        for source, own in rows.answers.items():
            for part, values in own.items():
                parts.setdefault(source, {}).setdefault(part, []).append(values[place])
    return {
        source: {part: torch.stack(values) for part, values in own.items()}
        for source, own in parts.items()
    }


def read_shown(
    folder: Path, config: RunConfig, methods: Sequence[str], rows: StoredRows
) -> Shown | None:
    """Return the images that a run kept to be looked at, if there are any."""
    if not (folder / SHOWN).exists():
        return None
    tensors, facts = read_tensors(folder / SHOWN)
    images = unpack(tensors["pixels"])
    if len(images) != len(facts["rows"]):
        raise ValueError(f"{SHOWN} holds {len(images)} images and {len(facts['rows'])} rows")
    maps = {
        name: Maps(tensors[f"maps/{name}"], final, shares=tensors.get(f"shares/{name}"))
        for name, final in facts["final"].items()
    }
    stored = Rows(numbers=tuple(facts["numbers"]), shape=tuple(facts["shape"]), maps=maps)
    heatmaps = heatmaps_of(stored, config.seed)
    for found in heatmaps.values():
        check_heatmaps(found, images)
    bands = tuple(Band(*values) for values in facts["bands"])
    sizes = tuple(Band(*values) for values in facts["sizes"])
    predictions = {}
    for name in methods:
        parts = {part: tensors[f"answers/{name}/{part}"] for part in ROWS}
        for part in parts.values():
            if len(part) != len(images):
                raise ValueError(f"{SHOWN} holds {len(images)} images and {len(part)} answers")
        predictions[name] = Predictions(bands=bands, weighed=sizes, **parts)
    return Shown(
        rows=tuple(facts["rows"]),
        names=rows.some(methods[0], facts["rows"], ["image"])["image"].tolist(),
        images=images,
        heatmaps={name: heatmaps[name] for name in methods},
        chosen="the best, the worst, the most disputed, and some drawn by the seed",
        reasons=tuple(facts["reasons"]),
        predictions=predictions,
        fill=config.fills[0],
        certificates={
            name: typed(list[Certificate], found)
            for name, found in facts.get("certificates", {}).items()
        },
    )


def heatmaps_of(kept: Rows, seed: int) -> dict[str, Tensor]:
    """Return every source's heatmaps at the images' size, controls drawn again: -> [N,H,W]."""
    size = (kept.shape[1], kept.shape[2])
    return {name: one.at(size) for name, one in maps_in_full(kept, seed).items()}


def maps_in_full(kept: Rows, seed: int) -> dict[str, Maps]:
    """Return what heatmap files hold: maps at the images' size, and shares of cut ones."""
    size = (kept.shape[1], kept.shape[2])
    found = {name: one.in_full(size) for name, one in kept.maps.items()}
    blank = torch.empty(len(kept.numbers), *kept.shape)
    for control in CONTROLS:
        # Noise depends on the number of an image, the other controls on its size alone.
        is_noise = control == "random"
        drawn = noise(size, seed, kept.numbers) if is_noise else EXPLAINERS[control].draw(blank)
        found[control] = Maps(drawn, final=True)
    return found


def pack(images: Tensor) -> Tensor:
    """Return images as bytes where that loses nothing, else as they are: [N,C,H,W]."""
    scaled = (images * 255).round().clamp(0, 255).to(torch.uint8)
    return scaled if torch.equal(unpack(scaled), images) else images


def unpack(pixels: Tensor) -> Tensor:
    """Return what was packed, as float in 0..1, as an image file is decoded: [N,C,H,W]."""
    return in_0_1(pixels) if pixels.dtype == torch.uint8 else pixels


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
    if show in ("alpha", "sizes") and ZERO_LINE in results.methods and ZERO_LINE not in chosen:
        chosen.append(ZERO_LINE)
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
        curve = results.record.alpha_curve
        if curve is not None:
            curve = {**curve, "mean_msi": {labels[m]: msi for m, msi in curve["mean_msi"].items()}}
        return plots.alpha_figure(scores, curve, quiet, look)
    if show == "sizes":
        return plots.sizes_figure({labels[m]: results.summaries[m] for m in chosen}, quiet, look)
    rows = rows_named(results, images, chosen) if rows is None else rows
    heads = {method: labels[method].replace(" (", "\n(") for method in chosen}
    for column in columns:
        for method in chosen:
            known = results.rows.columns(method)
            if column not in known:
                raise unknown("column in this run", column, known)
    pixels = results.images(rows, data)
    found = results.heatmaps(rows, chosen)
    captions = {heads[m]: one for m, one in _captions(results, rows, columns, found).items()}
    maps = {heads[method]: drawn for method, drawn in found.items()}
    fill = results.config.fills[0]
    under = plots.masked_images(pixels, maps, fill, results.alpha_min, kept=kept, rest=rest)
    titles = results.class_names(rows) if titles is None else titles
    return plots.sheet_figure(pixels, maps, titles, captions, under=under, look=look)


def _captions(
    results: "RunResults", rows: Sequence[int], columns: Sequence[str], maps: Mapping[str, Tensor]
) -> dict[str, list[str]]:
    """Return what is written under each map: its scores."""
    values = {method: results.rows.some(method, rows, columns) for method in maps}
    return {
        method: plots.score_captions({column: found[column].tolist() for column in columns})
        for method, found in values.items()
    }


def rows_named(results: "RunResults", words: Sequence[str], methods: Sequence[str]) -> list[int]:
    """Return rows of images, each once, by words: a name, 3 (the first ones), best:2, disputed.

    The best has the highest mean MSI of the methods, the most disputed the widest spread; those
    that are not ranked count if no other is among the methods.
    """
    found = dict.fromkeys(row for word in words for row in _rows_for(results, word, methods))
    if not found:
        raise UserError("a sheet needs at least one image: name one with --images")
    return list(found)


def _rows_for(results: "RunResults", word: str, methods: Sequence[str]) -> list[int]:
    """Return the rows that a word names."""
    rows = results.rows
    first = results.methods[0]
    alike = []  # images of that file name in some folder
    for row, name in enumerate(rows.names(first)):
        if name == word:
            return [row]
        if name.endswith(f"/{word}"):
            alike.append(row)
    if word.isdecimal():
        return list(range(min(int(word), results.n)))
    order, _, count = word.partition(":")
    if order in ORDERS and (count.isdecimal() or not count):
        counted = [method for method in methods if method not in results.unranked] or methods
        msi = np.stack([rows.column(method, "msi") for method in counted])  # [methods,N]
        whole = np.flatnonzero(~np.isnan(msi).any(axis=0))
        # The lowest comes first.
        by = {"best": -msi.mean(0), "worst": msi.mean(0), "disputed": -np.ptp(msi, axis=0)}
        ranked: list[int] = whole[np.argsort(by[order][whole], kind="stable")].tolist()
        return ranked[: int(count or 1)]
    if len(alike) == 1:
        return alike
    raise unknown(
        "image in this run", word, [*ORDERS, "a number", *islice(rows.names(first), NAMES)]
    )
