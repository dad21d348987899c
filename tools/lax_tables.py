"""The tables of docs/measurements.md from the rows in results/lax: python tools/lax_tables.py"""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

FOLDER = Path(__file__).parent.parent / "results" / "lax"
Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    """The rows of a file, under the names of today."""
    rows = json.loads((FOLDER / name).read_text())["rows"]
    return [_renamed(row) for row in rows]


def _renamed(row: Row) -> Row:
    if "task" in row:
        return row
    tasks = {"C": "cifar10", "M": "synthetic-mnist"}
    letter, _, arm = row["arm"].partition(" ")
    return {
        "task": tasks[letter],
        "arm": arm,
        "msi": row["msi"],
        "base_score": row["base"],
        "mask_penalty": row["penalty"],
        "leak": row["leak"],
        "leak_chance": row["chance"],
        "leak_ratio": row["ratio"],
        "seed": row["seed"],
    }


def table(rows: Iterable[Row]) -> str:
    """A row an arm, means over its seeds; where there are several, MSI and ratio of each."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["arm"]), []).append(row)
    head = "| data | arm | seeds | base | penalty | MSI | leak | chance | ratio |\n"
    lines = [_line(task, arm, found) for (task, arm), found in groups.items()]
    return head + "|---|---|---:|---:|---:|---:|---:|---:|---:|\n" + "\n".join(lines)


def _line(task: str, arm: str, rows: list[Row]) -> str:
    names = ("base_score", "mask_penalty", "msi", "leak", "leak_chance")
    means = {name: mean(row[name] for row in rows) for name in names}
    cells = [f"{means[name]:.3f}" for name in names]
    ratio = means["leak"] / means["leak_chance"] if means["leak_chance"] else float("nan")
    told = f"{ratio:.2f}"
    if len(rows) > 1:
        cells[2] += f" ({', '.join(format(row['msi'], '.3f') for row in rows)})"
        told += f" ({', '.join(format(row['leak_ratio'], '.2f') for row in rows)})"
    return f"| {task} | {arm} | {len(rows)} | {' | '.join(cells)} | {told} |"


if __name__ == "__main__":
    for file in (
        "arms-cifar10.json",
        "arms-cifar10-2.json",
        "arms-digits.json",
        "runs.json",
        "round-4.json",
        "round-3.json",
        "round-2.json",
        "round-1.json",
    ):
        print(f"\n{file}\n\n{table(rows_of(file))}")
