"""The life of a run, whatever it measures: the same files if it is interrupted, or cut otherwise.

A new option of a run is one more case here; its own tests are those of its numbers.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest

from own_model import MODEL
from small_runs import assert_same_rows, config_for, interrupted, run_small, write_photos
from sufficit.data.loader import Unit
from sufficit.provenance import plain
from sufficit.runs.config import RunConfig
from sufficit.runs.engine import run
from sufficit.runs.job import Job, make_job
from sufficit.runs.results import RunResults
from sufficit.runs.search import PLACE
from sufficit.runs.spread import Score
from sufficit.runs.store import HELD, UNIT, Store
from sufficit.runs.unit_rows import Rows

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "all checks": {"checks": "all", "score": "confidence", "columns": "all"},
    "fills and twin": {"fills": "black,blur", "twin": "python:other.py:make", "checks": "controls"},
    "sampled masks": {"calls": 20, "fills": "black,mean", "checks": "controls,fill"},
    "search": {"alpha_min": "search"},
}
# Where a run stops: the kind of a unit, the units of this kind that are done, and whether they are
# those of the first run of a search.
POINTS = [
    ("default", HELD, 0, False),
    ("default", HELD, 1, False),
    ("default", UNIT, 0, False),
    ("default", UNIT, 2, False),
    ("all checks", UNIT, 1, False),
    ("fills and twin", UNIT, 1, False),
    ("sampled masks", UNIT, 2, False),
    ("search", UNIT, 0, True),
    ("search", UNIT, 2, True),
    ("search", UNIT, 1, False),
]
SAME = ("summary.json", "curves.json", "pairs.csv", "RUN.toml", "shown.safetensors")


class Wholes:
    """The runs of all cases that nothing interrupted, in units of four images."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.photos = write_photos(place)
        (place / "other.py").write_text(MODEL.replace("manual_seed(0)", "manual_seed(1)"))
        self._made: dict[str, RunResults] = {}

    def config(self, case: str) -> RunConfig:
        options = dict(CASES[case])
        if "twin" in options:
            options["twin"] = options["twin"].replace("other.py", str(self.place / "other.py"))
        return config_for(self.photos, **options)

    def __getitem__(self, case: str) -> RunResults:
        if case not in self._made:
            self._made[case] = run_small(self.config(case), self.place / case)
        return self._made[case]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Wholes:
    return Wholes(tmp_path_factory.mktemp("wholes"))


def assert_same(one: RunResults, other: RunResults) -> None:
    """Every file is the same to the bit, and so is the record, but for when it was made."""
    assert_same_rows(one.folder, other.folder, one.methods)
    for name in SAME:
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes(), name
    records = [plain(replace(results.record, made={})) for results in (one, other)]
    assert records[0] == records[1]


@pytest.mark.parametrize(("case", "kind", "after", "searching"), POINTS)
def test_an_interrupted_run_resumes_and_ends_with_the_same_files(
    wholes: Wholes, tmp_path: Path, case: str, kind: str, after: int, searching: bool
) -> None:
    config = wholes.config(case)
    interrupted(lambda: run_small(config, tmp_path), after, kind, searching=searching)
    assert not (tmp_path / "run.json").exists()
    begun = tmp_path / PLACE if searching else tmp_path
    assert len(Store(begun).done(kind)) == after
    assert_same(wholes[case], run_small(config, tmp_path))
    assert not (tmp_path / "units").exists()


def backwards(job: Job, store: Store, score: Score, units: Collection[Unit]) -> Iterator[Rows]:
    """Compute units as workers may: in any order."""
    for unit in reversed([*units]):
        yield score(unit, None)


@pytest.mark.parametrize("case", CASES)
def test_the_order_of_the_units_changes_no_file(wholes: Wholes, tmp_path: Path, case: str) -> None:
    job = make_job(wholes.config(case), unit=4)
    assert_same(wholes[case], run(job, tmp_path, progress=False, spread=backwards))


@pytest.mark.parametrize("unit", [1, 3, 64])
@pytest.mark.parametrize("case", CASES)
def test_the_size_of_the_units_changes_no_row(
    wholes: Wholes, tmp_path: Path, case: str, unit: int
) -> None:
    whole = wholes[case]
    other = run_small(wholes.config(case), tmp_path, unit=unit)
    assert other.alpha_min == whole.alpha_min
    assert other.record.shown == whole.record.shown
    for method in whole.methods:
        pandas.testing.assert_frame_equal(other.rows[method], whole.rows[method], atol=1e-6, rtol=0)
