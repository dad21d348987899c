"""The rows of many units at a time, as arrays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sufficit.runs.store import Store
from sufficit.runs.unit_rows import Rows
from sufficit.sums import Floats

TOGETHER = 4096  # images that are added up at a time, at least, where there are so many
Table = dict[str, dict[str, Floats]]  # source -> column -> [n]


@dataclass(frozen=True)
class Group:
    """The rows of several units, joined."""

    units: Sequence[int]
    names: Sequence[str]
    numbers: Sequence[int]
    targets: np.ndarray[Any, Any]
    table: Table
    rows: Sequence[Rows]


def groups(store: Store, units: range, *, answers: bool = False) -> Iterator[Group]:
    """Yield the rows of all units, some thousand images at a time."""
    # Units are small: arrays of a few rows would cost more than the sums.
    waiting: list[Rows] = []
    for unit in units:
        waiting.append(store.read(unit, answers=answers))
        if sum(map(len, waiting)) >= TOGETHER:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(parts: Sequence[Rows]) -> Group:
    """Return the rows of some units as one group."""
    some = [rows for rows in parts if len(rows)]
    sources = dict.fromkeys(source for rows in some for source in rows.values)
    return Group(
        units=[rows.unit for rows in some for _ in rows.names],
        names=[name for rows in some for name in rows.names],
        numbers=[number for rows in some for number in rows.numbers],
        targets=np.concatenate([np.zeros(0, np.int64), *(rows.targets.numpy() for rows in some)]),
        table={source: _columns_of(source, some) for source in sources},
        rows=parts,
    )


def _columns_of(source: str, parts: Sequence[Rows]) -> dict[str, Floats]:
    """Return the columns of a source; NaN where a probe of some images looked at none of a unit."""
    tables = [rows.values.get(source, {}) for rows in parts]
    names = dict.fromkeys(name for table in tables for name in table)
    blank = {len(rows): torch.full((len(rows),), torch.nan, dtype=torch.float64) for rows in parts}
    return {
        name: torch.cat(
            [table.get(name, blank[len(rows)]) for rows, table in zip(parts, tables, strict=True)]
        ).numpy()
        for name in names
    }


def nothing(n: int) -> Floats:
    """Return a column without values: [n]."""
    return np.full(n, np.nan)
