"""How the sources of a run compare: ranks by MSI under every condition, precision, the ceiling.

A run with `within` stops when MSI is precise enough. The sizes at which it looks are known before
the run, and every look has its share of the error (`Chance.split`), so that the interval at the end
is valid wherever it stops. Images are in random order by seed: the first ones are a random sample
of all. Controls may be less precise, because they are not ranked. The ceiling is what boxes
searched for each image reach, under a fill that the search never saw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.explainers.region_search import FILLS, region_search
from sufficit.files import writing
from sufficit.metrics.conditions import groups_of
from sufficit.metrics.plan import coarse, make_plan, msi_by_method
from sufficit.metrics.scores import Scores, worst_of
from sufficit.outside import as_csv
from sufficit.perturbation.bands import EVERYTHING
from sufficit.runs.explanations import MapBatch
from sufficit.runs.job import Job, fill_named
from sufficit.similarity import RankedCondition
from sufficit.statistics import Estimate, Standing, estimates_of, standing_of
from sufficit.sums import Sums, sums_of, with_pairs

CALLS = 1500  # forward passes per image, of the search for boxes
SEARCHED = ""  # the boxes among the sources, none of which has an empty name


class Rankings:
    """The sums behind each condition's tests, its calls, and hits on whole images."""

    def __init__(self, job: Job) -> None:
        self.job = job
        with_msi = [one for one in job.conditions if "msi" in job.plans[one.key].columns]
        self.conditions = with_msi if "msi" in job.plan.columns else []
        self._msi: dict[str, Sums] = {}
        self._calls = dict.fromkeys(job.plans, 0)
        self._clean = {twin: np.zeros(2) for twin in (False, True)}  # hits, images

    def add(self, numbers: npt.ArrayLike, scores: Mapping[str, Scores]) -> None:
        """Add the scores of a unit."""
        tested, seed = (*self.job.ranked, *self.job.controls), self.job.config.seed
        for condition in self.conditions:
            key, column = condition.key, condition.column("msi")
            pairs = with_pairs({name: scores[name].columns[column].numpy() for name in tested})
            self._msi.setdefault(key, Sums([*pairs], seed=seed)).add(numbers, pairs)
            found = [one.others[key] if key else one.answers for one in scores.values()]
            self._calls[key] += sum(int(one.calls.sum()) for one in found)
            if key in ("", "twin"):
                hits = found[0].of([EVERYTHING], "accuracy").numpy()
                self._clean[condition.twin] += np.nansum(hits), np.isfinite(hits).sum()

    def ranked(self) -> list[RankedCondition]:
        """Every condition in which MSI was scored, the first one first."""
        found, job = [], self.job
        for condition in self.conditions if self._msi else ():
            key, (hits, n) = condition.key, self._clean[condition.twin].tolist()
            given = (job.ranked, condition.column("msi"), job.chance, job.controls)
            standing = standing_of(self._msi[key], *given)
            own = key.removeprefix("twin_") or "own"  # the name of a fill that is an image
            fill = condition.fill if isinstance(condition.fill, str) else own
            facts = (fill, condition.twin, job.plans[key].width, self._calls[key])
            found.append(RankedCondition(key, *facts, hits / n if n else float("nan"), standing))
        return found


def add_worst(job: Job, summaries: Mapping[str, dict[str, Estimate]]) -> dict[str, dict[str, str]]:
    """Add MSI with the worst fill to every source's summary; return the columns it is from."""
    found: dict[str, dict[str, str]] = {}
    for end, columns in groups_of(job.conditions).items() if "msi" in job.plan.columns else ():
        for name, own in summaries.items():
            lowest = worst_of(columns, {column: own[column].mean for column in columns})
            own[f"msi_worst{end}"] = own[lowest]
            found.setdefault(f"msi_worst{end}", {})[name] = lowest
    return found


def write_pairs(path: Path, standings: Sequence[Standing]) -> None:
    """Write one row per condition and pair, with how its interval and p-value were made."""
    import pandas

    frames = [one.frame().assign(**asdict(one.chance)) for one in standings]
    for frame, one in zip(frames, standings, strict=True):
        frame.insert(0, "column", one.column)
    with writing(path) as part:
        part.write_text(as_csv(pandas.concat(frames)), encoding="utf-8")


def half_width(found: Sequence[Estimate]) -> float:
    """Half the width of the widest interval; NaN where one is unknown."""
    return float(np.max([(one.high - one.low) / 2 for one in found]))


def outcome(job: Job, summaries: Mapping[str, Mapping[str, Estimate]]) -> dict[str, Any] | None:
    """What run.json says of a run with `within`: None without."""
    within, sizes, units = job.config.within, job.looks, job.units
    if within is None:
        return None
    half = half_width([summaries[name]["msi"] for name in job.ranked])
    n, total = units.images_in(range(len(units))), len(job.entries)
    reached = len(units) < sizes[-1] or half <= within
    if reached:
        words = f"MSI of every method is known to ± {half:.2g} (--within {within:g}) from {n:,} of"
        words += f" {total:,} images, in random order."
    else:
        words = f"All {total:,} images are scored, and MSI is known to ± {half:.2g} only, not to ±"
        words += f" {within:g} (--within): that takes about {n * (half / within) ** 2:,.0f} images."
    if len(sizes) > 1:
        words += f" Intervals and tests allow for up to {len(sizes)} looks at the results."
    known = {"target": within, "half_width": half, "reached": reached, "images": n, "of": total}
    return known | {"looks": [units.images_in(range(size)) for size in sizes], "words": words}


def ceiling_fills(job: Job) -> tuple[str, list[str]]:
    """The fill that methods and boxes are compared with, and those that boxes are searched with.

    The first is the run's held-out fill, else blur; the others are all but it.
    """
    given = job.config.held_out_fill
    held_out = "blur" if given in (None, "auto", "none") else str(given)
    return held_out, [fill for fill in FILLS if fill != held_out]


def ceiling_scores(
    job: Job, scorer: Classifier, batch: MapBatch, alpha_min: float
) -> tuple[dict[str, Tensor], int]:
    """MSI with the held-out fill of every source and of the boxes, each [n]; the calls it took."""
    config, n = job.config, len(batch.targets)
    how: Any = {"batch_size": config.batch_size}
    held_out, fills = ceiling_fills(job)
    boxes = region_search(scorer, batch.images, batch.targets, calls=CALLS, fills=fills, **how)
    maps = {**batch.heatmaps, SEARCHED: boxes.to(next(iter(batch.heatmaps.values())).device)}
    plan = make_plan(alpha_min, config.score_kind, coarse(config.value_step), columns=["msi"])
    given = (scorer, batch.images, maps, batch.targets, plan)
    found, calls = msi_by_method(*given, fill=fill_named(held_out, [job.classifier]), **how)
    return {name: values[:, 0] for name, values in found.items()}, calls + n * CALLS


def ceiling_record(job: Job, sample: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says: each method's MSI with the held-out fill, and its share of the boxes'."""
    whole = {name: torch.cat(parts).numpy() for name, parts in sample["msi"].items()}
    sums, limits = sums_of(whole, seed=job.config.seed), lambda _: job.plan.limits("msi")
    found = estimates_of(sums, dict.fromkeys(whole, True), limits=limits)
    searched, (held_out, fills) = found.pop(SEARCHED), ceiling_fills(job)
    best = searched.mean
    return {
        "fill": held_out,
        "fills": fills,
        "calls": CALLS,
        "n": len(sample["images"]),
        "images": sample["images"],
        "searched": {"mean": best, "low": searched.low, "high": searched.high},
        "msi": {name: one.mean for name, one in found.items()},
        "share": {name: one.mean / best if best > 0 else None for name, one in found.items()},
        "model_calls": sample["calls"],
    }
