"""Recompute every number of the results page from its rows: python tools/check_results.py.

    python tools/check_results.py                    # docs/results.md and README.md
    python tools/check_results.py --loose            # and list decimal numbers that have no rows
    python tools/check_results.py --results FOLDER --page PAGE

`results/claims.json` says where each decimal number of the page comes from, in the order of the
page. This script reads the rows with code of its own, and fails where a number is another, where a
number of the page is in no claim, and where a table has no commit. It needs pandas and scipy.
"""

import argparse
import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas
from scipy import stats

ROOT = Path(__file__).parent.parent
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+\.\d+(?![\w.]*\d)")
LEFT_OUT = (
    re.compile(r"```.*?```", re.DOTALL),
    re.compile(r"`[^`]*`"),
    re.compile(r"\]\([^)]*\)"),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"\b\d+\.\d+\.\d+\b"),  # versions
    re.compile(r"arXiv[ :]*\d{4}\.\d{5}"),
    re.compile(r"https?://\S+"),
)
START, END = "<!-- results: ", "<!-- end of results -->"  # of a part of another page


def decimals(text: str) -> list[str]:
    """Return the decimal numbers of a page in their order; those of code and links are left out.

    >>> decimals("MSI 0.25 ±0.01 of `0.5`, [0.3](x/1.5) by torch 2.11.0")
    ['0.25', '0.01', '0.3']
    """
    for pattern in LEFT_OUT:
        text = pattern.sub(lambda found: "]" if found[0].startswith("](") else " ", text)
    return [found[0] for found in NUMBER.finditer(text)]


class Tables:
    """The rows and facts of all tables, read once."""

    def __init__(self, results: Path, paper: Path) -> None:
        self.results = results
        self.paper = tomllib.loads(paper.read_text())
        self.read: dict[str, tuple[pandas.DataFrame, dict[str, list[int]], dict[str, Any]]] = {}
        self.known: dict[tuple[str, ...], dict[str, float]] = {}

    def of(self, name: str) -> tuple[pandas.DataFrame, dict[str, list[int]], dict[str, Any]]:
        """The rows of a table, the places of each method's, and the run; fail without a commit."""
        if name not in self.read:
            folder = self.results / name
            run = json.loads((folder / "run.json").read_text())
            if not re.fullmatch("[0-9a-f]{7,40}", run.get("commit") or ""):
                raise ValueError(f"{folder}/run.json has no commit, or one with changes on top")
            parts = [pandas.read_parquet(path) for path in sorted(folder.glob("rows*.parquet"))]
            if not parts:
                raise ValueError(f"{folder} has no rows*.parquet")
            frame = pandas.concat(parts, ignore_index=True)
            places: dict[str, list[int]] = {}
            for place, method in enumerate(frame["method"]):
                places.setdefault(re.sub(r"-\d+$", "", method), []).append(place)
            self.read[name] = frame, places, run
        return self.read[name]

    def values(self, claim: dict[str, Any], method: str, column: str) -> dict[str, float]:
        """The value of each image, the mean over the trainings of a method."""
        key = (claim["table"], method, column, json.dumps(claim["where"], sort_keys=True))
        if key not in self.known:
            frame, places, _ = self.of(claim["table"])
            rows = frame.iloc[places[method]]
            found: dict[str, list[float]] = {}
            for row in zip(
                rows["image"], rows[column], *(rows[n] for n in claim["where"]), strict=True
            ):
                image, value, *others = row
                if others == [*claim["where"].values()] and not math.isnan(value):
                    found.setdefault(image, []).append(value)
            self.known[key] = {image: math.fsum(own) / len(own) for image, own in found.items()}
        return self.known[key]


def mean(values: list[float]) -> float:
    """Return a mean."""
    return math.fsum(values) / len(values)


def half(values: list[float]) -> float:
    """Return half of the 95 % interval of a mean, by Student's t."""
    middle, n = mean(values), len(values)
    spread = math.sqrt(math.fsum((one - middle) ** 2 for one in values) / (n - 1))
    return float(stats.t.ppf(0.975, n - 1)) * spread / math.sqrt(n)


def p_value(apart: list[float]) -> float:
    """Return the two-sided p of differences against 0, by Student's t."""
    middle, n = mean(apart), len(apart)
    spread = math.sqrt(math.fsum((one - middle) ** 2 for one in apart) / (n - 1))
    if spread == 0:
        return 1.0 if middle == 0 else 0.0
    return 2 * float(stats.t.sf(abs(middle) / (spread / math.sqrt(n)), n - 1))


def computed(claim: dict[str, Any], tables: Tables) -> float:
    """Return what a claim's number is by the rows."""
    kind = claim["kind"]
    if kind == "fact":
        value: Any = tables.of(claim["table"])[2]
        for name in claim["path"]:
            value = value[name]
        return float(value) * (100 if claim["percent"] else 1)
    if kind == "paper":
        names = [*tables.paper["columns"]]
        row = tables.paper[claim["table"]]["rows"][claim["method"]]
        return float(row[names.index(claim["column"])])
    if kind == "training":
        frame = tables.of(claim["table"])[0]
        own_rows = frame[frame["method"] == claim["method"]]
        return mean([one for one in own_rows[claim["column"]] if not math.isnan(one)])
    own = tables.values(claim, claim["method"], claim["column"])
    if kind == "ratio":
        chance = tables.values(claim, claim["method"], "leak_chance")
        return mean([*own.values()]) / mean([*chance.values()])
    if kind in ("mean", "half"):
        return {"mean": mean, "half": half}[kind]([*own.values()])
    if kind == "gap":
        other = tables.values(claim, claim["method"], claim["other"])
    else:
        other = tables.values(claim, claim["other"], claim["column"])
    apart = [value - other[image] for image, value in own.items() if image in other]
    how: dict[str, Callable[[list[float]], float]] = {
        "gap": mean,
        "difference": mean,
        "difference_half": half,
        "p": p_value,
    }
    return how[kind](apart)


def is_right(claim: dict[str, Any], value: float) -> bool:
    """Whether a number is the value as it is printed, half a last digit apart at most."""
    printed = float(claim["text"])
    if claim["kind"] == "p" and printed == 0.001 and value < 0.001:
        return True
    return abs(printed - value) <= 0.5 * 10 ** -claim["digits"] + 1e-9


def problems(page: str, claims: list[dict[str, Any]], tables: Tables) -> Iterator[str]:
    """Say what is wrong with a page."""
    printed = decimals(page)
    wanted = [claim["text"] for claim in claims if "." in claim["text"]]
    for place, (one, other) in enumerate(zip(printed, wanted, strict=False)):
        if one != other:
            yield f"number {place + 1} of the page is {one}, of the claims {other}"
            return
    if len(printed) != len(wanted):
        rest = (printed if len(printed) > len(wanted) else wanted)[min(len(printed), len(wanted)) :]
        where = "no claim" if len(printed) > len(wanted) else "only a claim"
        yield f"{len(rest)} numbers have {where}, from {rest[0]} on"
    for claim in claims:
        if claim["kind"] == "published":
            continue  # by others, as the page says
        try:
            value = computed(claim, tables)
        except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError) as error:
            yield f"{claim['text']} cannot be computed: {type(error).__name__}: {error}"
            continue
        if not is_right(claim, value):
            named = {name: claim[name] for name in ("table", "method", "column") if name in claim}
            yield f"{claim['text']} is {value:.5f} by the rows: {claim['kind']} of {named}"


def part_of(page: str) -> str:
    """Return the parts of another page that the rows fill."""
    found = re.findall(re.escape(START) + r"[^>]*-->(.*?)" + re.escape(END), page, re.DOTALL)
    return "\n".join(found)


def loose(page: Path) -> list[str]:
    """Return the lines of a page with decimal numbers outside of what the rows fill."""
    text = page.read_text()
    for part in re.findall(re.escape(START) + r".*?" + re.escape(END), text, re.DOTALL):
        text = text.replace(part, "\n" * part.count("\n"))
    lines = re.sub(r"```.*?```", lambda one: "\n" * one[0].count("\n"), text, flags=re.DOTALL)
    return [
        f"{page.name}:{number}: {' '.join(found)}"
        for number, line in enumerate(lines.splitlines(), 1)
        if (found := decimals(line))
    ]


def main() -> None:
    """Check the pages."""
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--results", type=Path, default=ROOT / "results")
    words.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md")
    words.add_argument("--readme", type=Path, default=ROOT / "README.md")
    words.add_argument("--loose", action="store_true", help="list numbers without rows")
    given = words.parse_args()
    tables = Tables(given.results, ROOT / "paper" / "tables.toml")
    claims = json.loads((given.results / "claims.json").read_text())
    found = [
        f"{given.page.name}: {one}"
        for one in problems(given.page.read_text(), claims["page"], tables)
    ]
    parts = part_of(given.readme.read_text())
    found += [
        f"{given.readme.name}: {one}"
        for one in problems(parts, claims["readme"] if parts else [], tables)
    ]
    if given.loose:
        pages = [given.readme, *sorted((ROOT / "docs").glob("*.md"))]
        for page in pages:
            if page != given.page:
                print("\n".join(loose(page)))
    if found:
        sys.exit("\n".join(found))
    counted = len(claims["page"]) + len(claims["readme"] if parts else [])
    print(f"{counted} numbers are those of the rows in {given.results}")


if __name__ == "__main__":
    main()
