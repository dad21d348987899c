"""The results of a table: read from its runs without data, weights or GPU, and written as files."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from sufficit import plots
from sufficit.classifier.checkpoint import View
from sufficit.data.images import list_images
from sufficit.data.splits import evenly
from sufficit.errors import UserError
from sufficit.files import make_folder, read_json, writing
from sufficit.metrics.columns import heading, higher_is_better
from sufficit.metrics.plan import make_plan
from sufficit.metrics.scores import summarise
from sufficit.provenance import plain, save_json
from sufficit.report import write_report
from sufficit.reproduce.paper_tables import COLUMNS, TITLES, table_named
from sufficit.reproduce.table_plan import SECONDS, TRAINED, TablePlan, read_plan
from sufficit.runs.config import CONTROLS
from sufficit.runs.results import RunResults
from sufficit.statistics import Estimate
from sufficit.sums import Floats

SHEET, DRAWN = 6, 12  # images on the sheet, of those drawn for it
CLASSIFIER_FACTS = ("test_accuracy", "test_images", "train_images", "random_at_first", "data")
FACTS = (  # of the run that scored the table
    *("command", "time", "commit", "versions", "device"),
    *("n", "clean_accuracy", "empty_heatmaps", "model_calls"),
)
HEADINGS = {c: f"{heading(c).short} {'↑' if higher_is_better(c) else '↓'}" for c in COLUMNS}
FURTHER = {"leak_ratio": "leak / chance", "iou": "IoU ↑", "pointing": "pointing ↑"}
Columns = Mapping[str, Floats]  # column -> [N]
Summary = dict[str, dict[str, Any]]  # column -> Estimate, as JSON has it


@dataclass(frozen=True)
class TableResults:
    """A finished table: what its two runs found."""

    folder: Path
    plan: TablePlan
    compared: RunResults
    searched: RunResults
    columns: Mapping[str, Columns]  # method -> column -> [N]
    trained: Mapping[str, Any]  # the classifier: test accuracy, numbers of images, data

    @staticmethod
    def read(out: Path) -> "TableResults":
        """The results of a folder in which every stage is done."""
        plan = read_plan(out)
        compared, searched = (RunResults.read(out / stage) for stage in ("compare", "search"))
        try:
            known = read_json(out / "classifier" / TRAINED)
            trained = {fact: known[fact] for fact in CLASSIFIER_FACTS}
            columns: dict[str, Columns] = {
                name: {c: compared.rows.column(name, c) for c in compared.rows.columns(name)}
                for name in plan.methods
            }
        except (KeyError, TypeError, IndexError, AttributeError, SafetensorError) as error:
            raise UserError(
                f"{out} is incomplete or corrupt ({error!r}): copy it again, or use --overwrite"
            ) from error
        return TableResults(out, plan, compared, searched, columns, trained)

    @cached_property
    def pooled(self) -> dict[str, Columns]:
        """The columns per method; an adapter's are the mean over the seeds of its recipe."""
        found = {name: self.columns[name] for name in self.plan.peers}
        for recipe, names in self.recipes.items():
            own = [self.columns[name] for name in names]
            found[f"lax-{recipe}"] = {c: np.mean([one[c] for one in own], axis=0) for c in own[0]}
        return found | {name: self.columns[name] for name in CONTROLS}

    @cached_property
    def recipes(self) -> dict[str, list[str]]:
        """The adapters of each recipe; nothing where the table has none."""
        found: dict[str, list[str]] = {}
        for name, (recipe, _) in self.plan.adapters.items():
            found.setdefault(recipe, []).append(name)
        return found

    def summary(self, columns: Columns) -> dict[str, Estimate]:
        """Mean and interval of every column of a method, and of its leakage ratio."""
        plan = make_plan(**self.compared.config.plan_options())
        return summarise(columns, plan, seed=self.plan.seed)

    def write(self, folder: Path, *, report: bool = True) -> None:
        """Write table.md, summary.json, rows.parquet, alpha.json, figures, run.json, report."""
        import pandas

        make_folder(folder)
        pooled, own = (
            {name: plain(self.summary(columns)) for name, columns in methods.items()}
            for methods in (self.pooled, self.columns)
        )
        seeds = {}
        for recipe, names in self.recipes.items():
            means = [float(np.nanmean(self.columns[name]["msi"])) for name in names]
            sd = float(np.std(means, ddof=1)) if means[1:] else None
            seeds[recipe] = {"msi": means, "sd": sd}
        save_json(folder / "summary.json", {"methods": pooled, "runs": own, "seeds": seeds})
        with writing(folder / "table.md") as path:
            path.write_text("\n".join(table_lines(self.plan.table, pooled)) + "\n")
        images = self.compared.rows[CONTROLS[0]][["image", "target", "clean_accuracy"]]
        frames = []
        for name, columns in self.columns.items():
            frames.append(images.assign(**columns))
            frames[-1].insert(0, "method", name)
        with writing(folder / "rows.parquet") as path:
            pandas.concat(frames).to_parquet(path, index=False)
        curves = self.alpha_curves()
        save_json(folder / "alpha.json", curves)
        lines = {name: (curves["alphas"], means) for name, means in curves["mean_msi"].items()}
        mark = self.plan.paper.alpha_min
        title = f"MSI over alpha_min, compared at {mark:g}"
        panel = plots.Panel(title, "alpha_min", "mean MSI", lines, mark=mark, unit=False)
        words = f"{self.plan.paper.title}: mean over {curves['n']} images"
        plots.save(plots.lines_figure([panel], CONTROLS, words=words), folder / "alpha.png")
        plots.save(self._sheet(), folder / "sheet.png", dpi=80)
        save_json(folder / "run.json", self.record())
        if report:
            self._report(folder / "report.html")

    def record(self) -> dict[str, Any]:
        """What run.json holds: plan, provenance, accuracy and the seconds of each stage."""
        compared, plan = self.compared, self.plan
        return {
            "config": asdict(plan),
            **{name: compared.record[name] for name in FACTS},
            **{"table": plan.table, "seed": plan.seed, "alpha_min": compared.alpha_min},
            "classifier": dict(self.trained),
            "seconds": seconds_in(self.folder),
        }

    def alpha_curves(self) -> dict[str, Any]:
        """Mean MSI of every method over alpha_min, and where it is highest."""
        search = self.searched.record["search"]
        found = {name: np.array(v, np.float64) for name, v in search["mean_msi"].items()}
        means = {name: found[name] for name in self.pooled if name in found}
        for recipe, names in self.recipes.items():
            means[f"lax-{recipe}"] = np.mean([found[name] for name in names], axis=0)
        return {
            "alphas": search["alphas"],
            "n": self.searched.record["n"],
            "best": {name: search["alphas"][int(np.nanargmax(v))] for name, v in means.items()},
            "mean_msi": {name: values.tolist() for name, values in means.items()},
        }

    def _sheet(self) -> Any:
        """Some images drawn by the seed, with the heatmap of every method; one seed per recipe."""
        names, side, seed = self.compared.names, self.plan.side, self.plan.seed
        targets = torch.tensor(self.compared.rows.column(CONTROLS[0], "target"))
        rows = evenly(targets, DRAWN, seed)[:SHEET].tolist()
        files = {image.name: image for image in list_images(self.folder / "test")}
        images = torch.stack([files[names[row]].read(View((side, side))) for row in rows])
        first = [f"lax-{recipe}-{seed}" for recipe in self.recipes]
        maps = self.compared.heatmaps(rows, [*self.plan.peers, *first, *CONTROLS])
        captions = {m: [f"MSI {self.columns[m]['msi'][row]:+.2f}" for row in rows] for m in maps}
        classes = [names[row].partition("/")[0] for row in rows]
        titles = [name.partition(".")[2] or name for name in classes]  # CUB-200 numbers its classes
        return plots.sheet_figure(images, maps, titles, captions)

    def _report(self, path: Path) -> None:
        """The report of the comparison, with the table's title and the searched alpha_min."""
        content, search = self.compared.content(), self.searched
        step, calls = search.config.value_step, search.record["model_calls"]
        more = {"images": search.names, "value_step": step, "model_calls": calls}
        curve = search.record["search"] | more
        right = f"{self.trained['test_accuracy']:.1%} of {self.trained['test_images']} images"
        more = {**content.facts.more, "test accuracy": right}
        facts = replace(content.facts, model=self.plan.model, data=self.trained["data"], more=more)
        title = f"{self.plan.paper.title}: {self.plan.model}"
        write_report(path, replace(content, title=title, facts=facts, alpha_curve=curve))


def table_lines(table: str, summaries: Mapping[str, Summary]) -> list[str]:
    """The table as markdown, each of our rows followed by the paper's; summaries as in JSON."""
    shown = {k: v for k, v in FURTHER.items() if any(k in s for s in summaries.values())}
    heads = ["method", *HEADINGS.values(), "95 % of MSI", *shown.values()]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for method in [name for name in TITLES if name in summaries]:
        summary = summaries[method]
        cells = [number(summary[name]["mean"]) for name in HEADINGS]
        cells.append(f"{number(summary['msi']['low'], 2)} .. {number(summary['msi']['high'], 2)}")
        cells += [number(summary.get(name, {}).get("mean"), 2) for name in shown]
        lines.append(f"| {TITLES[method]} | {' | '.join(cells)} |")
        if printed := table_named(table).printed_row(method):
            cells = [f"*{number(printed[name])}*" for name in HEADINGS] + [""] * (1 + len(shown))
            lines.append(f"| *paper* | {' | '.join(cells)} |")
    return lines


def number(value: float | None, digits: int = 3) -> str:
    """A number of a table, or a dash if there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def seconds_in(out: Path) -> dict[str, float]:
    """The seconds of each stage so far; nothing where the file is missing or corrupt."""
    try:
        return {str(stage): float(took) for stage, took in read_json(out / SECONDS).items()}
    except (UserError, AttributeError, TypeError, ValueError, OverflowError):
        return {}
