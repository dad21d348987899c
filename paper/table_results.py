"""Write the results of a table: rows, means with intervals, our rows beside the paper's."""

import json
from collections.abc import Mapping
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from tables import COLUMNS, TABLES, TITLES

FURTHER = {
    "msi_held_out": "MSI, held-out fill ↑",
    "msi_twin": "MSI, twin ↑",
    "leak_ratio": "leak / chance",
    "iou": "IoU ↑",
    "pointing": "pointing ↑",
}
DRAWS = 1000  # of the bootstrap
ABOUT_THE_RUN = ("command", "time", "commit", "versions", "device", "model_calls")
Summary = dict[str, dict[str, Any]]  # column -> mean, low, high, n


def write_results(out: Path, facts: Mapping[str, Any], adapters: Mapping[str, str]) -> None:
    """Write table.md, summary.json, rows.parquet, alpha.json and run.json to OUT/results.

    `facts` are what is known of the training, `adapters` the recipe of each adapter by name.
    """
    run = json.loads((out / "compare" / "run.json").read_text())
    folder = out / "results"
    folder.mkdir(exist_ok=True)
    frames = {name: rows_of(out / "compare", name) for name in run["methods"]}
    pooled = pool_seeds(frames, adapters)
    seed = facts["config"]["seed"]
    summaries = {name: summary_of(frame, seed) for name, frame in pooled.items()}
    runs = {name: summary_of(frame, seed) for name, frame in frames.items()}
    seeds = spread_of_seeds(frames, adapters)
    write_json(folder / "summary.json", {"methods": summaries, "runs": runs, "seeds": seeds})
    lines = table_lines(facts["table"], summaries)
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    labelled = [frame.assign(method=name) for name, frame in frames.items()]
    pandas.concat(labelled).to_parquet(folder / "rows.parquet", index=False)
    if run.get("alpha_curve"):
        write_json(folder / "alpha.json", alpha_of(run["alpha_curve"], adapters))
    known = {name: run.get(name) for name in ("n", "alpha_min", "clean_accuracy", *ABOUT_THE_RUN)}
    write_json(folder / "run.json", known | dict(facts))


def rows_of(compared: Path, method: str) -> pandas.DataFrame:
    """Read the scores of a method, one row per image."""
    return pandas.read_parquet(compared / method / "scores.parquet")


def pool_seeds(
    frames: Mapping[str, pandas.DataFrame], adapters: Mapping[str, str]
) -> dict[str, pandas.DataFrame]:
    """Replace the adapters of a recipe by their mean per image; sort by TITLES."""
    found = {name: frame for name, frame in frames.items() if name not in adapters}
    for recipe in dict.fromkeys(adapters.values()):
        own = [
            frames[name].select_dtypes("number") for name in adapters if adapters[name] == recipe
        ]
        found[f"lax-{recipe}"] = reduce(add, own) / len(own)
    order = [*TITLES, *found]
    return {name: found[name] for name in sorted(found, key=order.index)}


def summary_of(frame: pandas.DataFrame, seed: int) -> Summary:
    """Return mean and interval of every column, and of the leakage ratio."""
    values = frame.select_dtypes("number").astype(float)
    found = {
        name: interval(values[name].dropna().to_numpy(), seed)
        for name in values.columns
        if name not in ("target", "clean_accuracy")
    }
    if {"leak", "leak_chance"} <= found.keys() and found["leak_chance"]["mean"]:
        ratio = found["leak"]["mean"] / found["leak_chance"]["mean"]
        found["leak_ratio"] = {"mean": ratio, "n": found["leak"]["n"]}
    return found


def interval(values: np.ndarray, seed: int) -> dict[str, Any]:
    """Return the mean of a column and its 95 % interval over images, by bootstrap."""
    n = len(values)
    if not n:
        return {"mean": None, "low": None, "high": None, "n": 0}
    drawn = np.random.default_rng(seed).integers(n, size=(DRAWS, n))
    low, high = np.quantile(values[drawn].mean(axis=1), (0.025, 0.975))
    return {"mean": float(values.mean()), "low": float(low), "high": float(high), "n": n}


def spread_of_seeds(
    frames: Mapping[str, pandas.DataFrame], adapters: Mapping[str, str]
) -> dict[str, Any]:
    """Return the MSI of every adapter of a recipe, and their standard deviation."""
    found = {}
    for recipe in dict.fromkeys(adapters.values()):
        means = [float(frames[name].msi.mean()) for name in adapters if adapters[name] == recipe]
        sd = float(np.std(means, ddof=1)) if len(means) > 1 else None
        found[recipe] = {"msi": means, "sd": sd}
    return found


def alpha_of(curve: Mapping[str, Any], adapters: Mapping[str, str]) -> dict[str, Any]:
    """Return MSI over alpha_min of every method, on the sample of images the run has it for."""
    means = {name: one for name, one in curve["mean_msi"].items() if name not in adapters}
    for recipe in dict.fromkeys(adapters.values()):
        own = [curve["mean_msi"][name] for name in adapters if adapters[name] == recipe]
        means[f"lax-{recipe}"] = np.mean(own, axis=0).tolist()
    best = {name: curve["alphas"][int(np.argmax(values))] for name, values in means.items()}
    n = curve["images"]
    return {"alphas": curve["alphas"], "n": n, "best": best, "mean_msi": means}


def table_lines(table: str, summaries: Mapping[str, Summary]) -> list[str]:
    """Return the table as markdown, each of our rows followed by the paper's."""
    shown = {k: v for k, v in FURTHER.items() if any(k in s for s in summaries.values())}
    heads = ["method", *COLUMNS.values(), "95 % of MSI", *shown.values()]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for method in [name for name in TITLES if name in summaries]:
        summary = summaries[method]
        cells = [number(summary[name]["mean"]) for name in COLUMNS]
        cells.append(f"{number(summary['msi']['low'], 2)} .. {number(summary['msi']['high'], 2)}")
        cells += [number(summary.get(name, {}).get("mean"), 2) for name in shown]
        lines.append(f"| {TITLES[method]} | {' | '.join(cells)} |")
        printed = TABLES[table].printed_row(method)
        if printed:
            cells = [f"*{number(printed[name])}*" for name in COLUMNS] + [""] * (1 + len(shown))
            lines.append(f"| *paper* | {' | '.join(cells)} |")
    return lines


def number(value: float | None, digits: int = 3) -> str:
    """Return a number of a table, or a dash if there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def write_json(path: Path, content: object) -> None:
    """Write a file whole or not at all: it is a mark that a stage is done."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)
