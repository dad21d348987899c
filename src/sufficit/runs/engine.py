"""A run: every probe on every batch. Read this file first.

`run` starts or resumes a run, `score_unit` computes one unit. Neither knows what is measured:
`probes_of.py` lists the probes.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from sufficit.data.batch import Batch
from sufficit.data.images import ignore_image_warnings
from sufficit.data.loader import Unit
from sufficit.errors import EmptyHeatmapWarning, SkipError, UserError
from sufficit.perturbation.bands import EVERYTHING
from sufficit.perturbation.masked_model import whole_images
from sufficit.probes.leak import Donors
from sufficit.probes.standard import stacked
from sufficit.progress import Progress, bar, counted
from sufficit.provenance import plain
from sufficit.runs.job import Held, Job
from sufficit.runs.probes_of import ALPHA_CURVE, alpha_probe, models_of
from sufficit.runs.reader import skipped_for_nan
from sufficit.runs.results import RunResults
from sufficit.runs.store import HELD, UNITS, Store
from sufficit.runs.table import Search, is_precise, search_in, write_results
from sufficit.runs.unit_rows import EMPTY, RIGHT, SKIPPED, Notes, Rows
from sufficit.sources import NOT_FINITE, Maps, draw

Score = Callable[[Unit, Unit | None], Rows]
"""Computes the rows of a unit; the second one is the unit that comes next."""
Spread = Callable[[Job, Store, Score, Sequence[Unit]], Iterable[Rows]]
"""Computes units anywhere, in any order."""
SEARCH = f"{UNITS}/search"  # the folder of the run that finds alpha_min
SEARCH_IMAGES = 500


def run(
    job: Job,
    out: Path | None,
    *,
    overwrite: bool = False,
    progress: bool | Progress | None = None,
    spread: "Spread | None" = None,
) -> RunResults:
    """Score every source on every image by every probe. Run again to resume.

    If the folder holds the results of this very run, return them.
    """
    compute = spread or in_this_process
    with quiet(), closing(job), Store.locked(out, overwrite=overwrite) as owned:
        key = job.key()  # once: it reads all weights, and all images in memory
        finished = _finished(job, owned, key)
        if finished is not None:
            return finished
        store = owned.start(key, job.entries)
        store.clear_failures()
        search = found_alpha(job, store.folder, compute, progress) if job.is_searching else None
        job = job if search is None else replace(job, alpha_min=search.best)
        job = holding(job, store, compute, progress)
        units = 0
        for units in job.looks:  # without --within one look, at all units
            score_missing(job, store, compute, range(units), progress)
            if job.config.within is not None and is_precise(job, store, units):
                break
        return write_results(job, store, range(units), search, temporary=out is None)


def score_unit(job: Job, unit: Unit, following: Unit | None = None) -> Rows:
    """Read, draw, ask: the rows of one unit."""
    batch, notes = job.reader.read(unit, following)
    batch, drawn = draw_usable(job, batch, notes)
    if batch is None:
        return Rows(unit.number, notes=notes)
    rows = Rows.of(unit.number, batch, notes)
    rows.maps = drawn
    heatmaps = {name: one.at(batch.size) for name, one in drawn.items()}
    every = range(len(batch))
    rows.add(known_of(job, batch, drawn, heatmaps), every)
    for probe in job.probes:
        places = batch.places(probe.images)
        if places:
            some = {name: one[places] for name, one in heatmaps.items()}
            rows.add(probe(batch.rows(places), some), places)
    for derived in job.derived:
        for source, columns in rows.values.items():
            value = derived.compute(stacked(columns, derived.of))
            rows.add({source: {derived.name: value}}, every)
    rows.remark = job.classifier.output_remark
    return rows


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
    new = [row for row in range(len(batch)) if row not in known]
    if not new:
        return own
    fresh = draw(job.classifier, batch.rows(new), job.sources)
    order = sorted(range(len(batch)), key=[*known, *new].__getitem__)
    return {name: Maps.joined([own[name], fresh[name]], batch.size).rows(order) for name in fresh}


def known_of(
    job: Job, batch: Batch, drawn: dict[str, Maps], heatmaps: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """What is known of each source's maps before any probe looks at them."""
    right = whole_images(job.classifier, batch).of([EVERYTHING], "accuracy")[:, 0]
    return {
        name: {
            RIGHT: right,
            EMPTY: (heatmaps[name].amax((1, 2)) == 0).double(),
            **one.columns,
        }
        for name, one in drawn.items()
    }


def score_missing(
    job: Job,
    store: Store,
    compute: Spread,
    units: range,
    progress: bool | Progress | None,
    *,
    title: str = "images x methods",
) -> None:
    """Score every unit that has no file yet."""
    done = store.done() & {*units}
    missing = [job.units[number] for number in units if number not in done]
    if not missing:
        return
    width = len(job.sources)
    total = job.units.images_in(units) * width
    before = job.units.images_in(done) * width
    with bar(title, progress) as tick, store.writer() as write:
        shown = UnitProgress(tick, before, total, max(1, job.calls))
        with counted(shown.passed if tick else None):
            for rows in compute(job, store, partial(score_unit, job), missing):
                write(rows)
                shown.done(job.units.images_in([rows.unit]) * width)


class UnitProgress:
    """Moves a bar by units, and within a unit by the forward passes that are done."""

    def __init__(self, tick: Progress | None, before: int, total: int, passes: int) -> None:
        self.tick, self.before, self.total = tick, before, total
        self.each = total / passes  # images x methods per forward pass, at least
        self.inside = 0.0

    def passed(self, images: int) -> None:
        """Some masked images have passed the model."""
        self.inside += images * self.each
        self._show(self.before + self.inside)

    def done(self, images: int) -> None:
        """A unit is done."""
        self.before += images
        self.inside = 0.0
        self._show(self.before)

    def _show(self, value: float) -> None:
        if self.tick:
            self.tick(min(value, self.total), self.total)


def in_this_process(job: Job, store: Store, score: Score, units: Sequence[Unit]) -> Iterator[Rows]:
    """Compute units one after the other; the next one is read meanwhile."""
    for place, unit in enumerate(units):
        following = units[place + 1] if place + 1 < len(units) else None
        yield score(unit, following)


def holding(job: Job, store: Store, compute: Spread, progress: bool | Progress | None) -> Job:
    """The job with the images that its probes need before all others, read and explained."""
    numbers = sorted({number for probe in job.probes for number in getattr(probe, "holds", ())})
    if not numbers:
        return job
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
    return replace(job, held=read_held(job, store, units))


def draw_unit(job: Job, unit: Unit, following: Unit | None = None) -> Rows:
    """Read and draw a unit, and ask nothing."""
    batch, notes = job.reader.read(unit, following)
    batch, drawn = draw_usable(job, batch, notes)
    if batch is None:
        return Rows(unit.number, notes=notes)
    rows = Rows.of(unit.number, batch, notes)
    rows.maps = drawn
    heatmaps = {name: one.at(batch.size) for name, one in drawn.items()}
    rows.add(known_of(job, batch, drawn, heatmaps), range(len(batch)))
    return rows


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


def found_alpha(
    job: Job, folder: Path, compute: Spread, progress: bool | Progress | None
) -> Search:
    """The alpha_min with the highest mean MSI, found by a first run on a sample of the images."""
    some = sorted(job.sample(SEARCH_IMAGES))
    calls = job.search_calls(len(some))
    probe = alpha_probe(job, models_of(job)[0], coarse=False, calls=calls)
    first = job.asking_only(some, probe)
    store = Store(folder / SEARCH).start(first.key(), first.entries)
    units = range(len(first.units))
    score_missing(first, store, compute, units, progress, title="searching alpha_min")
    return search_in(first, store, units, ALPHA_CURVE)


def _finished(job: Job, owned: Store, key: dict[str, object]) -> RunResults | None:
    """The results of this very run, if they are in its folder; raise for another run's."""
    record = owned.finished(key, job.entries)
    if record is None or plain(asdict(job.config)) != record["config"]:
        owned.check_free()
        return None
    try:
        found = RunResults.read(owned.folder, record)
    except UserError:  # it is not complete
        return None
    owned.remove_units()  # a kill may have left some
    return found


def _notes_of(batch: Batch, drawn: dict[str, Maps]) -> dict[str, list[str]]:
    """The images of each kind of note that sources make, by name."""
    found: dict[str, list[str]] = {}
    for one in drawn.values():
        for kind, marks in one.notes.items():
            named = [n for n, marked in zip(batch.names, marks.tolist(), strict=True) if marked]
            if named:
                found.setdefault(kind, []).extend(named)
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings about single files and units: they are counted and reported once."""
    with ignore_image_warnings(), warnings.catch_warnings():
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        yield
