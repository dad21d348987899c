"""The rows of many units at a time, as arrays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
    """The rows of all units, some thousand images at a time; units without images are left out."""
    waiting: list[Rows] = []
    for unit in units:
        rows = store.read(unit, answers=answers)
        waiting.append(rows)
        if sum(map(len, waiting)) >= TOGETHER:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(parts: Sequence[Rows]) -> Group:
    some = [rows for rows in parts if len(rows)]
    columns = {(s, n): None for rows in some for s, own in rows.values.items() for n in own}
    table: Table = {}
    for source, name in columns:
        # A probe of some images may have looked at none of a unit.
        found = [
            own[name].numpy()
            if name in (own := rows.values.get(source, {}))
            else nothing(len(rows))
            for rows in some
        ]
        table.setdefault(source, {})[name] = np.concatenate(found)
    return Group(
        units=[rows.unit for rows in some for _ in rows.names],
        names=[name for rows in some for name in rows.names],
        numbers=[number for rows in some for number in rows.numbers],
        targets=np.concatenate([np.zeros(0, np.int64), *(rows.targets.numpy() for rows in some)]),
        table=table,
        rows=parts,
    )


def nothing(n: int) -> Floats:
    """A column without values: [n]."""
    return np.full(n, np.nan)


def _column(rows: Rows, source: str, name: str) -> Floats:
    """A column of a unit, or nothing."""
    own = rows.values.get(source, {})
    found: Floats = own[name].numpy() if name in own else nothing(len(rows))
    return found
