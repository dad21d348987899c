"""Every group of images explained by all methods at once and scored; then the leak."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sufficit.classifiers import Classifier
from sufficit.comparing.jobs import Job
from sufficit.crews import Crew
from sufficit.data.images import quiet_reading
from sufficit.errors import EmptyHeatmapWarning, NotFiniteError, UserError
from sufficit.keeping import (
    Part,
    Parts,
    answers_as_tensors,
    answers_from,
    leak_as_tensors,
    leak_from,
)
from sufficit.metrics.evaluate import Plan, evaluate
from sufficit.metrics.leak import POOL, Leak, measure
from sufficit.metrics.probe import Pool, Probe, Setting, draw_pool, prepare
from sufficit.progress import bar
from sufficit.reading import Groups, Item, Skipped, check_any, check_sizes, within
from sufficit.types import Answers, Progress

SCORES, LEAK, HEATMAPS = "scores", "leak", "heatmaps"  # the stages that leave parts


NO_NUMBER = "the model gives NaN or infinite values for it"
REMEDY = "Try another --precision, or go on without such images with --on-error skip"


@dataclass(frozen=True)
class _Group:
    """Images, the class each is scored for, and every method's heatmaps of them."""

    images: Tensor  # [N,C,H,W]
    targets: Tensor  # [N]
    heatmaps: dict[str, Tensor]  # method -> [N,H,W]


@dataclass(frozen=True)
class Roll:
    """The images that were scored: all that the leak must know of them."""

    names: tuple[str, ...]
    targets: Tensor  # [N] the class each was scored for
    counts: tuple[int, ...]  # how many there are of each group


@dataclass(frozen=True)
class Found:
    """All that was scored, and what could not be."""

    names: tuple[str, ...]
    answers: dict[str, Answers]
    held_out: dict[str, Answers]
    skipped: tuple[Skipped, ...]
    empty: dict[str, int]  # method -> heatmaps that are all zeros
    counts: tuple[int, ...]  # images scored of each group

    @property
    def targets(self) -> Tensor:
        """The class each image was scored for: [N]."""
        return next(iter(self.answers.values())).targets


def score_groups(job: Job, parts: Parts, crew: Crew) -> None:
    """Explain and score every group that is not done yet, and keep each as a part."""
    groups, width = Groups(job.pictures, job.labels, job.group), len(job.methods)
    earlier = parts.done(SCORES) if crew.first else []
    reader = job.reader(job.settings.on_error)
    reader.sizes.update(_sizes(job, parts, earlier))
    left = crew.mine(SCORES, sorted({*range(len(groups))} - {*earlier}))
    before = sum(len(groups[number]) for number in earlier) * width
    total, done = len(job.pictures) * width, 0
    with (
        quiet(),
        bar("images x methods", crew.voice(job.progress)) as tick,
        crew.stage(SCORES, tick, before, total) as told,
    ):
        for number, items in zip(left, reader.ahead(groups[k] for k in left), strict=True):
            step = len(groups[number])
            steps = [within(told, done + k * step, step, total) for k in range(width)]
            _score_group(job, parts, number, items, reader.dropped(groups[number]), steps)
            done += step * width
            told(done, total)


def collect(job: Job, parts: Parts) -> Found:
    """All that the parts hold of the scores, in the folder's order."""
    read = [parts.read(SCORES, number) for number in range(job.groups)]
    skipped = [Skipped(*pair) for part in read for pair in part.facts["skipped"].items()]
    full = [part for part in read if part.facts["names"]]
    check_any(len(full), skipped)
    check_sizes({tuple(part.facts["size"]): part.facts["names"][0] for part in reversed(full)})
    second = job.methods if job.held_out_fill is not None else ()
    return Found(
        names=tuple(name for part in full for name in part.facts["names"]),
        answers={m: _joined(full, m, job.plan, held_out=False) for m in job.methods},
        held_out={m: _joined(full, m, job.plan, held_out=True) for m in second},
        skipped=tuple(skipped),
        empty={m: sum(part.facts["empty"][m] for part in full) for m in job.methods},
        counts=tuple(len(part.facts["names"]) for part in read),
    )


def _joined(parts: Sequence[Part], method: str, plan: Plan, *, held_out: bool) -> Answers:
    return Answers.join([answers_from(part, method, plan, held_out=held_out) for part in parts])


def told_roll(found: Found | None, alpha_min: float, crew: Crew) -> tuple[Roll, float]:
    """The images that were scored, and alpha_min, in every process; the first one knows them."""
    known = [] if found is None else [found.names, found.targets.tolist(), found.counts]
    names, targets, counts, alpha = crew.tell("roll", [*known, alpha_min])
    return Roll(tuple(names), torch.tensor(targets), tuple(counts)), alpha


def leak_groups(job: Job, parts: Parts, roll: Roll, alpha_min: float, crew: Crew) -> None:
    """Measure the leak of every method, over donors drawn from all images; a part a group."""
    starts = [0, *accumulate(roll.counts)]
    full = [number for number, count in enumerate(roll.counts) if count]
    earlier = {*parts.done(LEAK)} if crew.first else set()
    left = crew.mine(LEAK, [number for number in full if number not in earlier])
    before = sum(roll.counts[number] for number in earlier)
    done, total = 0, len(roll.names)
    with (
        quiet(),
        bar("measuring the leak", crew.voice(job.progress)) as tick,
        crew.stage(LEAK, tick, before, total) as told,
    ):
        probes = _probes(job, roll, alpha_min) if left else {}
        for number in left:
            tensors = _leak_group(job, roll, probes, slice(starts[number], starts[number + 1]))
            parts.write(LEAK, number, tensors, {"alpha_min": alpha_min})
            done += roll.counts[number]
            told(done, total)


def collect_leak(job: Job, parts: Parts, found: Found) -> dict[str, Leak]:
    """All that the parts hold of every method's leak."""
    read = [parts.read(LEAK, number) for number, count in enumerate(found.counts) if count]
    return {method: Leak.join([leak_from(part, method) for part in read]) for method in job.methods}


def draw(job: Job, names: Sequence[str], targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Some of the images that were scored, and their heatmaps: [N,C,H,W], each [N,H,W]."""
    parts = []
    images = job.read(names)
    for start in range(0, len(names), job.group):
        some = slice(start, start + job.group)
        parts.append(job.explain(names[some], images[some], targets[some]))
    return images, {m: torch.cat([part[m].cpu() for part in parts]) for m in job.methods}


def _score_group(
    job: Job,
    parts: Parts,
    number: int,
    items: Sequence[Item],
    skipped: Mapping[str, str],
    told: Sequence[Progress | bool],
) -> None:
    group, broken = _explained(job, items)
    names = [item.picture.name for item in items if item.picture.name not in broken]
    facts: dict[str, Any] = {"names": names, "skipped": {**skipped, **broken}}
    facts["bytes"] = {name: job.bytes_of(name) for name in [*names, *facts["skipped"]]}
    if group is None:
        parts.write(SCORES, number, {}, facts)
        return
    tensors: dict[str, Tensor] = {}
    for (method, maps), tell in zip(group.heatmaps.items(), told, strict=True):
        scores = evaluate(
            job.classifier,
            group.images,
            maps,
            group.targets,
            fill=job.fill,
            held_out_fill=job.held_out_fill,
            batch_size=job.settings.batch_size,
            progress=tell,
            **job.scoring,
        )
        tensors |= answers_as_tensors(method, scores.answers)
        if scores.held_out is not None:
            tensors |= answers_as_tensors(f"{method}/held_out", scores.held_out)
    if job.settings.save_heatmaps:
        parts.write(HEATMAPS, number, group.heatmaps, {"names": names})
    empty = {m: int((maps.amax((1, 2)) == 0).sum()) for m, maps in group.heatmaps.items()}
    facts |= {"size": list(group.images.shape[1:]), "empty": empty}
    parts.write(SCORES, number, tensors, facts)


def _explained(job: Job, items: Sequence[Item]) -> tuple[_Group | None, dict[str, str]]:
    """The images with every method's heatmap, but for those that the model has no number for."""
    broken: dict[str, str] = {}
    left = list(items)
    while left:
        images = torch.stack([item.image for item in left])
        targets = _targets(job.classifier, left, images)
        names = [item.picture.name for item in left]
        try:
            return _Group(images, targets, job.explain(names, images, targets)), broken
        except NotFiniteError as error:
            if job.settings.on_error == "stop":
                raise UserError(f"{names[error.images[0]]}: {NO_NUMBER}. {REMEDY}") from error
            broken |= {names[i]: NO_NUMBER for i in error.images}
            left = [item for item in left if item.picture.name not in broken]
    return None, broken


def _targets(classifier: Classifier, items: Sequence[Item], images: Tensor) -> Tensor:
    """Labels, or the model's predictions: asked once, so that all methods explain the same."""
    labels = [item.label for item in items if item.label is not None]
    if labels:
        return torch.tensor(labels)
    with torch.no_grad():
        return classifier(images).argmax(1).cpu()


def _sizes(job: Job, parts: Parts, done: Iterable[int]) -> dict[tuple[int, ...], str]:
    """The sizes of images that were scored before, with the name of one of each.

    Raise where such an image is no longer the same file.
    """
    found = {}
    for number in done:
        facts = parts.read(SCORES, number).facts
        for name, size in facts["bytes"].items():
            if job.bytes_of(name) != size:
                raise UserError(
                    f"{name} is no longer the file that was scored when this run was begun:"
                    " choose another --out, or --overwrite it"
                )
        if facts["names"]:
            found[tuple(facts["size"])] = facts["names"][0]
    return found


def _probes(job: Job, roll: Roll, alpha_min: float) -> dict[str, Probe]:
    """For each method the pool that donors are drawn from, under its own masks."""
    setting = Setting(
        alpha_min,
        job.settings.donors,
        job.settings.seed,
        fill=job.fill,
        batch_size=job.settings.batch_size,
    )
    chosen = draw_pool(roll.targets, POOL, setting.seed)
    targets = roll.targets[chosen]
    images, heatmaps = draw(job, [roll.names[i] for i in chosen], targets)
    pools = {method: Pool(images, maps, targets) for method, maps in heatmaps.items()}
    return {method: prepare(job.classifier, pool, setting) for method, pool in pools.items()}


def _leak_group(
    job: Job, roll: Roll, probes: Mapping[str, Probe], some: slice
) -> dict[str, Tensor]:
    goals = roll.targets[some]
    images, heatmaps = draw(job, roll.names[some], goals)
    tensors: dict[str, Tensor] = {}
    for method, probe in probes.items():
        maps = heatmaps[method]
        leaked = measure(
            job.classifier, images, maps, goals, probe.setting, probe, first=some.start
        )
        tensors |= leak_as_tensors(method, leaked)
    return tensors


@contextmanager
def quiet() -> Iterator[None]:
    """No remarks about single files and groups: they are counted, and said once."""
    with quiet_reading():
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        yield
