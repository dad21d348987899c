"""Rows of a run on disk: parts of them are those of the whole, and bad files are one error."""

from pathlib import Path

import numpy as np
import pandas
import pytest

from sufficit import UserError
from sufficit.runs.rows import StoredRows


@pytest.fixture
def frame() -> pandas.DataFrame:
    random = np.random.default_rng(0)
    names = [f"cat/{k}.png" for k in range(25)]
    facts = {"image": names, "target": range(25), "clean_accuracy": 1.0, "calls": 7}
    return pandas.DataFrame(facts | {"msi": random.normal(size=25), "own": random.random(25)})


@pytest.fixture(params=["file", "memory"])
def rows(request: pytest.FixtureRequest, frame: pandas.DataFrame, tmp_path: Path) -> StoredRows:
    frame.to_parquet(tmp_path / "scores.parquet", index=False, row_group_size=4)
    found = StoredRows(tmp_path, {"a": tmp_path / "scores.parquet"})
    if request.param == "memory":
        found = found.in_memory()
        (tmp_path / "scores.parquet").unlink()
    return found


def test_parts_are_those_of_the_whole(rows: StoredRows, frame: pandas.DataFrame) -> None:
    pandas.testing.assert_frame_equal(rows["a"], frame)
    assert (list(rows), len(rows), rows.count("a")) == (["a"], 1, 25)
    assert rows.columns("a") == ["msi", "own"]
    assert rows.column("a", "msi").tolist() == frame["msi"].tolist()
    assert list(rows.names("a")) == frame["image"].tolist()
    for wanted in ([7, 0, 24, 8, 7], [3], []):
        found = rows.some("a", wanted, ["own", "image"])
        assert found["own"].tolist() == frame["own"].iloc[wanted].tolist()
        assert found["image"].tolist() == frame["image"].iloc[wanted].tolist()


@pytest.mark.parametrize(
    "content",
    [None, b"", b"PAR1" + bytes(40) + b"PAR1", b"no parquet" * 9],
    ids=["missing", "empty", "zeros", "text"],
)
def test_files_that_are_no_rows_are_one_error(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "scores.parquet").write_bytes(content)
    rows = StoredRows(tmp_path, {"a": tmp_path / "scores.parquet"})
    for read in (rows.count, rows.columns, rows.__getitem__, lambda a: list(rows.names(a))):
        with pytest.raises(UserError, match=r"is not complete \(.*\): run it again"):
            read("a")
