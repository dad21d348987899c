"""Find the alpha_min with the highest mean MSI, by a first run on a sample of the images."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from sufficit.data.loader import Unit
from sufficit.metrics.column import candidates_of
from sufficit.metrics.columns import HEADINGS
from sufficit.progress import Progress
from sufficit.runs.groups import groups
from sufficit.runs.job import Job
from sufficit.runs.probes_of import ALPHA_CURVE, alpha_probe, models_of
from sufficit.runs.record import SearchRecord
from sufficit.runs.spread import Spread, score_missing
from sufficit.runs.store import UNITS, Store
from sufficit.runs.unit_rows import Rows
from sufficit.statistics import Estimate, estimates_of
from sufficit.sums import Sums

PLACE = f"{UNITS}/search"  # of that run, in the folder of the run
IMAGES = 500  # of the sample, at most


def search_alpha(
    job: Job,
    folder: Path,
    score_unit: Callable[[Job, Unit, Unit | None], Rows],
    compute: Spread,
    progress: bool | Progress | None,
) -> tuple[SearchRecord, dict[str, Estimate]]:
    """Score a sample of the images at many alpha_min, in a run of its own.

    Return the mean MSI at each of them, and MSI of each source at the one that is best for it.
    """
    some = sorted(job.sample(IMAGES))
    probe = alpha_probe(job, models_of(job)[0], coarse=False, calls=job.search_calls())
    first = job.asking_only(some, probe)
    store = Store(folder / PLACE).start(first.key(), first.entries)
    units = range(len(first.units))
    score = partial(score_unit, first)
    score_missing(first, store, score, units, compute, progress, title="searching alpha_min")
    return _found(first, store, units)


def _found(job: Job, store: Store, units: range) -> tuple[SearchRecord, dict[str, Estimate]]:
    """Return what a first run found of the candidates."""
    sums: dict[str, Sums] = {}
    alphas: dict[str, float] = {}  # by candidate
    images = 0
    for group in groups(store, units):
        images += len(group.names)
        for source, columns in group.table.items():
            alphas = alphas or candidates_of(ALPHA_CURVE, columns)
            own = sums.setdefault(source, Sums([*alphas], seed=job.config.seed))
            own.add(group.numbers, {name: columns[name] for name in alphas})
    means = {source: own.means().tolist() for source, own in sums.items()}
    tried = [*alphas.values()]
    search = SearchRecord(
        alphas=tried,
        mean_msi=means,
        own_alpha_min={source: best_alpha(tried, [own]) for source, own in means.items()},
        images=images,
    )
    limits = HEADINGS["msi"].limits
    own_best = {}
    for source, own in sums.items():
        best = search.own_alpha_min[source]
        column = next(name for name, alpha in alphas.items() if alpha == best)
        own_best[source] = estimates_of(own, {column: True}, limits=lambda _: limits)[column]
    return search, own_best


def best_alpha(alphas: Sequence[float], msi: Sequence[Sequence[float]]) -> float:
    """Return the value with the highest mean over some sources, the smaller of two.

    >>> best_alpha([0.2, 0.4, 0.6], [[0.5, 0.4, 0.0], [0.0, 0.4, 0.5]])
    0.4
    """
    means = np.mean(msi, axis=0)
    return alphas[int(np.nan_to_num(means, nan=-np.inf).argmax())]
