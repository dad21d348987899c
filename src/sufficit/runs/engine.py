"""One run, the whole chain: images in units, heatmap sources, bands, predictions, results.

Read this file first. `run` starts or resumes a run; `Worker.score` computes one unit.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sufficit.data.images import ignore_image_warnings
from sufficit.data.loader import Entry, ImageLoader, Item, Unit
from sufficit.errors import EmptyHeatmapWarning, NotFiniteError, UserError
from sufficit.explainers.explanation import DrawnMaps
from sufficit.metrics.alpha_search import alpha_curves, coarse
from sufficit.metrics.leakage import (
    POOL,
    TENSORS,
    LeakProbe,
    LeakSettings,
    Pool,
    measure_methods,
    prepare,
)
from sufficit.metrics.plan import ask
from sufficit.metrics.scores import read
from sufficit.perturbation.predictions import Predictions
from sufficit.progress import Progress, bar
from sufficit.report.content import choose
from sufficit.runs.config import Workers
from sufficit.runs.job import Job
from sufficit.runs.maps import (
    Drawn,
    MapFile,
    MapTensor,
    draw_sources,
    finish,
    is_control,
    pack,
    unpack,
)
from sufficit.runs.merge import best_alpha, write_results
from sufficit.runs.results import PARTS, RunResults
from sufficit.runs.store import DONORS, HEATMAPS, LEAK, PIXELS, SCORES, Store, store_in

if TYPE_CHECKING:
    from sufficit.runs.distributed import RayCluster

LABELS = {SCORES: "images x methods", LEAK: "measuring leakage", HEATMAPS: "explaining"}
NOT_FINITE = "the model gives NaN or infinite values for it"


def run(
    job: Job,
    out: Path | None,
    *,
    overwrite: bool = False,
    flat: bool = False,
    progress: bool | Progress | None = None,
    workers: Workers | None = None,
) -> RunResults:
    """Score every heatmap source on every image, a unit at a time, and write the results.

    Run again with the same job and folder, it computes only the units that are missing. `flat`
    writes the files of a single source into the folder itself. With `workers` Ray computes the
    units; the numbers are the same.
    """
    searching = job.config.leak and job.plan.searching  # masks are known only after the search
    with quiet(), closing(job), store_in(out) as store, cluster_of(job, workers) as cluster:
        if overwrite:
            store.clear()
        stages = (SCORES, LEAK) if searching else (SCORES,)
        store.start(run_key(job, cluster), job.entries, len(job.units), stages)
        compute(job, store, SCORES, progress, cluster=cluster)
        alpha_min = best_alpha(job, store)
        if searching:
            compute(job, store, LEAK, progress, alpha_min, cluster=cluster)
        return write_results(job, store, alpha_min, flat=flat, temporary=out is None)


def compute(
    job: Job,
    store: Store,
    stage: str,
    progress: bool | Progress | None,
    alpha_min: float | None = None,
    *,
    cluster: "RayCluster | None" = None,
    kind: "type[Worker] | None" = None,
) -> None:
    """Compute every unit of a stage that has no file yet, in this process or on a cluster."""
    done, width, kind = store.done(stage), len(job.sources), kind or Worker
    missing = [unit for unit in job.units if unit.number not in done]
    if not missing:
        return
    total = len(job.entries) * width
    before = sum(len(unit) * width for unit in job.units if unit.number in done)
    with bar(LABELS[stage], progress) as tick:

        def advance(images: int, note: str = "") -> None:
            nonlocal before
            before += images * width
            if tick:
                tick(before, total, note)

        if cluster is not None:
            cluster.compute(job, store, stage, missing, advance, alpha_min, kind)
            return
        worker = kind(job, store, alpha_min)
        for unit, items in worker.read(missing, stage):
            inside = _within(tick, before, len(unit) * width, total)
            worker.work(stage, unit, items, inside)
            advance(len(unit))


def cluster_of(job: Job, workers: Workers | None) -> "AbstractContextManager[RayCluster | None]":
    """The cluster that computes the units; None, and Ray not imported, without workers."""
    if workers is None:
        return nullcontext()
    from sufficit.runs.distributed import RayCluster

    return RayCluster(workers, job.classifier.device)


def run_key(job: Job, cluster: "RayCluster | None") -> dict[str, Any]:
    """The key of a job with the device that computes it."""
    return job.key() | ({} if cluster is None else {"device": cluster.device})


@dataclass(frozen=True)
class Sample(Item):
    """An image as the model sees it, and its maps of heatmap files."""

    maps: Mapping[str, Tensor]  # source -> [h,w]


@dataclass(frozen=True)
class Batch:
    """Images with their targets and every source's heatmaps: what a unit is scored from."""

    numbers: Sequence[int]  # which of all images these are
    names: Sequence[str]
    images: Tensor  # [N,C,H,W]
    targets: Tensor  # [N]
    drawn: Drawn

    @property
    def heatmaps(self) -> dict[str, Tensor]:
        """Source -> [N,H,W]."""
        return {name: finished for name, (_, finished) in self.drawn.items()}

    def rows(self, some: Sequence[int]) -> "Batch":
        """Some of the images."""
        rows = list(some)
        drawn = {
            name: (DrawnMaps(one.maps[rows], one.final), finished[rows])
            for name, (one, finished) in self.drawn.items()
        }
        numbers, names = [self.numbers[i] for i in rows], [self.names[i] for i in rows]
        return Batch(numbers, names, self.images[rows], self.targets[rows], drawn)


class Worker:
    """Computes units of one job; it holds the model, and the donors once they are drawn."""

    def __init__(self, job: Job, store: Store, alpha_min: float | None = None) -> None:
        self.job, self.store = job, store
        self.alpha_min = job.plan.schedules[0].alpha_min if alpha_min is None else alpha_min
        self.loader = ImageLoader(self._sample, job.config.on_error, one_size=job.config.leak)
        self._donors: Batch | None = None

    def read(self, units: Sequence[Unit], stage: str) -> Iterator[tuple[Unit, Sequence[Sample]]]:
        """Each unit with its images, the next one read ahead; leakage needs no images."""
        self.draw_donors()
        if self.needs_images(stage):
            yield from self.loader.ahead(units)
        else:
            yield from ((unit, ()) for unit in units)

    def needs_images(self, stage: str) -> bool:
        """Whether a unit of the stage is computed from its images."""
        return stage != LEAK

    def work(
        self, stage: str, unit: Unit, items: Sequence[Sample], tick: Progress | None = None
    ) -> None:
        """Compute a unit of a stage and write its files."""
        if stage == LEAK:
            self.leak(unit)
        else:
            self.score(unit, items, tick)

    def score(self, unit: Unit, items: Sequence[Sample], tick: Progress | None = None) -> None:
        """Explain and score the images of a unit, and write its files."""
        skipped = self.loader.dropped(unit)
        batch, broken = self.batch(items)
        facts: dict[str, Any] = {"names": [], "skipped": {**skipped, **broken}}
        if batch is None:
            self.store.write(SCORES, unit.number, {}, facts)
            return
        predictions = self._predicted(batch, tick)
        tensors = {
            f"{name}/{part}": getattr(found, part)
            for name, found in predictions.items()
            for part in PARTS
        }
        if self.leaks and not self.job.plan.searching:
            tensors |= self._leaked(batch)
        sampled = [i for i, number in enumerate(batch.numbers) if number in self.job.alpha_sample]
        if sampled:
            tensors |= self._alpha_curves(batch.rows(sampled), facts)
        facts |= {
            "names": batch.names,
            "numbers": batch.numbers,
            "shape": list(batch.images.shape[1:]),
            "empty": {m: int((h.amax((1, 2)) == 0).sum()) for m, h in batch.heatmaps.items()},
            "stretched": _stretched(items, batch.images),
        }
        self._keep(unit, batch, predictions)
        self.store.write(SCORES, unit.number, tensors, facts)

    def leak(self, unit: Unit) -> None:
        """Measure the leakage of a unit's masks, from the heatmaps in the store."""
        facts = self.store.facts(SCORES, unit.number)
        tensors: dict[str, Tensor] = {}
        if facts["names"] and self.leaks:
            name = f"{next(iter(self.job.sources))}/targets"
            targets = self.store.read(SCORES, unit.number, names=[name]).tensors[name]
            kept = self.store.read(HEATMAPS, unit.number)
            drawn = self._finished(kept.tensors, kept.facts["final"], facts)
            blank = torch.empty(len(targets), *facts["shape"])
            batch = Batch(facts["numbers"], facts["names"], blank, targets, drawn)
            tensors = self._leaked(batch)
        self.store.write(LEAK, unit.number, tensors, {})

    def _sample(self, entry: Entry) -> Sample:
        """An image with its maps of heatmap files; called in the loader's threads."""
        row = self._donor_rows.get(entry.number)
        if row is not None and self._donors is not None:
            image = self._donors.images[row].cpu()
        else:
            image = entry.image.read(self.job.classifier.view)
        known = {n: s for n, s in self.job.sources.items() if isinstance(s, MapFile | MapTensor)}
        return Sample(entry, image, {name: source.read(entry) for name, source in known.items()})

    def batch(self, items: Sequence[Sample]) -> tuple[Batch | None, dict[str, str]]:
        """The images with every source's heatmaps, without those the model gives NaN for."""
        broken: dict[str, str] = {}
        left = list(items)
        while left:
            images = torch.stack([item.pixels for item in left]).to(self.job.classifier.device)
            targets = self._targets(left, images)
            try:
                drawn = self._drawn(left, images, targets)
            except NotFiniteError as error:
                names = [left[i].name for i in error.images]
                if self.job.config.on_error == "stop":
                    raise UserError(
                        f"{names[0]}: {NOT_FINITE}. Try another --precision, or pass --on-error"
                        " skip."
                    ) from error
                broken |= dict.fromkeys(names, NOT_FINITE)
                left = [item for item in left if item.name not in broken]
                continue
            numbers = [item.entry.number for item in left]
            return Batch(numbers, [item.name for item in left], images, targets, drawn), broken
        return None, broken

    def _targets(self, items: Sequence[Sample], images: Tensor) -> Tensor:
        """Labels, or the model's predictions, asked once so that all sources explain the same."""
        if self.job.targets == "label":
            return torch.tensor([item.entry.label for item in items])
        with torch.no_grad():
            return self.job.classifier(images).argmax(1).cpu()

    def _drawn(self, items: Sequence[Sample], images: Tensor, targets: Tensor) -> Drawn:
        """Every source's maps; those of donors are known already."""
        rows = [self._donor_rows.get(item.entry.number) for item in items]
        old = [i for i, row in enumerate(rows) if row is not None]
        new = [i for i, row in enumerate(rows) if row is None]
        found: list[Drawn] = []
        if old and self._donors is not None:
            found.append(self._donors.rows([row for row in rows if row is not None]).drawn)
        if new:
            some = [items[i] for i in new]
            try:
                found.append(self._explained(some, images[new] if old else images, targets[new]))
            except NotFiniteError as error:  # its numbers count within `some`
                raise NotFiniteError(str(error), [new[i] for i in error.images]) from error
        if len(found) == 1:
            return found[0]
        order = torch.tensor(np.argsort([*old, *new]))
        return {
            name: (
                DrawnMaps(torch.cat([part[name][0].maps for part in found])[order], one.final),
                torch.cat([part[name][1] for part in found])[order],
            )
            for name, (one, _) in found[0].items()
        }

    def _explained(self, items: Sequence[Sample], images: Tensor, targets: Tensor) -> Drawn:
        job = self.job
        return draw_sources(
            job.classifier,
            job.sources,
            images,
            targets,
            [item.entry.number for item in items],
            {name: [item.maps[name] for item in items] for name in items[0].maps},
            seed=job.config.seed,
            layer=job.config.layer,
        )

    def _finished(
        self, maps: Mapping[str, Tensor], final: Mapping[str, bool], facts: Mapping[str, Any]
    ) -> Drawn:
        c, h, w = facts["shape"]
        given = (self.job.classifier, self.job.sources, maps, final, (c, h, w))
        return finish(*given, facts["numbers"], self.job.config.seed)

    def _predicted(self, batch: Batch, tick: Progress | None) -> dict[str, Predictions]:
        """What the model says of every source's bands, all asked in one go."""
        job, n = self.job, len(batch.targets)
        maps = torch.cat(list(batch.heatmaps.values()))
        given = (job.classifier, batch.images, maps, batch.targets, job.plan)
        fills = (job.fill, job.held_out_fill)
        found, held_out = ask(*given, *fills, job.config.batch_size, tick=tick)
        predictions: dict[str, Predictions] = {}
        for k, name in enumerate(batch.drawn):
            rows = slice(k * n, (k + 1) * n)
            predictions[name] = found.rows(rows)
            if held_out is not None:
                predictions[f"{name}/held_out"] = held_out.rows(rows)
        return predictions

    def _leaked(self, batch: Batch) -> dict[str, Tensor]:
        found = measure_methods(batch.heatmaps, batch.targets, self._probe, batch.numbers)
        return {
            f"{name}/leak/{part}": getattr(leaked, part)
            for name, leaked in found.items()
            for part in TENSORS
        }

    def _alpha_curves(self, batch: Batch, facts: dict[str, Any]) -> dict[str, Tensor]:
        """MSI of some images at every alpha_min."""
        config = self.job.config
        found = alpha_curves(
            self.job.classifier,
            batch.images,
            batch.heatmaps,
            batch.targets,
            batch.numbers,
            step=coarse(config.value_step),
            score=config.score,
            fill=self.job.fill,
            batch_size=config.batch_size,
        )
        facts |= {"alpha_images": batch.names, "alpha_calls": found.calls}
        return {f"{name}/alphas": search.msi for name, search in found.searches.items()}

    def _keep(self, unit: Unit, batch: Batch, predictions: Mapping[str, Predictions]) -> None:
        """Store the maps, and the pixels of images that may be shown."""
        self.keep_maps(unit, batch)
        if "msi" in self.job.plan.columns:
            few = len(self.job.entries) <= POOL
            rows = range(len(batch.names)) if few else sorted(self._candidates(batch, predictions))
            numbers = [batch.numbers[i] for i in rows]
            pixels = pack(batch.images[list(rows)].cpu())
            self.store.write(PIXELS, unit.number, {"pixels": pixels}, {"numbers": numbers})

    def keep_maps(self, unit: Unit, batch: Batch, facts: Mapping[str, Any] | None = None) -> None:
        """Store the maps of a unit at the size they were drawn; controls are drawn again."""
        stored = {n: one for n, (one, _) in batch.drawn.items() if not self._is_control(n)}
        known = {
            "names": batch.names,
            "numbers": batch.numbers,
            "final": {name: one.final for name, one in stored.items()},
            "shape": list(batch.images.shape[1:]),
        }
        maps = {name: one.maps for name, one in stored.items()}
        self.store.write(HEATMAPS, unit.number, maps, {**(facts or {}), **known})

    def _candidates(self, batch: Batch, predictions: Mapping[str, Predictions]) -> set[int]:
        """Rows that may be among the best, worst or most disputed of all images, or drawn."""
        values = {}
        for name in self.job.ranked:
            scores = read(predictions[name], self.job.plan)
            tried = scores.msi if scores.search is None else scores.search.msi.mean(1)
            values[name] = np.asarray(tried.numpy(), np.float64)
        seeded = self.job.shown_by_seed
        drawn = {i for i, number in enumerate(batch.numbers) if number in seeded}
        return drawn | {row for row, reason in choose(values).items() if reason != "drawn by seed"}

    def _is_control(self, name: str) -> bool:
        return is_control(name, self.job.sources[name])

    @property
    def leaks(self) -> bool:
        """Whether leakage can be measured: the donors are of two classes or more."""
        return self._donors is not None and len(self._donors.targets.unique()) > 1

    @cached_property
    def _donor_rows(self) -> dict[int, int]:
        donors = self._donors
        return {} if donors is None else {n: row for row, n in enumerate(donors.numbers)}

    def draw_donors(self) -> None:
        """Read and explain the images that leakage lays masks over; once in a run."""
        if not self.job.pool or self._donors is not None:
            return
        if not self.store.has(DONORS, 0):
            self._write_donors()
            self.__dict__.pop("_donor_rows", None)
        kept = self.store.read(DONORS, 0)
        if not kept.facts["numbers"]:
            return
        images = unpack(kept.tensors["images"]).to(self.job.classifier.device)
        facts = kept.facts
        maps = {name: kept.tensors[f"maps/{name}"] for name in facts["final"]}
        drawn = self._finished(maps, facts["final"], facts)
        given = (facts["numbers"], facts["names"], images, kept.tensors["targets"])
        self._donors = Batch(*given, drawn)
        self.__dict__.pop("_donor_rows", None)

    def _write_donors(self) -> None:
        loader, parts = ImageLoader(self._sample, self.job.config.on_error), list[Batch]()
        pool = [self.job.entries[number] for number in self.job.pool]
        for start in range(0, len(pool), self.job.unit):
            batch, _ = self.batch(loader.items(pool[start : start + self.job.unit]))
            parts += [] if batch is None else [batch]
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {
            "numbers": [number for part in parts for number in part.numbers],
            "names": [name for part in parts for name in part.names],
        }
        if parts:
            tensors["images"] = pack(torch.cat([part.images for part in parts]).cpu())
            tensors["targets"] = torch.cat([part.targets for part in parts])
            stored = [name for name in self.job.sources if not self._is_control(name)]
            for name in stored:
                maps = [part.drawn[name][0].maps for part in parts]
                tensors[f"maps/{name}"] = torch.cat(maps)
            facts["final"] = {name: parts[0].drawn[name][0].final for name in stored}
            facts["shape"] = list(parts[0].images.shape[1:])
        self.store.write(DONORS, 0, tensors, facts)

    @cached_property
    def _probe(self) -> LeakProbe:
        """The donors, and what the model says of their masks over grey and noise."""
        config, donors = self.job.config, self._donors
        assert donors is not None  # `leaks` was asked
        setting = LeakSettings(
            self.alpha_min,
            config.donors,
            config.seed,
            fill=self.job.fill,
            batch_size=config.batch_size,
        )
        setting.check(donors.images)
        heatmaps = torch.cat(list(donors.heatmaps.values()))
        pool = Pool(donors.images, heatmaps, donors.targets)
        return prepare(self.job.classifier, pool, setting)


def _stretched(items: Sequence[Sample], images: Tensor) -> list[str]:
    """Images whose map of a heatmap file has other proportions than the model's input."""
    shape = images.shape[2] / images.shape[3]
    return [
        item.name
        for item in items
        if any(not 0.9 < m.shape[0] / m.shape[1] / shape < 1.1 for m in item.maps.values())
    ]


def _within(tick: Progress | None, done: float, share: float, total: float) -> Progress | None:
    """The progress of one unit as part of the whole."""
    if tick is None:
        return None
    return lambda part, whole: tick(done + share * part / whole, total)


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings about single files and units: they are counted and reported once."""
    with ignore_image_warnings():
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        yield
