"""What a run left, in the form it is recorded in and compared in."""

import csv
import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from pyarrow import parquet

FACTS = (
    *("n", "n_skipped", "targets", "clean_accuracy", "alpha_min", "methods", "leak_ratio"),
    *("outside_the_contest", "model_calls", "empty_heatmaps", "own_alpha_min", "search"),
    *("alpha_curve", "shown", "class_folders", "seed", "chance"),
)
"""What of run.json does not depend on the time, the machine or the versions."""


def without_source(told: Any, name: str) -> Any:
    """What JSON holds without a source that runs had not when it was recorded."""
    if isinstance(told, dict):
        return {key: without_source(one, name) for key, one in told.items() if key != name}
    if isinstance(told, list):
        pairs = [one for one in told if isinstance(one, dict) and "second" in one]
        outside = [one for one in pairs if name in (one["first"], one["second"])]
        return [without_source(o, name) for o in told if o != name and o not in outside]
    return told


@dataclass
class Result:
    """Tables of all methods one below the other, heatmaps by name, and what JSON files say."""

    scores: pandas.DataFrame | None = None
    curves: pandas.DataFrame | None = None
    maps: dict[str, np.ndarray] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path, name: str) -> None:
        """Write NAME.json and, of the rest, what there is."""
        for kind in ("scores", "curves"):
            if (frame := getattr(self, kind)) is not None:
                path = folder / f"{name}.{kind}.parquet"
                frame.to_parquet(path, index=False, compression="zstd")
        if self.maps:
            np.savez_compressed(folder / f"{name}.npz", **self.maps)
        text = json.dumps(self.told, indent=1, ensure_ascii=False) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, name: str) -> "Result":
        """What `save` wrote."""
        paths = {kind: folder / f"{name}.{kind}.parquet" for kind in ("scores", "curves")}
        frames = {k: pandas.read_parquet(path) for k, path in paths.items() if path.exists()}
        maps = {}
        if (folder / f"{name}.npz").exists():
            with np.load(folder / f"{name}.npz") as kept:
                maps = dict(kept)
        told = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for frame in frames.values():  # the source of `evaluate` had no folder of its own then
            frame["method"] = frame["method"].replace("", "heatmaps")
        if "msi" in told.get("summary", {}):
            told["summary"] = {"heatmaps": told["summary"]}
            run = told["run"]
            if "leak_ratio" in run:
                run["leak_ratio"] = {"heatmaps": run["leak_ratio"]} if run["leak_ratio"] else {}
            if "search" in run:
                run["search"]["mean_msi"] = {"heatmaps": run["search"]["mean_msi"]}
        return cls(**frames, maps=maps, told=told)


def gather(out: Path) -> Result:
    """All that a command left in its folder and that another run must give again."""
    result = Result(told=_told(out))
    for kind in ("scores", "curves"):
        found = sorted(out.rglob(f"{kind}.parquet"))
        frames = [_with_method(pandas.read_parquet(path), path.parent, out) for path in found]
        if frames:
            setattr(result, kind, pandas.concat(frames, ignore_index=True))
        if found and kind == "curves":
            result.told["grids"] = _grids(found)
    if (rows := next(iter(out.rglob("rows.parquet")), None)) is not None:
        result.scores = pandas.read_parquet(rows)
    for path in sorted(out.rglob("*.npz")):
        with np.load(path) as kept:
            method = path.parent.name if path.stem == "heatmaps" else path.stem
            result.maps |= {f"{method}:{key}": kept[key] for key in kept.files}
    return result


def _with_method(frame: pandas.DataFrame, folder: Path, out: Path) -> pandas.DataFrame:
    frame.insert(0, "method", folder.name)
    return frame


def _grids(paths: list[Path]) -> dict[str, list[float]]:
    """The grids of the curves, which all methods share."""
    grids = [json.loads(parquet.read_schema(path).metadata[b"grids"]) for path in paths]
    assert all(grid == grids[0] for grid in grids)
    return grids[0]


def _told(out: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if (path := next(iter(out.rglob("summary.json")), None)) is not None:
        told["summary"] = json.loads(path.read_text(encoding="utf-8"))
    if (path := next(iter(out.rglob("run.json")), None)) is not None:
        run = json.loads(path.read_text(encoding="utf-8"))
        if "controls" in run:  # some keys have had other names
            run["outside_the_contest"] = run["controls"]
        if run.get("search"):
            run["own_alpha_min"] = run["search"]["own_alpha_min"]
        told["run"] = {name: run[name] for name in FACTS if name in run}
        told["skipped"] = sorted(_name(skipped) for skipped in run.get("skipped", []))
    if (path := next(iter(out.rglob("pairs.csv")), None)) is not None:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        first = [row for row in rows if row["column"] == "msi"]  # not with other fills
        told["pairs"] = [{name: _value(text) for name, text in row.items()} for row in first]
    if (path := next(iter(out.rglob("table.md")), None)) is not None:
        told["table"] = path.read_text(encoding="utf-8").splitlines()
    return told


def _value(text: str) -> bool | int | float | str | None:
    """What a cell of a CSV file holds, every digit of it."""
    known = {"": None, "True": True, "False": False}
    if text in known:
        return known[text]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _name(skipped: dict[str, str] | str) -> str:
    return skipped if isinstance(skipped, str) else skipped["name"]
