"""The images of a run that are shown in its report: chosen and written at its end, read again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sufficit.files import local_file
from sufficit.metrics.leakage import POOL
from sufficit.metrics.plan import ask, make_plan
from sufficit.perturbation.predictions import ROWS, Predictions
from sufficit.report.content import Choice
from sufficit.runs.config import RunConfig
from sufficit.runs.job import Job
from sufficit.runs.maps import maps_from_file, unpack
from sufficit.runs.store import HEATMAPS, PIXELS, SCORES, Store, UnitFile, save_tensors

SHOWN = "shown.safetensors"


@dataclass(frozen=True)
class ShownImages:
    """The images that a run kept to be looked at, with heatmaps and predictions."""

    rows: tuple[int, ...]  # which of the scored images they are
    reasons: tuple[str, ...]
    images: Tensor  # [n,C,H,W]
    heatmaps: Mapping[str, Tensor]  # source -> [n,H,W]
    predictions: Mapping[str, Predictions]
    fill: str | Tensor


def keeps_all(job: Job) -> bool:
    """Whether the pixels of all images are kept, because they are few."""
    return len(job.entries) <= POOL


def places_of(
    job: Job,
    choice: Choice,
    known: Mapping[int, tuple[int, int, str]],
    start: int,
    units: Sequence[tuple[int, UnitFile]],
    msi: Mapping[str, ArrayLike],
) -> dict[int, tuple[int, int, str]]:
    """Number -> row, unit and name of the images that may be shown, once some more are known.

    Their rows begin at `start`, and `msi` has the values of every method: {method: [n]}.
    """
    images = [
        (number, unit, name)
        for unit, kept in units
        for number, name in zip(kept.facts["numbers"], kept.facts["names"], strict=True)
    ]
    best = choice.add([number for number, _, _ in images], msi) | {*job.shown_by_seed}
    new = {number: (start + k, unit, name) for k, (number, unit, name) in enumerate(images)}
    every = {**known, **new}
    return {n: place for n, place in every.items() if keeps_all(job) or n in best}


def write_shown(
    job: Job, store: Store, choice: Choice, places: Mapping[int, tuple[int, int, str]]
) -> dict[str, str]:
    """Write the pixels, maps and predictions of the images to show; return them with reasons.

    `places` has row, unit and name of the images that may be shown, by number.
    """
    drawn = [number for number in job.shown_by_seed if number in places]
    if keeps_all(job):
        known = [*places]
        drawn = [known[k] for k in np.random.default_rng(job.config.seed).permutation(len(known))]
    chosen = choice.chosen(drawn)
    # A worker whose processor rounds otherwise may have kept another of two images that tie.
    kept = {number: store.read(PIXELS, places[number][1]) for number in chosen}
    chosen = {n: w for n, w in chosen.items() if n in kept[n].facts["numbers"]}
    found = [places[number] for number in chosen]
    rows: dict[str, list[Tensor]] = {}
    for number, (_, unit, _) in zip(chosen, found, strict=True):
        pixels, maps = kept[number], store.read(HEATMAPS, unit)
        scores = store.read(SCORES, unit, names=[f"{n}/{p}" for n in job.sources for p in ROWS])
        rows.setdefault("pixels", []).append(
            pixels.tensors["pixels"][pixels.facts["numbers"].index(number)]
        )
        place = maps.facts["numbers"].index(number)
        for name, tensor in {**maps.tensors, **scores.tensors}.items():
            rows.setdefault(name, []).append(tensor[place])
    tensors = {name: torch.stack(parts) for name, parts in rows.items()}
    if isinstance(job.fill, Tensor):
        tensors["fill"] = job.fill
    facts: dict[str, Any] = {name: maps.facts[name] for name in ("final", "controls", "shape")}
    facts |= {"reasons": list(chosen.values()), "numbers": list(chosen)}
    facts["rows"] = [row for row, _, _ in found]
    if job.plan.sampling is not None:
        tensors |= _curves_of_shown(job, UnitFile(tensors, facts))
    save_tensors(store.folder / SHOWN, tensors, facts)
    return {name: chosen[number] for number, (_, _, name) in zip(chosen, found, strict=True)}


def _curves_of_shown(job: Job, kept: UnitFile) -> dict[str, Tensor]:
    """Predictions for the whole curves of images that were asked a few masks, by halving."""
    images, device = unpack(kept.tensors["pixels"]), job.classifier.device
    maps = maps_from_file(kept, job.config.seed)
    drawn = torch.cat([maps[name].at((images.shape[2], images.shape[3])) for name in job.sources])
    targets = kept.tensors[f"{job.ranked[0]}/targets"]
    plan = replace(job.plan.of_bands(), calls="adaptive")
    given = (job.classifier, images.to(device), drawn.to(device), targets, plan)
    found = ask(*given, job.fill, batch_size=job.config.batch_size)
    return {
        f"{name}/{part}": getattr(found, part)[k * len(images) : (k + 1) * len(images)]
        for k, name in enumerate(job.sources)
        for part in ROWS
    }


def read_shown(folder: Path, config: RunConfig, methods: Sequence[str]) -> ShownImages | None:
    """The images that a run kept to be looked at, if there are any."""
    from safetensors import safe_open

    path = folder / SHOWN
    if not path.exists():
        return None
    with local_file(path) as file, safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["facts"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    plan, (_, h, w) = make_plan(**config.plan_options() | {"calls": "exact"}), facts["shape"]
    maps = maps_from_file(UnitFile(tensors, facts), config.seed)
    predictions = {
        name: Predictions(
            bands=plan.asks,
            weighed=plan.weighs,
            **{part: tensors[f"{name}/{part}"] for part in ROWS},
        )
        for name in methods
    }
    return ShownImages(
        tuple(facts["rows"]),
        tuple(facts["reasons"]),
        unpack(tensors["pixels"]),
        {name: maps[name].at((h, w)) for name in methods},
        predictions,
        tensors.get("fill", config.fill),
    )
