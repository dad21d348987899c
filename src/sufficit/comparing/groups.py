"""Every group of images explained by all methods at once and scored; then the leak."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sufficit.classifiers import Classifier
from sufficit.comparing.jobs import Job
from sufficit.comparing.parts import (
    Part,
    Parts,
    answers_as_tensors,
    answers_from,
    leak_as_tensors,
    leak_from,
)
from sufficit.data.images import quiet_reading
from sufficit.errors import EmptyHeatmapWarning, NotFiniteError, UserError
from sufficit.metrics.evaluate import Plan, evaluate
from sufficit.metrics.leak import POOL, Leak, measure
from sufficit.metrics.probe import Pool, Probe, Setting, draw_pool, prepare
from sufficit.progress import bar
from sufficit.reading import Item, Skipped, in_groups, within
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


def score_groups(job: Job, parts: Parts) -> None:
    """Explain and score every group that is not done yet, and keep each as a part."""
    groups = in_groups(job.pictures, job.labels, job.group)
    left = [number for number in range(len(groups)) if not parts.has(SCORES, number)]
    reader, width = job.reader(job.settings.on_error), len(job.methods)
    reader.sizes.update(_sizes(job, parts, parts.done(SCORES)))
    total = len(job.pictures) * width
    with bar("images x methods", job.progress) as tick, quiet():
        for number, items in zip(left, reader.ahead([groups[k] for k in left]), strict=True):
            done, step = number * job.group * width, len(groups[number])
            told = [within(tick, done + k * step, step, total) for k in range(width)]
            asked = {picture.name for picture, _ in groups[number]}
            skipped = {s.name: s.reason for s in reader.skipped if s.name in asked}
            _score_group(job, parts, number, items, skipped, told)
            if tick:
                tick(done + step * width, total)


def collect(job: Job, parts: Parts) -> Found:
    """All that the parts hold of the scores, in the folder's order."""
    read = [parts.read(SCORES, number) for number in range(job.groups)]
    skipped = [Skipped(*pair) for part in read for pair in part.facts["skipped"].items()]
    full = [part for part in read if part.facts["names"]]
    if not full:
        raise UserError(
            f"all {len(skipped)} images were skipped; the first, {skipped[0].name}:"
            f" {skipped[0].reason}"
        )
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


def leak_groups(job: Job, parts: Parts, found: Found, alpha_min: float) -> dict[str, Leak]:
    """The leak of every method, over donors drawn from all images; each group kept as a part."""
    probes: dict[str, Probe] = {}
    starts = [sum(found.counts[:number]) for number in range(len(found.counts))]
    full = [number for number, count in enumerate(found.counts) if count]
    with bar("measuring the leak", job.progress) as tick, quiet():
        for number in full:
            some = slice(starts[number], starts[number] + found.counts[number])
            if not parts.has(LEAK, number):
                probes = probes or _probes(job, found, alpha_min)
                tensors = _leak_group(job, found, probes, some)
                parts.write(LEAK, number, tensors, {"alpha_min": alpha_min})
            if tick:
                tick(some.stop, len(found.names))
    read = [parts.read(LEAK, number) for number in full]
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


def _probes(job: Job, found: Found, alpha_min: float) -> dict[str, Probe]:
    """For each method the pool that donors are drawn from, under its own masks."""
    setting = Setting(
        alpha_min,
        job.settings.donors,
        job.settings.seed,
        fill=job.fill,
        batch_size=job.settings.batch_size,
    )
    chosen = draw_pool(found.targets, POOL, setting.seed)
    targets = found.targets[chosen]
    images, heatmaps = draw(job, [found.names[i] for i in chosen], targets)
    pools = {method: Pool(images, maps, targets) for method, maps in heatmaps.items()}
    return {method: prepare(job.classifier, pool, setting) for method, pool in pools.items()}


def _leak_group(
    job: Job, found: Found, probes: Mapping[str, Probe], some: slice
) -> dict[str, Tensor]:
    goals = found.targets[some]
    images, heatmaps = draw(job, found.names[some], goals)
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
