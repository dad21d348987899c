"""The ceiling: what boxes searched for each image reach, under a fill that the search never saw."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.explainers.region_search import FILLS, region_search
from sufficit.metrics.alpha_curves import coarse
from sufficit.metrics.plan import ask, make_plan
from sufficit.metrics.scores import read
from sufficit.runs.explanations import MapBatch
from sufficit.runs.job import Job, fill_named
from sufficit.statistics import estimates

CALLS = 1500  # forward passes per image, of the search
SEARCHED = ""  # the boxes among the sources, none of which has an empty name


def ceiling_fill(job: Job) -> str:
    """The fill that methods and boxes are compared with: the run's held-out one, else blur."""
    held_out = job.config.held_out_fill
    return "blur" if held_out in (None, "auto", "none") else held_out


def search_fills(job: Job) -> list[str]:
    """The fills that boxes are searched with: all but the held-out one."""
    return [fill for fill in FILLS if fill != ceiling_fill(job)]


def ceiling_scores(
    job: Job, scorer: Classifier, batch: MapBatch, alpha_min: float
) -> tuple[dict[str, Tensor], int]:
    """MSI with the held-out fill of every source and of the boxes, each [n]; the calls it took."""
    config, n = job.config, len(batch.targets)
    how: Any = {"batch_size": config.batch_size}
    fills = search_fills(job)
    boxes = region_search(scorer, batch.images, batch.targets, calls=CALLS, fills=fills, **how)
    maps = {**batch.heatmaps, SEARCHED: boxes.to(next(iter(batch.heatmaps.values())).device)}
    plan = make_plan(alpha_min, config.score_kind, coarse(config.value_step), columns=["msi"])
    fill = fill_named(ceiling_fill(job), [job.classifier])
    given = (scorer, batch.images, torch.cat(list(maps.values())), batch.targets, plan)
    found = ask(*given, fill=fill, **how)
    values = read({"": found}, plan).columns["msi"].split(n)
    calls = int(found.calls.sum()) + n * CALLS
    return dict(zip(maps, values, strict=True)), calls


def ceiling_record(
    job: Job, images: Sequence[str], scores: Mapping[str, Sequence[Tensor]], calls: int
) -> dict[str, Any]:
    """What run.json says: each method's MSI with the held-out fill, and its share of the boxes'."""
    whole = {name: torch.cat([*parts]).numpy() for name, parts in scores.items()}
    given: Any = {"seed": job.config.seed, "limits": lambda _: job.plan.limits("msi")}
    found = estimates(whole, dict.fromkeys(whole, True), **given)
    searched = found.pop(SEARCHED)
    return {
        "fill": ceiling_fill(job),
        "fills": search_fills(job),
        "calls": CALLS,
        "n": len(images),
        "images": list(images),
        "searched": {"mean": searched.mean, "low": searched.low, "high": searched.high},
        "msi": {name: one.mean for name, one in found.items()},
        "share": {
            name: one.mean / searched.mean if searched.mean > 0 else None
            for name, one in found.items()
        },
        "model_calls": calls,
    }
