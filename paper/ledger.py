"""Numbers of the results page: each is computed from rows, and noted as a claim to be checked.

A claim says from which file, rows and columns a number comes, and how it is printed. The page's
claims are written beside it; `tools/check_results.py` recomputes them with code of its own, and
refuses a page with a decimal number that none of them explains.

Intervals are mean +- t s / sqrt(n) over images, 95 %; p is that of a paired t-test. A method that
was trained several times counts with the mean of its trainings for each image.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from scipy.stats import t, ttest_rel

from tables import TABLES

COMMIT = re.compile("[0-9a-f]{7,40}")
TRAILING = r"-\d+$"  # the seed at the end of an adapter's name
Where = Mapping[str, str]
"""Columns of the rows with the value they must have, such as way and network."""


@dataclass(frozen=True)
class Rows:
    """The rows of a table with the facts of its run. There is none without rows and a commit."""

    folder: Path

    @property
    def name(self) -> str:
        """The name of the table."""
        name: str = self.facts["table"]
        return name

    @property
    def is_complete(self) -> bool:
        """Whether there are rows, and a run.json with a commit that has no changes on top."""
        facts = self.folder / "run.json"
        if not facts.exists() or not [*self.folder.glob("rows*.parquet")]:
            return False
        return bool(COMMIT.fullmatch(json.loads(facts.read_text()).get("commit") or ""))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The run."""
        found: dict[str, Any] = json.loads((self.folder / "run.json").read_text())
        return found

    @cached_property
    def frame(self) -> pandas.DataFrame:
        """All rows."""
        parts = [pandas.read_parquet(path) for path in sorted(self.folder.glob("rows*.parquet"))]
        return pandas.concat(parts, ignore_index=True)

    def some(self, where: Where) -> pandas.DataFrame:
        """The rows in which columns have the values that are wanted."""
        found = self.frame
        for column, value in where.items():
            found = found[found[column] == value]
        return found

    def methods(self, where: Where | None = None) -> list[str]:
        """The names of all methods, trainings as one, in the order of the rows."""
        names = self.some(where or {})["method"]
        return [*dict.fromkeys(names.str.replace(TRAILING, "", regex=True))]

    def trainings(self, method: str, where: Where | None = None) -> list[str]:
        """The names of the trainings of a method, or its own name."""
        names = dict.fromkeys(self.some(where or {})["method"])
        stems = pandas.Series([*names]).str.replace(TRAILING, "", regex=True)
        return [name for name, stem in zip(names, stems, strict=True) if stem == method]

    def values(self, method: str, column: str, where: Where | None = None) -> pandas.Series:
        """The value of each image, the mean over trainings, by the image's name; without NaN."""
        own = self.some(where or {})
        if column not in own:
            return pandas.Series(dtype=float)
        own = own[own["method"].isin(self.trainings(method, where))]
        return own.groupby("image")[column].mean().dropna()


def half_width(values: Sequence[float] | np.ndarray) -> float:
    """Return half of the 95 % interval of a mean.

    >>> round(half_width([0.0, 1.0, 0.0, 1.0]), 3)
    0.919
    """
    known = np.asarray(values, dtype=float)
    if len(known) < 2:
        return float("nan")
    return float(t.ppf(0.975, len(known) - 1) * known.std(ddof=1) / len(known) ** 0.5)


def text_of(value: float, digits: int, *, sign: bool = False) -> str:
    """Return a number as the page prints it, without a minus before zeros.

    >>> text_of(-0.0004, 3), text_of(0.25, 2, sign=True)
    ('0.000', '+0.25')
    """
    found = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return found.replace("-", "") if float(found) == 0 else found


@dataclass
class Ledger:
    """Prints numbers of tables, and notes where each comes from, in the order of the page."""

    results: Path
    claims: list[dict[str, Any]] = field(default_factory=list)

    def rows(self, table: str) -> Rows:
        """The rows of a table."""
        return Rows(self.results / table)

    def claim(self, text: str, **source: Any) -> str:
        """Note a number and where it comes from; return it."""
        self.claims.append({"text": text, **source})
        return text

    def mean(
        self, rows: Rows, method: str, column: str, where: Where | None = None, digits: int = 3
    ) -> str:
        """A mean, or a dash where there is none."""
        values = rows.values(method, column, where)
        if values.empty:
            return "-"
        text = text_of(values.mean(), digits)
        return self.claim(text, **about("mean", rows, method, column, where), digits=digits)

    def estimate(
        self, rows: Rows, method: str, column: str, where: Where | None = None, digits: int = 2
    ) -> str:
        """A mean with half its interval, or a dash."""
        values = rows.values(method, column, where)
        if values.empty:
            return "-"
        mean = self.mean(rows, method, column, where, digits)
        return f"{mean} ±{self.half(rows, method, column, where, digits)}"

    def half(
        self, rows: Rows, method: str, column: str, where: Where | None = None, digits: int = 2
    ) -> str:
        """Half the interval of a mean."""
        text = text_of(half_width(rows.values(method, column, where).to_numpy()), digits)
        return self.claim(text, **about("half", rows, method, column, where), digits=digits)

    def training(self, rows: Rows, name: str, column: str, digits: int = 3) -> str:
        """The mean of one training."""
        values = rows.some({"method": name})[column].dropna()
        known = about("training", rows, name, column, None)
        return self.claim(text_of(values.mean(), digits), **known, digits=digits)

    def difference(
        self, rows: Rows, method: str, other: str, column: str, where: Where | None = None,
        digits: int = 2,
    ) -> str:  # fmt: skip
        """A paired difference with half its interval, and its p."""
        one, two = rows.values(method, column, where), rows.values(other, column, where)
        both = pandas.concat([one, two], axis=1, join="inner").to_numpy()
        if len(both) < 2:
            return "-"
        apart = both[:, 0] - both[:, 1]
        known = about("difference", rows, method, column, where) | {"other": other}
        gap = self.claim(text_of(apart.mean(), digits, sign=True), **known, digits=digits)
        half = text_of(half_width(apart), digits)
        half = self.claim(half, **known | {"kind": "difference_half"}, digits=digits)
        p = float(ttest_rel(both[:, 0], both[:, 1]).pvalue) if apart.any() else 1.0
        sure = p < 0.001
        shown = self.claim("0.001" if sure else text_of(p, 3), **known | {"kind": "p"}, digits=3)
        return f"{gap} ±{half} (p {'<' if sure else '='} {shown})"

    def ratio(self, rows: Rows, method: str, where: Where | None = None, digits: int = 2) -> str:
        """Leak over chance, both means over images, or a dash."""
        leak, chance = (rows.values(method, name, where) for name in ("leak", "leak_chance"))
        if chance.empty or not chance.mean():
            return "-"
        text = text_of(leak.mean() / chance.mean(), digits)
        return self.claim(text, **about("ratio", rows, method, "leak", where), digits=digits)

    def gap(self, rows: Rows, method: str, column: str, other: str, digits: int = 2) -> str:
        """The mean of one column less that of another, over the images that have both."""
        one, two = rows.values(method, column), rows.values(method, other)
        both = pandas.concat([one, two], axis=1, join="inner").to_numpy()
        if not len(both):
            return "-"
        text = text_of(float((both[:, 0] - both[:, 1]).mean()), digits, sign=True)
        known = about("gap", rows, method, column, None) | {"other": other}
        return self.claim(text, **known, digits=digits)

    def fact(self, rows: Rows, *path: str, digits: int = 1, percent: bool = False) -> str:
        """A number of run.json, or a dash."""
        value: Any = rows.facts
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if value is None:
            return "-"
        text = text_of(100 * value if percent else value, digits)
        source = {"kind": "fact", "table": rows.name, "path": path, "percent": percent}
        return self.claim(text, **source, digits=digits)

    def paper(self, table: str, method: str, column: str) -> str:
        """A number that the paper prints."""
        text = text_of(TABLES[table].printed[method][column], 3)
        return self.claim(text, kind="paper", table=table, method=method, column=column, digits=3)

    def published(self, text: str, source: str) -> str:
        """A number that somebody else published."""
        return self.claim(text, kind="published", source=source)


def about(kind: str, rows: Rows, method: str, column: str, where: Where | None) -> dict[str, Any]:
    """Return where a number comes from."""
    return {
        "kind": kind,
        "table": rows.name,
        "method": method,
        "column": column,
        "where": dict(where or {}),
    }
