"""The folder of a finished comparison, read back: its numbers, and images with their heatmaps."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.comparing.groups import draw, quiet
from sufficit.comparing.jobs import Job, load, make_job
from sufficit.comparing.settings import Settings, read_run, settings_from
from sufficit.data.finding import open_images
from sufficit.data.heatmap_files import HeatmapFile
from sufficit.data.loader import GROUP, named
from sufficit.errors import UserError, unknown
from sufficit.explainers.lax import name_of
from sufficit.files import read_json, safe_name
from sufficit.keeping import FOLDER
from sufficit.perturbation.predictions import PIECE
from sufficit.statistics import Estimate, Floats

if TYPE_CHECKING:
    import pandas

MOST_RECORD = 2**28  # bytes; it names every image that was skipped
ORDERS = ("best", "worst", "disputed")
SLACK = 0.02  # a mask drawn anew may differ by so much of the image, on another device


@dataclass(frozen=True)
class Finished:
    """A comparison as it lies on disk; nothing is computed but means."""

    folder: Path
    settings: Settings
    record: Mapping[str, Any]  # run.json
    summary: Mapping[str, Any]  # summary.json
    rows: Mapping[str, "pandas.DataFrame"]  # method -> a row an image

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods in the contest, best first, then the others."""
        return tuple(self.record["methods"])

    @property
    def outside(self) -> tuple[str, ...]:
        """The methods that were scored but not in the contest."""
        return tuple(self.record["outside_the_contest"])

    @property
    def alpha_min(self) -> float:
        """Where the methods were compared."""
        return float(self.record["alpha_min"])

    @cached_property
    def names(self) -> list[str]:
        """The images that were scored."""
        return [str(name) for name in self.rows[self.methods[0]]["image"]]

    def known(self, methods: Sequence[str] | None) -> list[str]:
        """Methods of the run by name; without any, those of the contest."""
        wanted = [m for m in self.methods if m not in self.outside] if methods is None else methods
        for method in wanted:
            if method not in self.methods:
                raise unknown("method in this run", method, self.methods)
        if not wanted:
            raise UserError("a figure needs at least one method")
        return list(wanted)

    def values(self, method: str, column: str, rows: Sequence[int]) -> list[float]:
        """A column of the run for some of the images."""
        frame = self.rows[method]
        if column not in frame.columns[4:]:
            raise unknown("column in this run", column, frame.columns[4:])
        return [float(value) for value in frame[column].iloc[list(rows)]]

    def estimate(self, method: str, column: str) -> Estimate:
        """The mean of a column with its interval; NaN where there is none."""
        found: dict[str, Any] = dict(self.summary[method][column])
        bounds = {k: np.nan if found[k] is None else found[k] for k in ("mean", "low", "high")}
        return Estimate(**found | bounds)

    def curves(self, method: str) -> dict[str, tuple[list[float], Floats]]:
        """Every curve's grid, and its mean over the images: [P], [P]."""
        from pyarrow import parquet

        kind, sums, counts = self.settings.score, dict[str, Any](), dict[str, Any]()
        with parquet.ParquetFile(self.folder / method / "curves.parquet") as file:
            grids = json.loads(file.schema_arrow.metadata[b"grids"])
            for batch in file.iter_batches(PIECE, columns=[f"{name}_{kind}" for name in grids]):
                for name in grids:
                    values = np.stack(batch[f"{name}_{kind}"].to_numpy(zero_copy_only=False))
                    sums[name] = sums.get(name, 0) + np.nansum(values, axis=0)
                    counts[name] = counts.get(name, 0) + (~np.isnan(values)).sum(axis=0)
        return {name: (grid, sums[name] / counts[name]) for name, grid in grids.items()}

    def chosen(self, words: Sequence[str], methods: Sequence[str]) -> list[int]:
        """Rows of images, each once: by name, a number for the first ones, best:2, disputed, ...

        The best has the highest mean MSI of the methods, the most disputed the widest spread.
        """
        found: list[int] = []
        for word in words:
            found += [row for row in self._rows_for(word, methods) if row not in found]
        if not found:
            raise UserError("a sheet needs at least one image")
        return found

    def _rows_for(self, word: str, methods: Sequence[str]) -> list[int]:
        if word in self.names:
            return [self.names.index(word)]
        if word.isdecimal():
            return list(range(min(int(word), len(self.names))))
        order, _, count = word.partition(":")
        if order in ORDERS and (count.isdecimal() or not count):
            return self._ranked(order, methods)[: int(count or 1)]
        alike = [row for row, name in enumerate(self.names) if name.endswith(f"/{word}")]
        if len(alike) == 1:
            return alike
        raise unknown("image in this run", word, [*ORDERS, "a number", *self.names])

    def _ranked(self, order: str, methods: Sequence[str]) -> list[int]:
        """Rows with a value for all methods, in an order."""
        msi = np.stack([self.rows[m]["msi"].to_numpy(np.float64) for m in methods])
        whole = np.flatnonzero(~np.isnan(msi).any(axis=0))
        by = {"best": -msi.mean(0), "worst": msi.mean(0), "disputed": -np.ptp(msi, axis=0)}
        ranked: list[int] = whole[np.argsort(by[order][whole], kind="stable")].tolist()
        return ranked


@dataclass(frozen=True)
class Drawn:
    """Some images of a run as the model sees them, their heatmaps, and how hidden pixels look."""

    images: Tensor  # [N,C,H,W]
    heatmaps: dict[str, Tensor]  # method -> [N,H,W]
    class_names: tuple[str, ...]
    fill: str | Tensor
    again: bool  # whether the heatmaps had to be drawn again


def read_finished(folder: Path) -> Finished:
    """What `sufficit compare` left in a folder."""
    import pandas

    if not (folder / "run.json").exists():
        begun = (folder / FOLDER).exists()
        advice = "it was stopped: give its command again" if begun else "sufficit compare makes one"
        raise UserError(f"no finished run of sufficit compare at {folder}: {advice}")
    if not (folder / "RUN.toml").exists():
        raise UserError(f"{folder} holds the run of another command: figures are of a compare run")
    record, summary = (read_json(folder / f"{n}.json", MOST_RECORD) for n in ("run", "summary"))
    try:
        methods = [safe_name(method) for method in record["methods"]]
        rows = {m: pandas.read_parquet(folder / m / "scores.parquet") for m in methods}
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{folder} is not whole ({error}): compare anew") from error
    return Finished(folder, settings_from(read_run(folder / "RUN.toml")), record, summary, rows)


def read_drawn(
    run: Finished,
    rows: Sequence[int],
    methods: Sequence[str],
    *,
    data: Path | None = None,
    classifier: Classifier | None = None,
) -> Drawn:
    """Images of a run with their heatmaps: those that were kept, or else drawn once more."""
    job = _job(run, methods, data, classifier)
    names = [run.names[row] for row in rows]
    known = named(job.pictures, names)
    missing = [name for name in names if name not in known]
    if missing:
        raise UserError(f"{missing[0]} is no longer in {job.settings.data}: give --data its folder")
    frame, entries = run.rows[methods[0]], [known[name] for name in names]
    targets = torch.tensor(frame["target"].to_numpy()[list(rows)])
    kept = _kept(run, names, methods)
    if kept is None:
        with quiet():
            images, maps = draw(job, entries, targets)
        found = {method: maps[method] for method in methods}
        _check_same(run, rows, found)
    else:
        images, found = job.read(entries), kept
    classes = job.classifier.classes
    words = tuple(classes[k] if classes else f"class {k}" for k in targets.tolist())
    return Drawn(images, found, words, job.fill, again=kept is None)


def _job(
    run: Finished, methods: Sequence[str], data: Path | None, classifier: Classifier | None
) -> Job:
    """The run's own model and images, with no more methods than are drawn."""
    adapters = {source: name_of(source) for source in run.settings.lax}
    settings = replace(
        run.settings,
        data=run.settings.data if data is None else str(data),
        methods=tuple(m for m in methods if m not in adapters.values()),
        lax=tuple(source for source, name in adapters.items() if name in methods),
        controls=False,
        device="auto",  # that of the run may be on another machine
    )
    pictures = open_images(Path(settings.data))
    return make_job(settings, classifier or load(settings), pictures, GROUP, progress=False)


def _kept(run: Finished, names: Sequence[str], methods: Sequence[str]) -> dict[str, Tensor] | None:
    """The heatmaps that --save-heatmaps kept; None without it."""
    paths = {method: run.folder / method / "heatmaps.npz" for method in methods}
    if not all(path.exists() for path in paths.values()):
        return None
    found = {}
    for method, path in paths.items():
        with HeatmapFile(path) as maps:
            found[method] = torch.stack([maps.read(name) for name in names])
    return found


def _check_same(run: Finished, rows: Sequence[int], heatmaps: Mapping[str, Tensor]) -> None:
    """Warn where heatmaps drawn again mark another share of an image than those scored did."""
    for method, maps in heatmaps.items():
        shares = (maps >= run.alpha_min).double().mean((1, 2)).tolist()
        scored = run.values(method, "mask_penalty", rows)
        for row, now, then in zip(rows, shares, scored, strict=True):
            if abs(now - then) > SLACK:
                warnings.warn(
                    f"{method} now marks {now:.1%} of {run.names[row]}, and {then:.1%} when it was"
                    " scored: the image or the model is another, and the numbers are of the run",
                    stacklevel=4,
                )
                return
