"""A run: every probe on every batch. Read this file first.

`run` starts or resumes a run, `score_unit` computes one unit. Neither knows what is measured:
`probes_of.py` lists the probes.
"""

import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from sufficit.data.images import ignore_image_warnings
from sufficit.data.loader import Unit
from sufficit.errors import EmptyHeatmapWarning, UserError
from sufficit.probes.standard import stacked
from sufficit.progress import Progress
from sufficit.runs.drawing import drawn_rows, holding
from sufficit.runs.job import Job
from sufficit.runs.record import SearchRecord
from sufficit.runs.results import RunResults
from sufficit.runs.search import best_alpha, search_alpha
from sufficit.runs.spread import Spread, in_this_process, score_missing
from sufficit.runs.stopping import Stopping
from sufficit.runs.store import Store
from sufficit.runs.table import write_results
from sufficit.runs.unit_rows import Rows
from sufficit.statistics import Estimate


def run(
    job: Job,
    out: Path | None,
    *,
    overwrite: bool = False,
    progress: bool | Progress | None = None,
    spread: Spread | None = None,
) -> RunResults:
    """Score every source on every image by every probe. Run again to resume.

    If the folder holds the results of this very run, return them.
    """
    compute = spread or in_this_process
    with quiet(), closing(job), Store.locked(out, overwrite=overwrite) as owned:
        key = job.key()  # once: it reads all weights, and all images in memory
        # A finished run has no units: `start` would begin it again.
        finished = _finished(job, owned, key)
        if finished is not None:
            return finished
        store = owned.start(key, job.entries)
        search: SearchRecord | None = None
        own_best: dict[str, Estimate] = {}  # MSI of each source at the alpha_min best for it alone
        if job.is_searching:
            search, own_best = search_alpha(job, store.folder, score_unit, compute, progress)
            ranked = [search.mean_msi[name] for name in job.ranked]
            job = replace(job, alpha_min=best_alpha(search.alphas, ranked))
        # Some probes need images before all others: the leak its donors.
        job = holding(job, store, compute, progress)
        score = partial(score_unit, job)
        units = range(len(job.units))
        stopping = None if job.config.within is None else Stopping(job)
        score_missing(job, store, score, units, compute, progress, stopping=stopping)
        if stopping is not None and stopping.units is not None:
            units = range(stopping.units)
            store.remove_after(stopping.units)
        return write_results(job, store, units, search, own_best, temporary=out is None)


def score_unit(job: Job, unit: Unit, following: Unit | None = None) -> Rows:
    """Read, draw and ask: return the rows of one unit.

    `following` is read meanwhile.
    """
    rows, batch, heatmaps = drawn_rows(job, unit, following)
    if batch is None:  # no image can be scored: the file of the unit says so, and that it is done
        return rows
    for probe in job.probes:
        places = batch.places(probe.images)
        if places:
            some = heatmaps
            if len(places) < len(batch):  # a copy of all maps takes time on a GPU
                some = {name: one[places] for name, one in heatmaps.items()}
            rows.add(probe(batch.rows(places), some), places)
    # After all probes: a derived column may read those of several.
    for derived in job.derived:
        for source, columns in rows.values.items():
            if not columns.keys() >= {*derived.of}:
                continue  # of a probe that looked at no image of this unit
            value = derived.compute(stacked(columns, derived.of))
            rows.add({source: {derived.name: value}}, range(len(batch)))
    return rows


def _finished(job: Job, owned: Store, key: dict[str, object]) -> RunResults | None:
    """Return the results of this very run, if they are in its folder; raise for another run's."""
    record = owned.finished(key, job.entries)
    if record is not None and job.config.save_heatmaps <= record["config"]["save_heatmaps"]:
        try:
            found = RunResults.read(owned.folder, record)
        except UserError:  # it is not complete: a kill came while it was written
            return None
        owned.remove_units()  # a kill may have left some
        return found
    owned.check_free()
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings about single files and units: they are counted and reported once."""
    with ignore_image_warnings(), warnings.catch_warnings():
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        yield
