"""Score a folder of images and a file of heatmaps: the whole chain."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.classifier.fingerprint import fingerprint
from sufficit.crews import Crew
from sufficit.data.finding import ImageSource, open_images
from sufficit.data.heatmap_files import HeatmapFile
from sufficit.data.images import ignore_image_warnings
from sufficit.data.loader import (
    GROUP,
    Group,
    ImageLoader,
    Labels,
    count_soon,
    grouped,
    labels_for,
    within,
)
from sufficit.errors import UserError
from sufficit.gathering import gather
from sufficit.keeping import (
    FOLDER,
    Parts,
    begin,
    clear,
    leak_as_tensors,
    leak_from,
    place_for,
    predictions_as_tensors,
)
from sufficit.metrics.donors import draw_pool
from sufficit.metrics.leakage import (
    POOL,
    Leak,
    LeakProbe,
    LeakSettings,
    Pool,
    check_classes,
    leak_warning,
    measure,
    prepare,
)
from sufficit.metrics.plan import Plan, ask, check_asking, make_plan
from sufficit.metrics.scores import read as read_scores
from sufficit.metrics.scores import with_leak
from sufficit.pairing import Pair, Pairs, check_any_pair, warn_of_stretched
from sufficit.progress import Progress, bar
from sufficit.results import summarise
from sufficit.scored import FILES, FolderScores, Options, as_plain
from sufficit.sharing import (
    LEAK,
    SCORES,
    Roll,
    begun_leak,
    begun_round,
    dealt,
    images_in,
    sizes_of,
    told_roll,
)

OWN = "heatmaps"  # what the parts call them


@dataclass(frozen=True)
class _Job:
    """What is to be scored, and how."""

    classifier: Classifier
    pictures: ImageSource
    labels: Labels
    pairs: Pairs
    options: Options

    @cached_property
    def plan(self) -> Plan:
        return make_plan(**self.options.scoring())

    def groups(self) -> Iterator[Group]:
        """All images in groups, from the first on, as they are found.

        The heatmaps' keys are looked at in every process, so that all refuse what fits two images.
        """
        for group in grouped(self.pictures, self.labels, GROUP):
            for name in group.names:
                self.pairs.maps.key(name)
            yield group

    def reader(self, on_error: Literal["skip", "stop"]) -> ImageLoader[Pair]:
        # The leak lays masks over images of other groups.
        return ImageLoader(self.pairs.read, on_error, one_size=bool(self.options.leak_donors))

    def identity(self) -> dict[str, Any]:
        """All that must be the same for a run to go on where it was stopped."""
        maps = self.pairs.maps
        return as_plain(self.options) | {
            "heatmaps": f"{maps.path.name}, {maps.digest()}",
            "device": str(self.classifier.device),
            "precision": str(self.classifier.dtype),
            "first image": next(iter(self.pictures)).name,  # the others when they are met
            "model's fingerprint": asdict(fingerprint(self.classifier)),
            "model's view": self.classifier.view and asdict(self.classifier.view),
            "images a group": GROUP,
            "torch": version("torch"),
        }


def score_folder(
    classifier: Classifier,
    data: Path,
    heatmaps: Path,
    options: Options | None = None,
    *,
    out: Path | None = None,
    crew: Crew | None = None,
    overwrite: bool = False,
) -> FolderScores | None:
    """Score every image below a folder that has a heatmap in the file.

    What is done is kept in parts below `out`, if it is given: begun again, a run goes on where it
    was stopped; `overwrite` removes an earlier one, once nothing is wrong with this one. Of a crew
    of several processes only the first has an outcome.
    """
    options, crew = options or Options(), crew or Crew()
    plan = make_plan(**options.scoring())  # what is wrong is said before anything is read
    check_asking(plan, options.fill, options.held_out_fill, options.batch_size)
    for fill in (options.fill, options.held_out_fill):
        if isinstance(fill, Tensor) and fill.ndim > 3:
            raise UserError("a fill for a folder is one for all images: a number, [C] or [C,H,W]")
    if out is None and crew.size > 1:
        raise UserError("several processes meet in the folder of results: give out")
    pictures = open_images(data)
    with (
        HeatmapFile(heatmaps) as maps,
        place_for(out, alone=crew.size == 1) as place,
        ignore_image_warnings(),
    ):
        check_any_pair(maps, pictures)
        pairs = Pairs(classifier.view, maps, options.normalize)
        labels = labels_for(classifier, pictures, options.targets)
        if options.leak_donors and labels.known:
            check_classes(torch.tensor(labels.known), torch.tensor(labels.known))
        job = _Job(classifier, pictures, labels, pairs, options)
        same = job.identity()
        if overwrite and crew.first:
            clear(place, FILES)
        parts = begin(place, same) if crew.first else Parts(place / FOLDER)
        with crew.meet(parts.folder):
            crew.check_alike(same)
            groups = _score_groups(job, parts, crew)
            if not crew.first:
                if crew.tell("leak", None):
                    _leak_groups(job, parts, *told_roll(None, 0, crew), crew)
                return None
            result = _with_leak(job, parts, *_collected(job, parts, groups), crew)
    _remark(result, options)
    return result


def _score_groups(job: _Job, parts: Parts, crew: Crew) -> int:
    """Score every group that is not done yet, each kept as a part: how many there are.

    The first is scored as soon as its images are found.
    """
    (done, passage), reader = begun_round(parts, crew), job.reader(job.options.on_error)
    total, images = count_soon(job.pictures) if crew.first else 0, 0
    with (
        bar("scoring images", crew.voice(job.options.progress)) as tick,
        crew.stage(SCORES, tick, images_in(parts, done), total) as told,
    ):
        for group, items in reader.ahead(dealt(passage.watch(job.groups()), done, crew)):
            tensors, facts = _scored(job, items, within(told, images, len(group), total))
            facts |= {"skipped": reader.dropped(group), "bytes": sizes_of(group)}
            parts.write(SCORES, group.number, tensors, facts)
            images += len(group)
            told(images, total)
        passage.check(crew)
    return passage.groups


def _scored(
    job: _Job, items: Sequence[Pair], tick: Progress
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What the model says of a group, and of which images."""
    names = [item.name for item in items]
    if not items:
        return {}, {"names": names}
    labelled, options = job.labels.kind == "label", job.options
    targets = torch.tensor([item.entry.label for item in items]) if labelled else None
    given = (job.classifier, *_stacked(items), targets, job.plan)
    fills = (options.fill, options.held_out_fill)
    answers, held_out = ask(*given, *fills, options.batch_size, tick=tick)
    tensors = predictions_as_tensors(OWN, answers)
    if held_out is not None:
        tensors |= predictions_as_tensors(f"{OWN}/held_out", held_out)
    askew = [name for name in names if name in job.pairs.askew]
    job.pairs.askew.difference_update(names)
    return tensors, {"names": names, "askew": askew, "size": list(items[0].image.shape)}


def _collected(job: _Job, parts: Parts, groups: int) -> tuple[FolderScores, Roll]:
    """All that the parts hold of the scores, in the folder's order."""
    askew, options = list[str](), job.options
    found = gather(
        parts,
        groups,
        job.plan,
        [OWN],
        held_out=options.held_out_fill is not None,
        one_size=bool(options.leak_donors),
        each=lambda facts: askew.extend(facts["askew"]),
    )
    warn_of_stretched(askew)
    scores = read_scores(found.answers[OWN], job.plan, found.held_out.get(OWN))
    return FolderScores(scores, found.names, {}, found.skipped, job.labels.kind), found.roll


def _with_leak(
    job: _Job, parts: Parts, found: FolderScores, roll: Roll, crew: Crew
) -> FolderScores:
    """What was found with its summary, and with the leak if it is wanted and can be measured."""
    scores = found.scores
    wanted = bool(job.options.leak_donors) and len(scores.targets.unique()) > 1
    if crew.tell("leak", wanted):
        _leak_groups(job, parts, *told_roll(roll, scores.alpha_min, crew), crew)
        numbers = (number for number, count in enumerate(roll.counts) if count)
        leaked = Leak.join([leak_from(parts.read(LEAK, number), OWN) for number in numbers])
        scores = with_leak(scores, leaked)
    summary = summarise(scores, seed=job.options.seed)
    return replace(found, scores=scores, summary=summary)


def _leak_groups(job: _Job, parts: Parts, roll: Roll, alpha_min: float, crew: Crew) -> None:
    """Measure the leak, for which the images are read once more; a part a group.

    Only now alpha_min and the target of every image are known.
    """
    done, facts = begun_leak(parts, roll, crew), roll.facts(alpha_min)
    before, images, total = sum(roll.counts[number] for number in done), 0, len(roll.targets)
    with (
        bar("measuring the leak", crew.voice(job.options.progress)) as tick,
        crew.stage(LEAK, tick, before, total) as told,
    ):
        probe, reader = None, job.reader("stop")
        for group, items in reader.ahead(roll.left(job.groups(), done, parts, crew)):
            probe = probe or _probe(job, parts, roll, alpha_min)
            given, first = (*_stacked(items), roll.of(group)), roll.starts[group.number]
            numbers = range(first, first + len(items))
            found = measure(job.classifier, *given, probe.settings, probe, numbers=numbers)
            parts.write(LEAK, group.number, leak_as_tensors(OWN, found), facts)
            images += len(group)
            told(images, total)


def _probe(job: _Job, parts: Parts, roll: Roll, alpha_min: float) -> LeakProbe:
    """The pool that donors are drawn from, up to POOL of the images, under their own masks."""
    options = job.options
    setting = LeakSettings(
        alpha_min,
        options.leak_donors,
        options.seed,
        fill=options.fill,
        batch_size=options.batch_size,
    )
    chosen = draw_pool(roll.targets, POOL, options.seed)
    entries, device = roll.entries(chosen, job.groups(), parts), job.classifier.device
    images, maps = (part.to(device) for part in _stacked(job.reader("stop").items(entries)))
    return prepare(job.classifier, Pool(images, maps, roll.targets[chosen]), setting)


def _stacked(items: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """Images, and their heatmaps: [N,C,H,W], [N,H,W]."""
    return torch.stack([item.image for item in items]), torch.stack([i.heatmap for i in items])


def _remark(result: FolderScores, options: Options) -> None:
    """Say once what was odd."""
    scores = result.scores
    broken = int(scores.clean.isnan().sum())
    if broken:
        warnings.warn(
            f"the model answered NaN for {broken} of {len(scores)} whole images: they are left out"
            " of the means; try another --precision",
            stacklevel=3,
        )
    if options.leak_donors and scores.leaked is None:
        warnings.warn("no leak: all images that were scored are of one class", stacklevel=3)
    elif scores.leaked is not None and (remark := leak_warning(result.summary)):
        warnings.warn(remark, stacklevel=3)
