"""Every group of images explained by all methods at once and scored; then the leak."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.comparing.jobs import Job
from sufficit.crews import Crew
from sufficit.data.images import ignore_image_warnings
from sufficit.data.loader import (
    Entry,
    Group,
    Item,
    count_soon,
    within,
)
from sufficit.errors import EmptyHeatmapWarning, NotFiniteError, UserError
from sufficit.gathering import Gathered, gather
from sufficit.keeping import Parts, leak_as_tensors, leak_from, predictions_as_tensors
from sufficit.metrics.donors import draw_pool
from sufficit.metrics.leakage import (
    POOL,
    Leak,
    LeakProbe,
    LeakSettings,
    Pool,
    measure_methods,
    prepare,
)
from sufficit.metrics.plan import ask
from sufficit.progress import Progress, bar
from sufficit.sharing import (
    LEAK,
    SCORES,
    Roll,
    begun_leak,
    begun_round,
    dealt,
    images_in,
    sizes_of,
)

HEATMAPS = "heatmaps"  # a stage that leaves parts, if they are to be kept

NO_NUMBER = "the model gives NaN or infinite values for it"
REMEDY = "Try another --precision, or go on without such images with --on-error skip"


@dataclass(frozen=True)
class _Explained:
    """Images, the class each is scored for, and every method's heatmaps of them."""

    images: Tensor  # [N,C,H,W]
    targets: Tensor  # [N]
    heatmaps: dict[str, Tensor]  # method -> [N,H,W]


@dataclass(frozen=True)
class Found(Gathered):
    """All that was scored, and what could not be."""

    empty: dict[str, int]  # method -> heatmaps that are all zeros


def score_groups(job: Job, parts: Parts, crew: Crew) -> int:
    """Explain and score every group that is not done yet, each kept as a part: how many there are.

    The first is scored as soon as its images are found.
    """
    done, passage = begun_round(parts, crew)
    reader, width = job.reader(job.settings.on_error), len(job.methods)
    reader.sizes.update(_size(parts, done))
    total, images = count_soon(job.pictures) * width if crew.first else 0, 0
    with (
        quiet(),
        bar("images x methods", crew.voice(job.progress)) as tick,
        crew.stage(SCORES, tick, images_in(parts, done) * width, total) as told,
    ):
        for group, items in reader.ahead(dealt(passage.watch(job.groups()), done, crew)):
            step = len(group) * width
            inside = within(told, images, step, total)
            _score_group(job, parts, group, items, reader.dropped(group), inside)
            images += step
            told(images, total)
        passage.check(crew)
    return passage.groups


def collect(job: Job, parts: Parts, groups: int) -> Found:
    """All that the parts hold of the scores, in the folder's order."""
    empty = dict.fromkeys(job.methods, 0)

    def count(facts: Mapping[str, Any]) -> None:
        for method in empty:
            empty[method] += facts["empty"][method]

    second, methods = job.held_out_fill is not None, list(job.methods)
    found = gather(parts, groups, job.plan, methods, held_out=second, one_size=True, each=count)
    return Found(**vars(found), empty=empty)


def leak_groups(job: Job, parts: Parts, roll: Roll, alpha_min: float, crew: Crew) -> None:
    """Measure the leak of every method, over donors drawn from all images; a part a group."""
    done = begun_leak(parts, roll, crew)
    before, facts = sum(roll.counts[number] for number in done), roll.facts(alpha_min)
    images, total = 0, len(roll.targets)
    with (
        quiet(),
        bar("measuring the leak", crew.voice(job.progress)) as tick,
        crew.stage(LEAK, tick, before, total) as told,
    ):
        probe: LeakProbe | None = None
        for group, items in job.reader().ahead(roll.left(job.groups(), done, parts, crew)):
            probe = probe or _probe(job, parts, roll, alpha_min)
            tensors = _leak_group(job, items, roll.of(group), probe, roll.starts[group.number])
            parts.write(LEAK, group.number, tensors, facts)
            images += len(group)
            told(images, total)


def collect_leak(job: Job, parts: Parts, found: Found) -> dict[str, Leak]:
    """All that the parts hold of every method's leak."""
    read = [parts.read(LEAK, number) for number, count in enumerate(found.counts) if count]
    return {method: Leak.join([leak_from(part, method) for part in read]) for method in job.methods}


def draw(job: Job, entries: Sequence[Entry], targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Some of the images that were scored, and their heatmaps: [N,C,H,W], each [N,H,W]."""
    images = job.read(entries)
    return images, {m: maps.cpu() for m, maps in _drawn(job, entries, images, targets).items()}


def _drawn(
    job: Job, entries: Sequence[Entry], images: Tensor, targets: Tensor
) -> dict[str, Tensor]:
    """Every method's heatmaps, a group's at a time, on the device: each [N,H,W]."""
    numbers, parts = [entry.number for entry in entries], []
    for start in range(0, len(entries), job.group):
        some = slice(start, start + job.group)
        parts.append(job.explain(numbers[some], images[some], targets[some]))
    return {m: torch.cat([part[m] for part in parts]) for m in job.methods}


def _score_group(
    job: Job,
    parts: Parts,
    group: Group,
    items: Sequence[Item],
    skipped: Mapping[str, str],
    tick: Progress,
) -> None:
    explained, broken = _explained(job, items)
    names = [item.name for item in items if item.name not in broken]
    facts: dict[str, Any] = {"names": names, "skipped": {**skipped, **broken}}
    facts["bytes"] = sizes_of(group)
    if explained is None:
        parts.write(SCORES, group.number, {}, facts)
        return
    tensors = _asked(job, explained, tick)
    if job.settings.save_heatmaps:
        parts.write(HEATMAPS, group.number, explained.heatmaps, {"names": names})
    empty = {m: int((maps.amax((1, 2)) == 0).sum()) for m, maps in explained.heatmaps.items()}
    facts |= {"size": list(explained.images.shape[1:]), "empty": empty}
    parts.write(SCORES, group.number, tensors, facts)


def _asked(job: Job, explained: _Explained, tick: Progress) -> dict[str, Tensor]:
    """What the model says of every method's heatmaps, by names of their own."""
    n, maps = len(explained.targets), torch.cat(list(explained.heatmaps.values()))
    given = (job.classifier, explained.images, maps, explained.targets, job.plan)
    fills = (job.fill, job.held_out_fill)
    answers, held_out = ask(*given, *fills, job.settings.batch_size, tick=tick)
    tensors: dict[str, Tensor] = {}
    for k, method in enumerate(explained.heatmaps):
        rows = slice(k * n, (k + 1) * n)
        tensors |= predictions_as_tensors(method, answers.rows(rows))
        if held_out is not None:
            tensors |= predictions_as_tensors(f"{method}/held_out", held_out.rows(rows))
    return tensors


def _explained(job: Job, items: Sequence[Item]) -> tuple[_Explained | None, dict[str, str]]:
    """The images with every method's heatmap, but for those that the model has no number for."""
    broken: dict[str, str] = {}
    left = list(items)
    while left:
        images = _stacked(job, left)
        targets = _targets(job.classifier, left, images)
        names, numbers = [item.name for item in left], [item.entry.number for item in left]
        try:
            return _Explained(images, targets, job.explain(numbers, images, targets)), broken
        except NotFiniteError as error:
            if job.settings.on_error == "stop":
                raise UserError(f"{names[error.images[0]]}: {NO_NUMBER}. {REMEDY}") from error
            broken |= {names[i]: NO_NUMBER for i in error.images}
            left = [item for item in left if item.name not in broken]
    return None, broken


def _stacked(job: Job, items: Sequence[Item]) -> Tensor:
    """A group's images on the device, where all methods ask for them: [N,C,H,W]."""
    return torch.stack([item.image for item in items]).to(job.classifier.device)


def _targets(classifier: Classifier, items: Sequence[Item], images: Tensor) -> Tensor:
    """Labels, or the model's predictions: asked once, so that all methods explain the same."""
    labels = [item.entry.label for item in items if item.entry.label is not None]
    if labels:
        return torch.tensor(labels)
    with torch.no_grad():
        return classifier(images).argmax(1).cpu()


def _size(parts: Parts, done: Collection[int]) -> dict[tuple[int, ...], str]:
    """The size of images that were scored before, with the name of one."""
    for number in sorted(done):
        if (facts := parts.facts(SCORES, number))["names"]:
            return {tuple(facts["size"]): facts["names"][0]}
    return {}


def _probe(job: Job, parts: Parts, roll: Roll, alpha_min: float) -> LeakProbe:
    """The pool that donors are drawn from, under every method's own masks."""
    setting = LeakSettings(
        alpha_min,
        job.settings.donors,
        job.settings.seed,
        fill=job.fill,
        batch_size=job.settings.batch_size,
    )
    chosen = draw_pool(roll.targets, POOL, setting.seed)
    targets, entries = roll.targets[chosen], roll.entries(chosen, job.groups(), parts)
    images = job.read(entries).to(job.classifier.device)  # they are few, and asked for again
    setting.check(images)
    heatmaps = torch.cat(list(_drawn(job, entries, images, targets).values()))
    return prepare(job.classifier, Pool(images, heatmaps, targets), setting)


def _leak_group(
    job: Job, items: Sequence[Item], goals: Tensor, probe: LeakProbe, first: int
) -> dict[str, Tensor]:
    heatmaps = _drawn(job, [item.entry for item in items], _stacked(job, items), goals)
    tensors: dict[str, Tensor] = {}
    numbers = range(first, first + len(goals))
    for method, leaked in measure_methods(heatmaps, goals, probe, numbers).items():
        tensors |= leak_as_tensors(method, leaked)
    return tensors


@contextmanager
def quiet() -> Iterator[None]:
    """No remarks about single files and groups: they are counted, and said once."""
    with ignore_image_warnings():
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        yield
