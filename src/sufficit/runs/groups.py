"""The rows of many units at a time, as arrays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sufficit.runs.store import Store
from sufficit.runs.unit_rows import StoredUnit
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
    rows: Sequence[StoredUnit]


def groups(store: Store, units: range, *, answers: bool = False) -> Iterator[Group]:
    """The rows of all units, some thousand images at a time; units without images are left out."""
    waiting: list[StoredUnit] = []
    for unit in units:
        waiting.append(store.read_arrays(unit, answers=answers))
        if sum(map(len, waiting)) >= TOGETHER:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(parts: Sequence[StoredUnit]) -> Group:
    some = [rows for rows in parts if len(rows)]
    return Group(
        units=[rows.unit for rows in some for _ in rows.names],
        names=[name for rows in some for name in rows.names],
        numbers=[number for rows in some for number in rows.numbers],
        targets=np.concatenate([np.zeros(0, np.int64), *(rows.targets for rows in some)]),
        table={
            source: _columns_of(source, some)
            for source in dict.fromkeys(name for rows in some for name in rows.columns)
        },
        rows=parts,
    )


def _columns_of(source: str, parts: Sequence[StoredUnit]) -> dict[str, Floats]:
    """The columns of a source; NaN where a probe of some images looked at none of a unit."""
    names = [*dict.fromkeys(name for rows in parts for name in rows.columns.get(source, ()))]
    place = {name: k for k, name in enumerate(names)}
    joined = np.full((len(names), sum(map(len, parts))), np.nan)
    start = 0
    for rows in parts:
        own = rows.columns.get(source, ())
        here = slice(start, start + len(rows))
        start += len(rows)
        if list(own) == names:
            joined[:, here] = rows.values[source].T
        elif own:
            joined[[place[name] for name in own], here] = rows.values[source].T
    return dict(zip(names, joined, strict=True))


def nothing(n: int) -> Floats:
    """A column without values: [n]."""
    return np.full(n, np.nan)
