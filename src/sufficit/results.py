"""Results on disk: rows, curves, a summary with intervals, and where the numbers come from."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sufficit.files import writing
from sufficit.metrics.curves import Curve
from sufficit.metrics.scores import Scores
from sufficit.statistics import Estimate, Standing, estimates, ratio_estimate

if TYPE_CHECKING:
    import pyarrow

__all__ = [
    "Estimate",
    "as_json",
    "plain",
    "provenance",
    "save_json",
    "save_scores",
    "summarise",
]
PACKAGES = (
    "sufficit",
    "torch",
    "torchvision",
    "torchmetrics",
    "lightning",
    "numpy",
    "timm",
    "transformers",
)


def summarise(scores: Scores, *, seed: int = 0) -> dict[str, Estimate]:
    """Mean and interval of every column, and of the leak's ratio where it was measured."""
    values = {name: column.numpy().astype(np.float64) for name, column in scores.columns.items()}
    directions = {name: scores.plan.higher_is_better(name) for name in values}
    summary = estimates(values, directions, seed=seed)
    if scores.leaked is not None:
        summary["leak_ratio"] = ratio_estimate(values["leak"], values["leak_chance"], seed=seed)
    return summary


def provenance(
    config: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """What a number needs to be believed and repeated."""
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"config": dict(config), "command": command} | surroundings(device, dtype)


def surroundings(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """When, on what and by which versions something was computed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _commit(),
        "versions": {"python": platform.python_version()} | _versions(),
        "device": {"type": device.type, "name": name or platform.machine(), "dtype": str(dtype)},
    }


def save_scores(folder: Path, scores: Scores, names: Sequence[str]) -> None:
    """Write scores.parquet (a row an image) and curves.parquet (the curves of each image)."""
    from pyarrow import parquet

    frame = scores.frame()
    frame.insert(0, "image", list(names))
    with writing(folder / "scores.parquet") as path:
        frame.to_parquet(path, index=False)
    with writing(folder / "curves.parquet") as path, ExitStack() as closing:
        writer, left = None, iter(names)
        for curves, some in zip(scores.curve_pieces(), scores.answers.pieces(), strict=True):
            table = _curves_table(curves, list(islice(left, len(some.targets))))
            writer = writer or closing.enter_context(parquet.ParquetWriter(path, table.schema))
            writer.write_table(table)


def _curves_table(curves: Mapping[str, Curve], names: Sequence[str]) -> "pyarrow.Table":
    """A row an image, a column a curve and kind of score; the grids are in the schema."""
    import pyarrow

    columns: dict[str, Any] = {"image": names}
    for name, curve in curves.items():
        for kind in ("accuracy", "confidence"):
            columns[f"{name}_{kind}"] = list(getattr(curve, kind).float().numpy())
    grids = {name: list(curve.grid) for name, curve in curves.items()}
    return pyarrow.table(columns).replace_schema_metadata({"grids": json.dumps(grids)})


def save_pairs(path: Path, standing: Standing) -> None:
    """Write a row a pair of methods, with what its interval and p-value were made with."""
    frame = standing.frame()
    frame.insert(0, "column", standing.column)
    with writing(path) as part:
        frame.assign(**asdict(standing.chance)).to_csv(part, index=False)


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with a line's end; NaN becomes null."""
    with writing(path) as part:
        text = json.dumps(plain(content), indent=2, ensure_ascii=False) + "\n"
        # What UTF-8 can't hold, as in a file's name of raw bytes, becomes JSON's own escape.
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


def as_json(summary: Mapping[str, Estimate]) -> dict[str, dict[str, Any]]:
    """A summary as plain values, NaN as None."""
    return {name: plain(asdict(estimate)) for name, estimate in summary.items()}


def plain(value: Any) -> Any:
    """Values that JSON knows: NaN and infinity become None, paths text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit of the source tree this package runs from; None when it was installed."""
    here = Path(__file__)
    try:
        for check in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "HEAD"]):
            done = subprocess.run(
                ["git", "-C", str(here.parent), *check], capture_output=True, text=True, check=True
            )
        changed = subprocess.run(
            ["git", "-C", str(here.parent), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
