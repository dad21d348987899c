"""Rows of a run: written a unit at a time, whole or not at all; parts are those of the whole."""

from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pytest
from pyarrow import parquet

from sufficit import UserError
from sufficit.runs.rows import StoredRows, csv_writer, table_writer


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
    assert (rows.zeros("a", "target"), rows.zeros("a", "msi")) == (1, 0)
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


def test_rows_are_written_in_groups_and_in_order(tmp_path: Path) -> None:
    with table_writer(tmp_path / "a.parquet", 40) as add:
        for start in range(0, 13, 2):
            add(pyarrow.table({"x": list(range(start, min(start + 2, 13)))}))
        assert not (tmp_path / "a.parquet").exists()
    with parquet.ParquetFile(tmp_path / "a.parquet") as file:
        sizes = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
        assert sizes == [6, 6, 1]
        assert file.read()["x"].to_pylist() == list(range(13))


def test_nothing_is_left_of_a_table_that_was_not_finished(tmp_path: Path) -> None:
    def stopped() -> None:
        with table_writer(tmp_path / "a.parquet", 1) as add:
            add(pyarrow.table({"x": [1]}))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stopped()
    assert not list(tmp_path.iterdir())


def test_the_file_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = parquet.ParquetWriter.write_table

    def full(self: parquet.ParquetWriter, table: pyarrow.Table) -> None:
        if "y" in table.column_names:
            raise OSError(28, "No space left on device")
        whole(self, table)

    def write() -> None:
        with (
            table_writer(tmp_path / "a.parquet", 1) as first,
            table_writer(tmp_path / "b.parquet", 1) as second,
            table_writer(tmp_path / "c.parquet", 1) as third,
        ):
            first(pyarrow.table({"x": [1]}))
            third(pyarrow.table({"x": [1]}))
            second(pyarrow.table({"y": [1]}))

    monkeypatch.setattr(parquet.ParquetWriter, "write_table", full)
    with pytest.raises(UserError, match=r"b\.parquet could not be written: No space left"):
        write()
    assert not list(tmp_path.iterdir())


def test_csv_cells_hold_any_text(tmp_path: Path) -> None:
    import csv

    with csv_writer(tmp_path / "a.csv", ["image", "reason"]) as add:
        add(['cat, "dog"\n.png', "empty"])
        add(["\udcff.png", ""])
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows == [["image", "reason"], ['cat, "dog"\n.png', "empty"], ["\\udcff.png", ""]]
