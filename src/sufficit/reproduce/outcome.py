"""What came out of a run, read from its files alone: no model, no data, no GPU."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sufficit.errors import UserError
from sufficit.metrics.registry import higher_is_better
from sufficit.reproduce.clock import Clock
from sufficit.reproduce.kept import Kept
from sufficit.reproduce.plans import NUMBERS, TIMINGS, Plan, read_plan
from sufficit.statistics import Estimate, Floats, estimates, ratio_estimate

PLACES = {"iou": True, "pointing": True}
Columns = dict[str, Floats]


@dataclass(frozen=True)
class Outcome:
    """Every method's value of each column for each image, and what is known of the run."""

    plan: Plan
    names: tuple[str, ...]
    targets: tuple[int, ...]
    clean: Floats  # [N] whether the whole image was right
    columns: dict[str, Columns]  # method -> column -> [N]
    facts: dict[str, Any]
    trained: dict[str, Any]
    seconds: dict[str, float]
    alphas: tuple[float, ...] = ()
    search: dict[str, Floats] | None = None  # method -> [n,A]

    @property
    def n(self) -> int:
        """How many images were scored."""
        return len(self.names)

    def pooled(self) -> dict[str, Columns]:
        """The same, the seeds of each recipe of LAX as one method: each image's mean over them."""
        found = {m: v for m, v in self.columns.items() if m not in self.plan.adapters}
        for recipe in self.plan.recipes:
            own = [self.columns[m] for m, (r, _) in self.plan.adapters.items() if r == recipe]
            if own:
                found[f"lax-{recipe}"] = {
                    name: np.mean([one[name] for one in own], axis=0) for name in own[0]
                }
        return found

    def pooled_search(self) -> dict[str, Floats]:
        """MSI over alpha_min, the seeds of each recipe as one method: each [n,A]."""
        search = self.search or {}
        found = {m: values for m, values in search.items() if m not in self.plan.adapters}
        for recipe in self.plan.recipes:
            own = [search[m] for m, (r, _) in self.plan.adapters.items() if r == recipe]
            if own:
                found[f"lax-{recipe}"] = np.mean(own, axis=0)
        return found

    def seed_means(self, recipe: str, column: str) -> list[float]:
        """The mean of a column for each seed of a recipe."""
        return [
            float(np.nanmean(self.columns[name][column]))
            for name, (own, _) in self.plan.adapters.items()
            if own == recipe
        ]


def read_outcome(out: Path) -> Outcome:
    """All that the files of a run say."""
    try:
        return _read_outcome(out)
    except UserError:
        raise
    except Exception as error:  # anything may stand in files that came from elsewhere
        raise UserError(
            f"{out / NUMBERS} is damaged ({error!r}): take it from where it was made, or delete it"
        ) from error


def _read_outcome(out: Path) -> Outcome:
    numbers = out / NUMBERS
    tensors, facts = Kept(numbers / "scores.safetensors").read()
    columns: dict[str, Columns] = {method: {} for method in facts["methods"]}
    _sort_in(columns, tensors)
    places = Kept(numbers / "places.safetensors")
    if places.exists():
        found, told = places.read()
        if told["names"] == facts["names"]:
            _sort_in(columns, found)
    alphas, search = _searched(Kept(numbers / "search.safetensors"))
    for method, known in columns.items():
        for name, values in known.items():
            if values.shape != (len(facts["names"]),):
                raise ValueError(f"{method} {name} has {list(values.shape)} values")
    return Outcome(
        plan=read_plan(out),
        names=tuple(facts["names"]),
        targets=tuple(facts["targets"]),
        clean=tensors["clean"].numpy().astype(np.float64),
        columns=columns,
        facts=facts,
        trained=facts["classifier"],
        seconds=Clock(out / TIMINGS, print).seconds(),
        alphas=alphas,
        search=search,
    )


def summary_of(columns: Columns, seed: int) -> dict[str, Estimate]:
    """Mean and interval of every column of a method."""
    ways = {name: PLACES[name] if name in PLACES else higher_is_better(name) for name in columns}
    summary = estimates(columns, ways, seed=seed)
    if "leak" in columns:
        summary["leak_ratio"] = ratio_estimate(columns["leak"], columns["leak_chance"], seed=seed)
    return summary


def paper_rows(table: str) -> dict[str, dict[str, float]]:
    """The paper's numbers of a table, if it has such: method -> column -> value."""
    content = tomllib.loads((Path(__file__).parent / "paper.toml").read_text())
    columns: Sequence[str] = content["columns"]
    rows = content.get(table, {"rows": {}})["rows"]
    return {name: dict(zip(columns, row, strict=True)) for name, row in rows.items()}


def _sort_in(columns: dict[str, Columns], tensors: Mapping[str, Any]) -> None:
    for key, values in tensors.items():
        method, _, name = key.rpartition("/")
        if method:
            columns[method][name] = values.numpy().astype(np.float64)


def _searched(kept: Kept) -> tuple[tuple[float, ...], dict[str, Floats] | None]:
    if not kept.exists():
        return (), None
    tensors, facts = kept.read()
    found = {m: tensors[f"{m}/msi"].numpy().astype(np.float64) for m in facts["methods"]}
    return tuple(facts["alphas"]), found
