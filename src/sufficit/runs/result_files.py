"""The files of a finished run, read into what RunResults holds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sufficit.errors import UserError
from sufficit.files import local_file, read_json
from sufficit.metrics.metric import MeanCurve
from sufficit.metrics.plan import make_plan
from sufficit.perturbation.predictions import ROWS, Predictions
from sufficit.runs.config import RunConfig
from sufficit.runs.maps import maps_from_file, unpack
from sufficit.runs.store import UNITS, UnitFile
from sufficit.statistics import Chance, Estimate, Pair, Standing

MOST_RECORD = 2**28  # bytes of a run.json


@dataclass(frozen=True)
class ShownImages:
    """The images that a run kept to be looked at, with heatmaps and predictions."""

    rows: tuple[int, ...]  # which of the scored images they are
    reasons: tuple[str, ...]
    images: Tensor  # [n,C,H,W]
    heatmaps: Mapping[str, Tensor]  # source -> [n,H,W]
    predictions: Mapping[str, Predictions]
    fill: str | Tensor


def read_record(folder: Path) -> Mapping[str, Any]:
    """Return run.json of a finished run."""
    if not (folder / "run.json").exists():
        advice = "sufficit compare makes one"
        if (folder / UNITS).exists():
            advice = "run the same command again to resume it"
        raise UserError(f"{folder} holds no finished run: {advice}")
    record: dict[str, Any] = read_json(folder / "run.json", MOST_RECORD)
    if not {"methods", "flat", "config"} <= record.keys():
        raise UserError(f"{folder} holds a run of another kind or version: give a run of compare")
    return record


def read_curves(known: Mapping[str, Mapping[str, Any]], kind: str) -> dict[str, MeanCurve]:
    """The mean curves of a source, of the run's kind of score."""
    return {
        name: MeanCurve(
            tuple(curve["grid"]),
            torch.tensor([float("nan") if y is None else y for y in curve[kind]]).double(),
        )
        for name, curve in known.items()
    }


def read_estimates(columns: Mapping[str, Mapping[str, Any]]) -> dict[str, Estimate]:
    """Return the means and intervals of a source in summary.json."""

    def number(value: float | None) -> float:
        return float("nan") if value is None else value

    bounds = ("mean", "low", "high")
    return {
        name: Estimate(**{**found, **{key: number(found[key]) for key in bounds}})
        for name, found in columns.items()
    }


def read_standing(found: Mapping[str, Any] | None) -> Standing | None:
    """Return the standing in summary.json or run.json, if there is one."""
    if found is None:
        return None
    nan = float("nan")
    read: list[dict[str, Any]] = [
        {key: nan if value is None else value for key, value in pair.items()}
        for pair in found["pairs"]
    ]
    pairs = tuple(Pair(**pair) for pair in read)
    means = {name: nan if mean is None else mean for name, mean in found["means"].items()}
    lists = {key: tuple(found[key]) for key in ("ranking", "not_different", "controls")}
    chance = Chance(**found["chance"])
    return Standing(**{**found, **lists, "pairs": pairs, "means": means, "chance": chance})


def read_shown(path: Path, config: RunConfig, record: Mapping[str, Any]) -> ShownImages | None:
    """Return the images that the run kept to be looked at, if there are any."""
    from safetensors import safe_open

    if not path.exists():
        return None
    with local_file(path) as file, safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["facts"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    plan, (_, h, w) = make_plan(**config.plan_options() | {"calls": "exact"}), facts["shape"]
    maps, methods = maps_from_file(UnitFile(tensors, facts), config.seed), record["methods"]
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
