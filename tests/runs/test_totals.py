"""Files of a run that are written a unit at a time."""

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from sufficit import UserError
from sufficit.runs.totals import csv_writer, table_writer


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
