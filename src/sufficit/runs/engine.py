"""One run, the whole chain: images in units, heatmap sources, bands, predictions, results.

Read this file first. `run` starts or resumes a run; `Worker.score` computes one unit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sufficit.classifier.acceleration import accelerated
from sufficit.classifier.classifier import Classifier
from sufficit.data.loader import Unit
from sufficit.errors import GoneError, UserError
from sufficit.lock import check_owned
from sufficit.metrics import leakage
from sufficit.metrics.columns import msi
from sufficit.metrics.conditions import ask_all
from sufficit.metrics.further_columns import half_sums
from sufficit.metrics.plan import msi_by_method
from sufficit.perturbation.bands import EVERYTHING
from sufficit.perturbation.predict import usual_batch
from sufficit.perturbation.predictions import NO_CLASS, Predictions
from sufficit.progress import Progress, bar
from sufficit.provenance import plain
from sufficit.report.content import Choice
from sufficit.runs.config import DONORS, Workers
from sufficit.runs.explanations import ImageWorker, MapBatch, Sample, check_contents, quiet
from sufficit.runs.job import Job
from sufficit.runs.maps import MapFile, heatmaps_from_file, pack
from sufficit.runs.merge import OF_SOME, best_alpha, is_precise, msi_tried, stem_of, write_results
from sufficit.runs.rankings import ceiling_scores
from sufficit.runs.results import RunResults
from sufficit.runs.store import HEATMAPS, LEAK, PIXELS, SCORES, StageFile, Store, store_in

if TYPE_CHECKING:
    from sufficit.runs.distributed import RayCluster

LABELS = {SCORES: "images x methods", LEAK: "measuring leakage", HEATMAPS: "explaining"}


def run(
    job: Job,
    out: Path | None,
    *,
    overwrite: bool = False,
    keep: bool = False,
    flat: bool = False,
    progress: bool | Progress | None = None,
    workers: Workers | None = None,
) -> RunResults:
    """Score every heatmap source on every image, a unit at a time, and write the results.

    Run again with the same job and folder, it computes only the units that are missing, and reads
    the results of a run that is finished. With `keep` that of another job is not replaced. `flat`
    writes the files of a single source into the folder itself. With `workers` Ray computes the
    units; the numbers are the same. With `within` in the config it stops when MSI is that precise.
    """
    searching = job.config.leak and job.plan.searching  # masks are known only after the search
    stages = (SCORES, LEAK) if searching else (SCORES,)
    with opened(job, out, overwrite, workers) as (whole, owned, cluster):
        key = whole.key()  # once: it reads all weights, and all images in memory
        if (found := _finished(whole, owned, key, stages, flat=flat, keep=keep)) is not None:
            return found
        store = start(whole, owned, key, stages)
        for size in whole.looks:  # without --within one, at all images
            part = replace(whole, part=size)
            compute(Worker(part, store), progress, cluster)
            if len(part.units) < len(whole.units) and is_precise(part, store):
                break
        tried = msi_tried(part, store, part.sources if part.plan.searching else ())
        if searching:
            compute(Worker(part, store, LEAK, best_alpha(part, tried)), progress, cluster)
        return write_results(part, store, tried, flat=flat, temporary=out is None)


@contextmanager
def opened(
    job: Job, out: Path | None, overwrite: bool, workers: Workers | None
) -> "Iterator[tuple[Job, Store, RayCluster | None]]":
    """Own the folder inside, which `overwrite` clears, and have the cluster of the workers."""
    with quiet(), closing(job), store_in(out) as owned:
        if overwrite:
            whole = owned.folder.resolve()
            for one in job.sources.values():
                if isinstance(one, MapFile) and whole in one.path.resolve().parents:
                    raise UserError(
                        f"--overwrite would delete {one.path} before it is read: move it, or choose"
                        " another --out"
                    )
            owned.clear_units()
            owned.clear_results()
        if workers is None:
            yield job, owned, None
            return
        from sufficit.runs.distributed import RayCluster  # which imports Ray

        with RayCluster(workers, job.classifier.device) as cluster:
            yield replace(job, placed=cluster.device), owned, cluster


def _finished(
    job: Job, owned: Store, key: Mapping[str, Any], stages: Sequence[str], *, flat: bool, keep: bool
) -> RunResults | None:
    """The results of the same job that are in its folder already; to `keep` others is an error."""
    record = owned.finished(key, job.entries, stages)
    same = {"flat": flat, "config": plain(asdict(job.config))}
    if record is None or any(record.get(name) != one for name, one in same.items()):
        if keep and (owned.folder / "run.json").exists():
            raise UserError(
                f"{owned.folder} holds a finished run of other settings or images: choose another"
                " --out, or --overwrite"
            )
        return None
    try:
        found = RunResults.read(owned.folder, record)
    except UserError as error:  # it is not complete
        if keep or isinstance(error, GoneError):
            raise
        return None
    owned.remove_units()  # a kill may have left some
    return found


def start(job: Job, owned: Store, key: Mapping[str, Any], stages: Sequence[str]) -> Store:
    """Start or resume the run in its folder; files that were written again must be the same."""

    def check(store: Store, changed: frozenset[int]) -> None:
        if changed or job.config.verify:
            check_contents(job, store, stages[0], None if job.config.verify else changed)

    return owned.start(key, job.entries, stages, check)


def compute(
    worker: "Worker", progress: bool | Progress | None, cluster: "RayCluster | None" = None
) -> None:
    """Compute every unit that has no file yet, by this worker or by copies of it on a cluster."""
    job, store = worker.job, worker.store
    width, numbers = len(job.sources), range(len(job.units))
    done = store.done(worker.stage) & {*numbers}
    missing = [number for number in numbers if number not in done]
    if not missing:
        return
    total = job.units.images_in(numbers) * width
    before = job.units.images_in(done) * width
    with bar(LABELS[worker.stage], progress) as tick:

        def advance(images: int, note: str = "") -> None:
            nonlocal before
            before += images * width
            check_owned(store.folder)
            if tick:
                tick(before, total, note)

        if cluster is not None:
            cluster.compute(worker, missing, advance)
            return
        with ThreadPoolExecutor(1) as pool:  # files are written while the next unit is computed
            writing = pool.submit(store.write_unit, 0, [])
            for unit, items in worker.read(job.units[number] for number in missing):
                inside = _within(tick, before, len(unit) * width, total)
                files = worker.work(unit, items, inside)
                writing.result()
                writing = pool.submit(store.write_unit, unit.number, files)
                advance(len(unit))
            writing.result()


class Worker(ImageWorker):
    """Computes units of a stage of one job; for leakage the alpha_min must be known."""

    def __init__(
        self, job: Job, store: Store, stage: str = SCORES, alpha_min: float | None = None
    ) -> None:
        super().__init__(job, store)
        self.stage = stage
        self.alpha_min = job.plan.schedules[0].alpha_min if alpha_min is None else alpha_min
        self._scorers: tuple[Classifier, Classifier | None] | None = None
        self._choices = [Choice() for _ in job.plan.schedules]  # what may be shown, of each

    def read(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, Sequence[Sample]]]:
        """Each unit with its images, the next one read ahead; leakage needs no images."""
        self.draw_donors()
        leaking = self.stage == LEAK
        yield from ((unit, ()) for unit in units) if leaking else self.loader.ahead(units)

    def work(
        self, unit: Unit, items: Sequence[Sample], tick: Progress | None = None
    ) -> list[StageFile]:
        """Compute a unit; return its files, of which the last makes it done."""
        return self.leak(unit) if self.stage == LEAK else self.score(unit, items, tick)

    def score(
        self, unit: Unit, items: Sequence[Sample], tick: Progress | None = None
    ) -> list[StageFile]:
        """Explain and score the images of a unit."""
        batch, facts = self.batch(unit, items)
        if batch is None:
            return [(SCORES, {}, facts)]
        predictions = self._predicted(batch, tick)
        named = next(iter(predictions.values())).classes_of([EVERYTHING])[:, 0].tolist()
        facts["skipped"] |= self.not_finite(
            [name for name, one in zip(batch.names, named, strict=True) if one == NO_CLASS]
        )
        good = [i for i, one in enumerate(named) if one != NO_CLASS]
        if not good:
            return [(SCORES, {}, facts)]
        if len(good) < len(named):  # sources that ask the model nothing did not notice
            batch = batch.rows(good)
            predictions = {name: found.rows(good) for name, found in predictions.items()}
        tensors = {
            f"{name}/{part}": getattr(found, part)
            for name, found in predictions.items()
            for part in found.parts
        }
        if not self.job.plan.searching:
            tensors |= self._leaked(batch.heatmaps, batch.targets, batch.numbers)
        job, plan = self.job, self.job.plan
        for kind, numbers in job.samples.items():
            some = [i for i, number in enumerate(batch.numbers) if number in numbers]
            if some:
                part = batch.rows(some)
                found, calls = self._sampled(kind, part)
                facts |= {f"{kind}_images": part.names, f"{kind}_calls": calls}
                tensors |= {f"{name}{OF_SOME[kind]}": values for name, values in found.items()}
        by_rank = job.sources if plan.ranks else ()  # whose best shares need these sums
        facts |= {
            "names": batch.names,
            "numbers": batch.numbers,
            "shape": list(batch.images.shape[1:]),
            "empty": batch.empty,
            "rank": {n: half_sums(predictions[n], plan.schedules[0]).tolist() for n in by_rank},
            "stretched": _stretched(items, batch.images),
            "bad_truths": {item.name: item.problem for item in items if item.problem},
            "output": self.job.classifier.output_remark,
        }
        shown = [self._pixels(batch, predictions)] if "msi" in plan.columns else []
        return [batch.as_file(job.sources), *shown, (SCORES, tensors, facts)]

    def leak(self, unit: Unit) -> list[StageFile]:
        """Measure the leakage of a unit's masks, from the heatmaps in the store."""
        facts = self.store.facts(SCORES, unit.number)
        tensors: dict[str, Tensor] = {}
        if facts["names"]:
            name = f"{next(iter(self.job.sources))}/targets"
            targets = self.store.read(SCORES, unit.number, names=[name]).tensors[name]
            kept, device = self.store.read(HEATMAPS, unit.number), self.job.classifier.device
            maps = heatmaps_from_file(kept, self.job.config.seed, device)
            ordered = {name: maps[name] for name in self.job.sources}  # as those of the donors
            tensors = self._leaked(ordered, targets, facts["numbers"])
        return [(LEAK, tensors, {})]

    def _predicted(self, batch: MapBatch, tick: Progress | None) -> dict[str, Predictions]:
        """What is said of every source's bands, all asked in one go under each condition."""
        job, n = self.job, len(batch.targets)
        maps = torch.cat(list(batch.heatmaps.values()))
        given = (batch.images, maps, batch.targets, job.plan, job.conditions)
        size, models = job.config.batch_size, self.scorers(batch.images)
        how: Any = {"names": batch.names, "tick": tick, "truth": batch.truth}
        found = ask_all(models, *given, size, **how)
        return {
            stem_of(name, key): one.rows(slice(k * n, (k + 1) * n))
            for key, one in found.items()
            for k, name in enumerate(batch.maps)
        }

    def _leaked(
        self, heatmaps: Mapping[str, Tensor], targets: Tensor, numbers: Sequence[int]
    ) -> dict[str, Tensor]:
        """What is stored of the leakage; nothing where it cannot be measured."""
        if self._probe is None:
            return {}
        n, maps = len(targets), torch.cat(list(heatmaps.values()))
        found = self._probe.measure(maps, targets, numbers)
        return {
            f"{name}/leak/{part}": getattr(found, part)[k * n : (k + 1) * n]
            for k, name in enumerate(heatmaps)
            for part in leakage.TENSORS
        }

    def _sampled(self, kind: str, batch: MapBatch) -> tuple[dict[str, Tensor], int]:
        """MSI at every alpha_min, or with a held-out fill and of searched boxes; the calls."""
        job, model = self.job, self.scorers(batch.images)[0]
        if kind == "ceiling":
            return ceiling_scores(job, model, batch, self.alpha_min)
        given = (model, batch.images, batch.heatmaps, batch.targets, job.curve_plan)
        return msi_by_method(*given, fill=job.fill, batch_size=job.config.batch_size)

    def _pixels(self, batch: MapBatch, predictions: Mapping[str, Predictions]) -> StageFile:
        """The images that are drawn, or among the best, worst or most disputed so far.

        An image that is among those of all images is also among those that came before it, at
        whatever alpha_min.
        """
        job, numbers, kept = self.job, batch.numbers, {*self.job.shown_by_seed}
        for schedule, choice in zip(job.plan.schedules, self._choices, strict=True):
            values = {name: msi(predictions[name], schedule).numpy() for name in job.ranked}
            kept |= choice.add(numbers, values)
        rows = [row for row, number in enumerate(numbers) if number in kept]
        pixels = {"pixels": pack(batch.images[rows])}
        return PIXELS, pixels, {"numbers": [numbers[row] for row in rows]}

    @cached_property
    def _probe(self) -> leakage.LeakProbe | None:
        """The donors, and what the model says of their masks over grey and noise.

        None where leakage cannot be measured, because there are not two classes among them.
        """
        config, donors = self.job.config, self.donors
        if donors is None or len(donors.targets.unique()) < 2:
            return None
        heatmaps = torch.cat(list(donors.heatmaps.values()))
        pool = leakage.Pool(donors.images, heatmaps, donors.targets)
        how: Any = {"fill": self.job.fill, "batch_size": config.batch_size, "pool": pool}
        model, count = self.scorers(donors.images)[0], config.donors or DONORS
        probe = leakage.LeakProbe(model, self.alpha_min, count, config.seed, **how)
        probe.check(donors.images)
        return probe

    def scorers(self, images: Tensor) -> tuple[Classifier, Classifier | None]:
        """What answers for masked images: model and twin, as compiled copies where that pays."""
        if self._scorers is None:
            job, shape = self.job, images.shape[1:]

            def fast(model: Classifier) -> Classifier:
                size = job.config.batch_size or usual_batch(model, shape)
                return accelerated(model, (size, *shape)) if job.compiles else model

            self._scorers = fast(job.classifier), job.twin and fast(job.twin)
        return self._scorers


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
