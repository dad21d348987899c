"""Write what a table's run found: one row per image and method, and the facts of the run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas

ABOUT_THE_RUN = ("command", "time", "commit", "versions", "device", "model_calls")
FACTS = ("n", "alpha_min", "clean_accuracy", "leak_ratio", "rank_shares", *ABOUT_THE_RUN)


def write_results(out: Path, facts: Mapping[str, Any]) -> None:
    """Write rows.parquet and run.json to OUT/results, from the run in OUT/compare.

    `facts` are what is known of the training. Means, intervals and tables are made of the rows.
    """
    run = json.loads((out / "compare" / "run.json").read_text())
    folder = out / "results"
    folder.mkdir(exist_ok=True)
    labelled = []
    for name in run["methods"]:
        rows = pandas.read_parquet(out / "compare" / name / "scores.parquet")
        rows.insert(0, "method", name)
        labelled.append(rows)
    pandas.concat(labelled, ignore_index=True).to_parquet(folder / "rows.parquet", index=False)
    cost = {name: source["passes"] for name, source in run["sources"].items()}
    known = {name: run.get(name) for name in FACTS} | {"cost": cost}
    write_json(folder / "run.json", known | dict(facts))


def write_json(path: Path, content: object) -> None:
    """Write a file whole or not at all: it is a mark that a stage is done."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)
