"""The results of a run as they are on disk: the one reader for tables, reports and figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.data.images import open_images
from sufficit.errors import UserError
from sufficit.evaluation import schedules_for
from sufficit.files import read_json, safe_name
from sufficit.loggers import close_logger, log_numbers, logger_named
from sufficit.metrics.column import Heading
from sufficit.metrics.columns import ZERO_LABEL, ZERO_LINE
from sufficit.metrics.metric import MeanCurve
from sufficit.metrics.scores import MethodScores
from sufficit.perturbation.predictions import Predictions
from sufficit.provenance import plain, typed
from sufficit.report.answer import Verdict, verdict
from sufficit.report.content import MOST_ROWS, Content, Facts, Shown
from sufficit.report.interpretation import MOST_EMPTY, run_remarks
from sufficit.runs.config import RunConfig, check_values
from sufficit.runs.record import Record
from sufficit.runs.rows import StoredRows
from sufficit.runs.shown import heatmaps_of, read_shown
from sufficit.runs.store import MAPS, MOST_RECORD, UNITS, Store
from sufficit.similarity import RankedCondition
from sufficit.statistics import Estimate, Standing

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

OWN_BEST = "msi_own_best"  # MSI of a source at the alpha_min that is best for it alone
_EMPTY = torch.zeros(0, 0)
NONE_SHOWN = Predictions((), _EMPTY, _EMPTY, (), _EMPTY, _EMPTY.flatten(), _EMPTY.flatten())


@dataclass(frozen=True)
class RunResults:
    """A finished run: its rows, means, tests, curves and images to show. It needs no model.

    Memory does not grow with the images: rows are read when they are asked for.
    """

    folder: Path
    record: Record  # run.json
    config: RunConfig
    summaries: Mapping[str, Mapping[str, Estimate]]  # source -> column -> mean with interval
    standing: Standing | None  # how the sources rank by MSI; None where it was not scored
    rows: StoredRows  # source -> one row per image
    curves: Mapping[str, Mapping[str, MeanCurve]]  # source -> curve -> mean over the images
    shown: Shown | None

    @staticmethod
    def read(folder: Path, record: Mapping[str, Any] | None = None) -> "RunResults":
        """Read what a run wrote into a folder; pass `record` while run.json is not written yet."""
        from safetensors import SafetensorError

        known = _read_record(folder) if record is None else record
        try:
            read = Record.read(known)
            methods = [safe_name(name) for name in read.methods]
            rows = StoredRows(folder, {n: folder / n / "scores.parquet" for n in methods})
            for name in methods:
                # A folder that was copied in part must not give means of some rows.
                if rows.count(name) != read.n:
                    raise ValueError(f"{rows.count(name)} of {read.n} rows of {name}")
            config = RunConfig(**check_values(known["config"]))
            drawn = read_json(folder / "curves.json", MOST_RECORD)
            curves = {name: _read_curves(drawn[name], config.score_kind) for name in methods}
            summary = read_json(folder / "summary.json", MOST_RECORD)
            standing = None
            if "standing" in summary:
                standing = typed(Standing, summary["standing"])
            summaries = {name: _read_estimates(summary[name]) for name in methods}
            # Pixels, maps and answers of some images; all others stay on disk.
            shown = read_shown(folder, config, methods, rows)
        except (OSError, LookupError, ValueError, TypeError, SafetensorError) as error:
            raise UserError(
                f"{folder} is not complete ({error}): run it again with --overwrite"
            ) from error
        return RunResults(folder, read, config, summaries, standing, rows, curves, shown)

    @property
    def methods(self) -> tuple[str, ...]:
        """The sources, best first, then the controls."""
        return tuple(self.record.methods)

    @property
    def controls(self) -> tuple[str, ...]:
        """The controls, which are not ranked."""
        return tuple(self.record.controls)

    @property
    def unranked(self) -> tuple[str, ...]:
        """Controls and references."""
        return (*self.controls, *self.record.references)

    @property
    def headings(self) -> Mapping[str, Heading]:
        """What the columns are called."""
        return self.record.columns

    @property
    def _agnostic(self) -> list[str]:
        """The sources that draw one map for every class."""
        return [name for name, one in self.record.sources.items() if one.class_agnostic]

    @cached_property
    def unmarked(self) -> dict[str, int]:
        """The images in which a ranked source marks nothing at alpha_min, where these are many."""
        found = {}
        for name in self.methods:
            if name in self.unranked:
                continue
            if not {"msi", "mask_penalty"} <= {*self.rows.columns(name)}:
                continue
            count = self.rows.zeros(name, "mask_penalty")  # a mask of no pixel has no penalty
            if count > MOST_EMPTY * self.n:
                found[name] = count
        return found

    def labels(self) -> dict[str, str]:
        """Return the names of sources in figures, with (control) or (class-agnostic)."""
        kinds = dict.fromkeys(self._agnostic, " (class-agnostic)")
        kinds |= dict.fromkeys(self.controls, " (control)")
        found = {name: f"{name}{kinds.get(name, '')}" for name in self.methods}
        if ZERO_LINE in found:
            found[ZERO_LINE] = ZERO_LABEL
        return found

    @property
    def alpha_min(self) -> float:
        """Where the sources are compared."""
        return self.record.alpha_min

    @property
    def n(self) -> int:
        """The number of images that were scored."""
        return self.record.n

    @property
    def names(self) -> list[str]:
        """The images that were scored; all names are read."""
        return list(self.rows.names(self.methods[0]))

    def names_of(self, rows: Sequence[int]) -> list[str]:
        """Return the names of some images."""
        found: list[str] = self.rows.some(self.methods[0], rows, ["image"])["image"].tolist()
        return found

    @property
    def skipped(self) -> dict[str, str]:
        """The first images that were not scored, and why; skipped.csv has all of them."""
        return {one["name"]: one["reason"] for one in self.record.skipped}

    @cached_property
    def conditions(self) -> list[RankedCondition]:
        """How the sources rank with every fill, and for the twin; the first one first."""
        return list(self.record.conditions)

    @cached_property
    def scores(self) -> dict[str, MethodScores]:
        """Every source's scores."""
        return {name: self._scores(name) for name in self.methods}

    def table(self) -> "pandas.DataFrame":
        """Return the mean of every column: one row per source, best first."""
        import pandas

        means = {
            name: {column: estimate.mean for column, estimate in self.summaries[name].items()}
            for name in self.methods
        }
        return pandas.DataFrame.from_dict(means, orient="index")

    def as_json(self) -> dict[str, Any]:
        """Return what --json prints."""
        left_out = ("skipped", "class_names", "alpha_curve", "search", "chance", "made")
        facts = {name: one for name, one in self.record.made.items() if name != "config"}
        for one in fields(self.record):
            if one.name not in left_out:
                facts[one.name] = getattr(self.record, one.name)
        columns = {name: self.summaries[name] for name in self.methods}
        facts |= {"unmarked": self.unmarked}
        if self.standing is not None and self.shown is not None:
            facts |= {"verdict": asdict(self.verdict)}
        found: dict[str, Any] = plain({**facts, "columns": columns, "standing": self.standing})
        return found

    def __str__(self) -> str:
        if self.standing is None or self.shown is None:
            return repr(self)
        return "\n".join([*self.verdict.lines, *self.verdict.warnings])

    def __repr__(self) -> str:
        known = {name: found["msi"] for name, found in self.summaries.items() if "msi" in found}
        msi = ", ".join(f"{name}={one.mean:.4f}" for name, one in known.items()) or "not scored"
        return f"RunResults(n={self.n}, alpha_min={self.alpha_min:g}, msi: {msi})"

    def log(self) -> None:
        """Log the mean of every column, if the run's config names a log."""
        if self.config.log is None:
            return
        logger = logger_named(self.config.log, self.folder, asdict(self.config))
        rows = self.summaries.items()
        means = {f"{m}/{column}": one.mean for m, row in rows for column, one in row.items()}
        log_numbers(logger, means, self.n)
        close_logger(logger)

    def _repr_html_(self) -> str:
        """Return the tables as a notebook shows them."""
        from sufficit.report.tables import notebook_table

        if self.standing is None or self.shown is None:
            return str(self.table().round(3).to_html())
        return notebook_table(self.content())

    def plot(
        self, show: str = "sheet", methods: Sequence[str] | None = None, **options: Any
    ) -> "Figure":
        """Draw images with heatmaps ("sheet"), "curves", "alpha" or "sizes", as `sufficit figure`.

        `methods` are those without the controls unless given. A sheet takes images=["best:2"].
        """
        from sufficit.runs.shown import draw

        return draw(self, show, methods, **options)

    def report(self, path: Path | str = "report.html") -> Path:
        """Write the report, one HTML file, and return its path."""
        from sufficit.report import write_report

        return write_report(path, self.content())

    def content(self) -> Content:
        """Return what a report, a table or a figure shows."""
        if self.standing is None or self.shown is None:
            raise UserError(
                "a report shows MSI on images of one size: score the column msi, with --size"
            )
        config = self.config
        record = self.record
        # A page of many images would be too large: their rows are not offered for download.
        few = self.n * len(self.methods) <= MOST_ROWS
        return Content(
            title=f"{len(self.standing.ranking)} methods on {config.model}",
            facts=Facts.of(
                record.made,
                model=config.model,
                data=config.data,
                seed=config.seed,
                n_skipped=record.n_skipped,
                targets=record.targets,
            ),
            headings=record.columns,
            scores=self.scores,
            summaries=self.summaries,
            standing=self.standing,
            rows={method: self.rows[method] for method in self.methods} if few else {},
            shown=self.shown,
            classes=record.class_names,
            remarks=self.remarks(),
            alpha_curve=record.alpha_curve,
            conditions=self.conditions,
            class_agnostic=self._agnostic,
            unmarked=self.unmarked,
            fit_fills={n: one.fit_fills for n, one in record.sources.items() if one.fit_fills},
            made=self.made(),
        )

    @cached_property
    def verdict(self) -> Verdict:
        """What the scores say: the answer, how sure it is, what would change it, warnings."""
        return verdict(self.content())

    def made(self) -> list[str]:
        """Return how the scores were made, in sentences that are no warnings."""
        found = []
        within = self.record.within
        if within is not None and within["reached"]:
            found.append(within["words"])
        if self.record.sampled:
            found.append(self.record.sampled)
        return found

    def remarks(self) -> list[str]:
        """Return warnings that only the run itself can give."""
        record = self.record
        # Those that are empty in many images are warned of as maps that mark nothing.
        empty = {m: k for m, k in record.empty_heatmaps.items() if m not in self.unmarked}
        found = run_remarks(self.n, empty, random_weights=self.config.weights == "none")
        if record.within is not None and not record.within["reached"]:
            found.append(record.within["words"])
        if record.output_remark:
            found.append(record.output_remark)
        if record.stretched_heatmaps:
            found.append(
                f"{record.n_stretched} heatmaps (first {record.stretched_heatmaps[0]}) have other"
                " proportions than the model's input and are stretched to it: were they made on"
                " the uncropped image?"
            )
        truth = record.truth
        if truth is not None and truth.n_without:
            found.append(
                f"{truth.n_without} of {self.n} images have no truth, or their object is not in"
                " the model's view: columns that compare with it leave them out."
            )
        if truth is not None and truth.bad:
            name, reason = next(iter(truth.bad.items()))
            found.append(f"The truth of {truth.n_bad} images is unusable: {name}: {reason}.")
        measured = self.summaries[self.methods[0]].keys()
        if "leak" in self.config.wanted_checks and not measured & {"leak_ratio", "leak_lift"}:
            found.append("Leakage was not measured: all images it could use are of one class.")
        return found

    def class_names(self, rows: Sequence[int]) -> list[str]:
        """Return the target classes of some images, by name where the run knows names."""
        known = self.record.class_names or []
        targets = self.rows.some(self.methods[0], rows, ["target"])["target"].tolist()
        return [known[k] if k < len(known) else f"class {k}" for k in targets]

    def images(self, rows: Sequence[int], data: str | Path | None = None) -> Tensor:
        """Return some images as the model saw them: those shown, else from the data: [n,C,H,W]."""
        if self.shown is not None and {*rows} <= {*self.shown.rows}:
            return self.shown.images[[self.shown.rows.index(row) for row in rows]]
        root = data or self.config.data
        # Columns of parquet files that the run named; another folder may have none.
        columns = {} if data else self.config.column_options()
        names = self.names_of(rows)
        found = {one.name: one for one in open_images(root, **columns) if one.name in {*names}}
        missing = [name for name in names if name not in found]
        if missing:
            raise UserError(f"{missing[0]} is not in {root}: give --data the folder it is in now")
        view = self.record.preprocessing
        seen = None if view is None else View(**view)
        return torch.stack([found[name].read(seen) for name in names])

    def heatmaps(self, rows: Sequence[int], methods: Sequence[str]) -> dict[str, Tensor]:
        """Return some images' heatmaps as they were scored: source -> [n,H,W]."""
        if self.shown is not None and {*rows} <= {*self.shown.rows}:
            places = [self.shown.rows.index(row) for row in rows]
            return {method: self.shown.heatmaps[method][places] for method in methods}
        store = Store(self.folder, self.record.run)
        names = self.names_of(rows)
        wanted = {*names}
        found: dict[str, dict[str, Tensor]] = {}  # by image and source
        # There is no index of names: the maps of each unit say which images they are of.
        for unit in sorted(store.done(place=MAPS)):
            kept = store.read_maps(unit)
            if not wanted & {*kept.names}:
                continue
            drawn = heatmaps_of(kept, self.config.seed)
            for i, name in enumerate(kept.names):
                if name in wanted:
                    found[name] = {method: drawn[method][i] for method in methods}
        missing = wanted - {*found}
        if missing:
            raise UserError(
                f"{self.folder} has no heatmaps of {min(missing)}: run it again with --overwrite,"
                " in Python with out=FOLDER"
            )
        return {m: torch.stack([found[name][m] for name in names]) for m in methods}

    def _scores(self, name: str) -> MethodScores:
        """Return the scores of a source: means of all images, values of those that are shown."""
        shown = self.shown
        config = self.config
        searched = self.record.search
        columns = self.rows.columns(name)
        frame = self.rows.some(name, shown.rows if shown else (), ["target", *columns])
        (schedule,) = schedules_for(
            [self.alpha_min], config.score_kind, config.value_step, config.percent_step
        )
        tried = None
        if searched is not None:
            tried = dict(zip(searched.alphas, searched.mean_msi[name], strict=True))
        return MethodScores(
            n=self.n,
            columns={c: torch.tensor(frame[c].to_numpy(np.float64)) for c in columns},
            targets=torch.tensor(frame["target"].to_numpy(np.int64)),
            clean=self.record.clean_accuracy,
            alpha_min=self.alpha_min,
            schedule=schedule,
            curves=self.curves[name],
            shown=NONE_SHOWN if shown is None else shown.predictions[name],
            alphas=tried,
        )


def _read_record(folder: Path) -> Mapping[str, Any]:
    """run.json of a finished run."""
    if not (folder / "run.json").exists():
        advice = "sufficit compare makes one"
        if (folder / UNITS).exists():
            advice = "run the same command again to resume it"
        raise UserError(f"{folder} holds no finished run: {advice}")
    record: dict[str, Any] = read_json(folder / "run.json", MOST_RECORD)
    if not {"methods", "columns", "config"} <= record.keys():
        raise UserError(f"{folder} holds a run of another kind or version: give a run of compare")
    return record


def _read_curves(known: Mapping[str, Mapping[str, Any]], kind: str) -> dict[str, MeanCurve]:
    """Return the mean curves of a source, of the run's kind of score."""
    return {
        name: MeanCurve(
            tuple(curve["grid"]),
            torch.tensor([float("nan") if y is None else y for y in curve[kind]]).double(),
        )
        for name, curve in known.items()
    }


def _read_estimates(columns: Mapping[str, Mapping[str, Any]]) -> dict[str, Estimate]:
    """Return the means and intervals of a source in summary.json."""
    known: dict[str, Estimate] = {}
    for name, one in columns.items():
        # JSON has no word for an interval without end.
        endless = one["low"] is not None and one["high"] is None
        known[name] = typed(Estimate, {**one, "high": math.inf} if endless else one)
    own = known.get("leak")
    chance = known.get("leak_chance")
    ratio = known.get("leak_ratio")
    if own and chance and ratio and own.mean > 0 == chance.mean:
        # The ratio is infinite, and so is its lower end where that is not 0.
        low = math.inf if ratio.n > 1 and math.isnan(ratio.low) else ratio.low
        known["leak_ratio"] = replace(ratio, mean=math.inf, low=low, high=math.inf)
    return known
