"""Draw the maps of a unit; and those of the images that a probe needs before all others."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sufficit.data.batch import Batch
from sufficit.data.loader import Unit
from sufficit.errors import SkipError, UserError
from sufficit.metrics.column import Columns
from sufficit.perturbation.bands import EVERYTHING
from sufficit.perturbation.masked_model import whole_images
from sufficit.probes.probe import Donors
from sufficit.progress import Progress, bar
from sufficit.runs.job import Held, Job
from sufficit.runs.reader import skipped_for_nan
from sufficit.runs.spread import Spread
from sufficit.runs.store import HELD, Store
from sufficit.runs.unit_rows import EMPTY, RIGHT, SKIPPED, Notes, Rows
from sufficit.sources import NOT_FINITE, Maps, draw


def draw_unit(job: Job, unit: Unit, following: Unit | None = None) -> Rows:
    """Read and draw a unit: its rows before any probe looked, with the maps."""
    rows, _, _ = drawn_rows(job, unit, following)
    return rows


def drawn_rows(
    job: Job, unit: Unit, following: Unit | None
) -> tuple[Rows, Batch | None, dict[str, Tensor]]:
    """Read and draw a unit: its rows, the images that are left, and their heatmaps in full size."""
    batch, notes = job.reader.read(unit, following)
    batch, drawn = draw_usable(job, batch, notes)
    if batch is None:
        return Rows(unit.number, notes=notes), None, {}
    rows = Rows.of(unit.number, batch, notes)
    rows.maps = drawn
    heatmaps = {name: one.at(batch.size) for name, one in drawn.items()}
    rows.add(known_of(job, batch, drawn, heatmaps), range(len(batch)))
    rows.remark = job.classifier.output_remark
    return rows, batch, heatmaps


def draw_usable(
    job: Job, batch: Batch | None, notes: Notes
) -> tuple[Batch | None, dict[str, Maps]]:
    """Draw every source's maps, without images for which one cannot; these are noted."""
    while batch is not None and len(batch):
        try:
            drawn = draw_all(job, batch)
        except SkipError as error:
            reasons = {batch.names[row]: why for row, why in error.reasons.items()}
            broken = [name for name, why in reasons.items() if why == NOT_FINITE]
            skipped_for_nan(broken, job.config.on_error)  # raises if the run is to stop
            notes.setdefault(SKIPPED, {}).update(reasons)
            batch = batch.rows([k for k in range(len(batch)) if k not in error.reasons])
            continue
        for kind, names in _notes_of(batch, drawn).items():
            notes.setdefault(kind, {}).update(dict.fromkeys(names, ""))
        return batch, drawn
    return None, {}


def draw_all(job: Job, batch: Batch) -> dict[str, Maps]:
    """Draw every source's maps; those of images that are held are drawn already."""
    held = {} if job.held is None else job.held.places
    known = [row for row, number in enumerate(batch.numbers) if number in held]
    if not known:
        return draw(job.classifier, batch, job.sources)
    assert job.held is not None  # some are
    own = {n: m.rows([held[batch.numbers[k]] for k in known]) for n, m in job.held.maps.items()}
    new = [row for row in range(len(batch)) if row not in {*known}]
    if not new:
        return own
    fresh = draw(job.classifier, batch.rows(new), job.sources)
    order = sorted(range(len(batch)), key=[*known, *new].__getitem__)
    return {name: Maps.joined([own[name], fresh[name]], batch.size).rows(order) for name in fresh}


def known_of(
    job: Job, batch: Batch, drawn: dict[str, Maps], heatmaps: dict[str, Tensor]
) -> dict[str, Columns]:
    """What is known of each source's maps before any probe looks at them."""
    right = whole_images(job.classifier, batch).of([EVERYTHING], "accuracy")[:, 0]
    peaks = torch.stack([heatmaps[name].amax((1, 2)) for name in drawn])
    empty = (peaks == 0).double().cpu()  # of all sources at once: each copy waits for a GPU
    return {
        name: {RIGHT: right, EMPTY: empty[place], **one.columns}
        for place, (name, one) in enumerate(drawn.items())
    }


def holding(job: Job, store: Store, compute: Spread, progress: bool | Progress | None) -> Job:
    """The job with the images that its probes need before all others, read and explained."""
    numbers = sorted({number for probe in job.probes for number in probe.holds})
    if not numbers:
        return job
    # They are drawn now, serve as donors, and come again in their own units: decode them once.
    job.reader.kept |= dict.fromkeys(numbers)
    size = job.entries.unit
    parts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    units = [
        Unit(place, tuple(job.entries[number] for number in part))
        for place, part in enumerate(parts)
    ]
    missing = [unit for unit in units if unit.number not in store.done(HELD)]
    with bar("images drawn first", progress) as tick:
        for count, rows in enumerate(compute(job, store, partial(draw_unit, job), missing), 1):
            store.write(rows, HELD)
            if tick:
                tick(count, len(missing))
    found = replace(job, held=read_held(job, store, units))
    found.reader.kept |= job.reader.kept
    return found


def read_held(job: Job, store: Store, units: Sequence[Unit]) -> Held | None:
    """The images that are held, from their files, with their pixels."""
    kept = [store.read_maps(unit.number, HELD) for unit in units]
    targets = [store.read(unit.number, HELD).targets for unit in units]
    kept_with = [(one, own) for one, own in zip(kept, targets, strict=True) if one.names]
    if not kept_with:
        return None
    numbers = tuple(number for one, _ in kept_with for number in one.numbers)
    batch, _ = job.reader.entries([job.entries[number] for number in numbers])
    if batch is None or batch.numbers != numbers:
        raise UserError("images changed while the run reads them: start again with --overwrite")
    batch = replace(batch, targets=torch.cat([own for _, own in kept_with]))
    device = batch.images.device
    maps = {}
    for source in job.sources:
        if source.name in kept_with[0][0].maps:
            parts = [one.maps[source.name] for one, _ in kept_with]
            joined = Maps.joined(parts, batch.size)
            maps[source.name] = replace(joined, maps=joined.maps.to(device))
        else:  # a control, which is drawn again instead of stored
            maps[source.name] = source.maps(job.classifier, batch)
    at_size = {name: one.at(batch.size) for name, one in maps.items()}
    return Held(Donors(batch.for_another_model(), at_size), maps)


def _notes_of(batch: Batch, drawn: dict[str, Maps]) -> dict[str, list[str]]:
    """The images of each kind of note that sources make, by name."""
    found: dict[str, list[str]] = {}
    for one in drawn.values():
        for kind, marks in one.notes.items():
            named = [n for n, marked in zip(batch.names, marks.tolist(), strict=True) if marked]
            if named:
                found.setdefault(kind, []).extend(named)
    return found
