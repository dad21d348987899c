"""Compare methods on your own model and images: the whole chain. Read this file first."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from sufficit.classifier.classifier import Classifier
from sufficit.comparing.groups import (
    Found,
    collect,
    collect_leak,
    draw,
    leak_groups,
    quiet,
    score_groups,
)
from sufficit.comparing.jobs import Job, check_methods, identity, load, make_job
from sufficit.comparing.outcome import OWN_BEST, Comparison
from sufficit.comparing.sampling import sample_alphas
from sufficit.comparing.saving import clear, save_comparison
from sufficit.comparing.settings import CONTROLS, Settings, write_run
from sufficit.comparing.showing import Shown, choose
from sufficit.crews import Crew
from sufficit.data.finding import ImageSource, open_images
from sufficit.data.images import ImageFile
from sufficit.data.loader import GROUP
from sufficit.keeping import FOLDER, Parts, begin
from sufficit.metrics.compare_scores import compare_scores
from sufficit.metrics.scores import AlphaSearch, Scores, read, with_leak
from sufficit.progress import Progress
from sufficit.results import summarise
from sufficit.sharing import told_roll
from sufficit.statistics import Estimate, estimates


def compare_folder(
    settings: Settings,
    out: Path,
    *,
    classifier: Classifier | None = None,
    group: int = GROUP,
    crew: Crew | None = None,
    overwrite: bool = False,
    progress: bool | Progress | None = None,
) -> Comparison | None:
    """Explain every image below a folder by every method, score all of it, compare, write it down.

    What is done is kept in parts below `out`; begun again with the same settings, a run goes on
    where it was stopped; `overwrite` removes an earlier one, once nothing is wrong with this one.
    Hand in a classifier of your own, or settings.model is loaded. Of a crew of several processes
    only the first has an outcome.
    """
    crew = crew or Crew()
    job = _job(settings, classifier, crew, group, progress)
    scored = _score(job, out, crew, overwrite)
    if scored is None:
        return None
    found, scores, contest = scored.found, scored.scores, scored.contest
    competing = {method: scores[method] for method in contest}
    comparison = Comparison(
        settings=settings,
        names=found.names,
        scores=scores,
        summaries={method: _summary(one, settings.seed) for method, one in scores.items()},
        standing=compare_scores(competing, seed=settings.seed),
        shown=_shown(scored, competing),
        skipped=found.skipped,
        target_kind=job.labels.kind,
        alpha_min=scores[contest[0]].alpha_min,
        empty=found.empty,
        classifier=job.classifier,
        fill=job.fill,
        alpha_curves=sample_alphas(job, scored.parts, found),
    )
    save_comparison(out, comparison, scored.parts)
    _remark(comparison)
    return comparison


@dataclass(frozen=True)
class Scored:
    """Every method's scores on the same images, kept in parts on disk and not yet written out."""

    job: Job
    parts: Parts
    found: Found
    scores: dict[str, Scores]
    contest: list[str]  # the methods that are compared: all but the controls


def score_folder(
    settings: Settings,
    out: Path,
    *,
    classifier: Classifier | None = None,
    group: int = GROUP,
    columns: Sequence[str] | None = None,
    pictures: Sequence[ImageFile] | None = None,
    crew: Crew | None = None,
    progress: bool | Progress | None = None,
) -> Scored | None:
    """The part of `compare_folder` that asks the model: it leaves parts below `out`, no results.

    `columns` and `pictures` are some of the columns and of the folder's images, all by default. Of
    a crew of several processes only the first has an outcome.
    """
    crew = crew or Crew()
    job = _job(settings, classifier, crew, group, progress, columns, pictures)
    return _score(job, out, crew)


def _job(
    settings: Settings,
    classifier: Classifier | None,
    crew: Crew,
    group: int,
    progress: bool | Progress | None,
    columns: Sequence[str] | None = None,
    pictures: Sequence[ImageFile] | None = None,
) -> Job:
    check_methods(settings)
    if classifier is None:
        classifier = load(replace(settings, device=crew.device or settings.device))
    stream = ImageSource.of(pictures) if pictures else open_images(Path(settings.data))
    return make_job(settings, classifier, stream, group, progress, columns)


def _score(job: Job, out: Path, crew: Crew, overwrite: bool = False) -> Scored | None:
    """Ask the model all that is left to ask; only the first process has an outcome."""
    same = identity(job)
    if overwrite and crew.first:
        clear(out)
    parts = begin(out, same) if crew.first else Parts(out / FOLDER)
    if crew.first:
        write_run(out / "RUN.toml", job.settings)
    with crew.meet(parts.folder):
        crew.check_alike(same)
        groups = score_groups(job, parts, crew)
        if not crew.first:
            if crew.tell("leak", None):
                leak_groups(job, parts, *told_roll(None, 0, crew), crew)
            return None
        scored = _with_leak(_collected(job, parts, groups), crew)
    parts.complete()
    return scored


def _collected(job: Job, parts: Parts, groups: int) -> Scored:
    """All that was scored, as it lies on disk."""
    found = collect(job, parts, groups)
    contest = [method for method in job.methods if method not in CONTROLS] or list(job.methods)
    return Scored(job, parts, found, scores_at_one_alpha(job, found, contest), contest)


def _with_leak(scored: Scored, crew: Crew) -> Scored:
    """Scores with the leak beside them, if it is wanted and can be measured."""
    job, found = scored.job, scored.found
    wanted = job.settings.leak and len(found.targets.unique()) > 1
    if not crew.tell("leak", wanted):
        return scored
    alpha_min = scored.scores[scored.contest[0]].alpha_min
    leak_groups(job, scored.parts, *told_roll(found.roll, alpha_min, crew), crew)
    leaked = collect_leak(job, scored.parts, found)
    scores = {method: with_leak(one, leaked[method]) for method, one in scored.scores.items()}
    return replace(scored, scores=scores)


def scores_at_one_alpha(job: Job, found: Found, contest: Sequence[str]) -> dict[str, Scores]:
    """Every method's scores at one alpha_min: a searched one is best for the contest's mean."""
    own = {m: read(found.answers[m], job.plan, found.held_out.get(m)) for m in job.methods}
    searched = {method: one.search for method, one in own.items() if one.search is not None}
    if not searched:
        return own
    together = AlphaSearch(
        searched[contest[0]].alphas, torch.stack([searched[m].means for m in contest])
    )
    chosen = tuple(s for s in job.plan.schedules if s.alpha_min == together.best)
    fixed = replace(job.plan, schedules=chosen, searching=False)
    at_best = {m: read(found.answers[m], fixed, found.held_out.get(m)) for m in job.methods}
    return {m: replace(at_best[m], plan=job.plan, search=searched[m]) for m in job.methods}


def _summary(scores: Scores, seed: int) -> dict[str, Estimate]:
    """Mean and interval of every column, and of MSI at the method's own best alpha_min."""
    summary = summarise(scores, seed=seed)
    if scores.search is None:
        return summary
    best = scores.search.msi[:, scores.search.alphas.index(scores.search.best)]
    return summary | estimates({OWN_BEST: best.numpy()}, {OWN_BEST: True}, seed=seed)


def _shown(scored: Scored, scores: Mapping[str, Scores]) -> Shown:
    """Some images read and explained once more, to be looked at."""
    job, found = scored.job, scored.found
    msi = {method: np.asarray(one.msi.numpy(), np.float64) for method, one in scores.items()}
    chosen = choose(msi, seed=job.settings.seed)
    rows = list(chosen)
    names, targets = [found.names[row] for row in rows], found.targets[rows]
    with quiet():
        entries = found.roll.entries(rows, job.groups(), scored.parts)
        images, heatmaps = draw(job, entries, targets)
    classes = job.classifier.classes
    return Shown(
        numbers=tuple(rows),
        reasons=tuple(chosen.values()),
        names=tuple(names),
        images=images,
        targets=targets,
        class_names=tuple(classes[k] if classes else f"class {k}" for k in targets.tolist()),
        heatmaps=heatmaps,
    )


def _remark(comparison: Comparison) -> None:
    """Say once what was odd."""
    scores = comparison.scores[comparison.standing.best]
    broken, n = int(scores.clean.isnan().sum()), len(comparison.names)
    if broken:
        warnings.warn(
            f"the model answered NaN for {broken} of {n} whole images: they are left out of the"
            " means; try another --precision",
            stacklevel=3,
        )
    if comparison.settings.leak and scores.leaked is None:
        warnings.warn("no leak: all images that were scored are of one class", stacklevel=3)
    empty = ", ".join(f"{method} {count}" for method, count in comparison.empty.items() if count)
    if empty:
        warnings.warn(
            f"heatmaps with no positive part are all zeros, of {n} images: {empty}", stacklevel=3
        )
