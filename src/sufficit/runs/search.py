"""Find the alpha_min with the highest mean MSI, by a first run on a sample of the images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sufficit.metrics.column import candidates_of
from sufficit.metrics.columns import HEADINGS
from sufficit.progress import Progress
from sufficit.runs.groups import groups
from sufficit.runs.job import Job
from sufficit.runs.probes_of import ALPHA_CURVE, alpha_probe, models_of
from sufficit.runs.spread import Score, Spread, score_missing
from sufficit.runs.store import UNITS, Store
from sufficit.statistics import Estimate, estimates_of
from sufficit.sums import Sums

PLACE = f"{UNITS}/search"  # of that run, in the folder of the run
IMAGES = 500  # of the sample, at most


@dataclass(frozen=True)
class Search:
    """MSI at every alpha_min that was tried, on a sample of the images."""

    alphas: tuple[float, ...]
    means: Mapping[str, tuple[float, ...]]  # by source
    own: Mapping[str, Estimate]  # MSI of a source where it is best for it alone
    ranked: Sequence[str]
    images: int

    @property
    def best(self) -> float:
        """The value with the highest mean over the ranked sources, the smaller of two."""
        means = np.mean([self.means[name] for name in self.ranked], axis=0)
        return self.alphas[int(np.nan_to_num(means, nan=-np.inf).argmax())]

    def own_best(self, source: str) -> float:
        """The value that is best for a source alone."""
        means = np.nan_to_num(np.array(self.means[source]), nan=-np.inf)
        return self.alphas[int(means.argmax())]


def search_in(job: Job, store: Store, units: range, stem: str) -> Search:
    """What a first run found of the candidates of a column."""
    sums: dict[str, Sums] = {}
    names: dict[str, float] = {}
    images = 0
    for group in groups(store, units):
        images += len(group.names)
        for source, columns in group.table.items():
            names = names or candidates_of(stem, columns)
            own = sums.setdefault(source, Sums([*names], seed=job.config.seed))
            own.add(group.numbers, {name: columns[name] for name in names})
    means = {source: tuple(own.means().tolist()) for source, own in sums.items()}
    found = Search(tuple(names.values()), means, {}, job.ranked, images)
    limits = HEADINGS["msi"].limits
    best = {}
    for source, own in sums.items():
        column = next(n for n, alpha in names.items() if alpha == found.own_best(source))
        best[source] = estimates_of(own, {column: True}, limits=lambda _: limits)[column]
    return replace(found, own=best)


def found_alpha(
    job: Job,
    folder: Path,
    score: Callable[[Job], Score],
    compute: Spread,
    progress: bool | Progress | None,
) -> Search:
    """The alpha_min with the highest mean MSI, found by a first run on a sample of the images."""
    some = sorted(job.sample(IMAGES))
    probe = alpha_probe(job, models_of(job)[0], coarse=False, calls=job.search_calls())
    first = job.asking_only(some, probe)
    store = Store(folder / PLACE).start(first.key(), first.entries)
    units = range(len(first.units))
    title = "searching alpha_min"
    score_missing(first, store, score(first), units, compute, progress, title=title)
    return search_in(first, store, units, ALPHA_CURVE)
