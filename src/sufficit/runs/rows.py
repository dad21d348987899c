"""The rows of every source of a run: written and added up unit by unit, read where asked for."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sufficit.data.heatmap_files import heatmap_writer
from sufficit.errors import GoneError, UserError
from sufficit.files import make_folder, writing
from sufficit.metrics.metric import Curve
from sufficit.metrics.scores import Scores
from sufficit.outside import csv_cell
from sufficit.runs.store import UnitFile
from sufficit.sums import Sums, both

if TYPE_CHECKING:
    import pandas
    import pyarrow
    from pyarrow import parquet

FACTS = 4  # columns before the scores: image, target, clean_accuracy, calls
SCORES_GROUP, CURVES_GROUP = 2**21, 2**24
"""Bytes of a row group. Each column of a group costs 1 KB of memory until the file is closed."""
KINDS = ("accuracy", "confidence")
ESTIMATES = b"estimates"  # in the metadata of scores.parquet, where images were asked some masks


def joined(units: Sequence[UnitFile], *, without: tuple[str, ...] = ()) -> UnitFile:
    """The rows of several units as one; `without` are ends of names of tensors that have others."""
    names = [name for name in units[0].tensors if not name.endswith(without)]
    rows = ("names", "numbers")
    facts = {key: [one for unit in units for one in unit.facts[key]] for key in rows}
    return UnitFile({n: torch.cat([unit.tensors[n] for unit in units]) for n in names}, facts)


def grouped(
    units: Iterable[tuple[int, UnitFile]], images: int
) -> Iterator[list[tuple[int, UnitFile]]]:
    """Units in groups of so many images or more: a large group costs hardly more than a small."""
    group: list[tuple[int, UnitFile]] = []
    for one in units:
        group.append(one)
        if sum(len(kept.facts["names"]) for _, kept in group) >= images:
            yield group
            group = []
    if group:
        yield group


class SourceTotals:
    """Writes scores.parquet, curves.parquet and heatmaps.npz of a source, and holds its sums."""

    def __init__(
        self, place: Path, scores: Scores, closing: ExitStack, *, seed: int, heatmaps: bool
    ) -> None:
        make_folder(place)
        self._rows = closing.enter_context(table_writer(place / "scores.parquet", SCORES_GROUP))
        self._curves = closing.enter_context(table_writer(place / "curves.parquet", CURVES_GROUP))
        self._place = place
        self._map = None
        if heatmaps:
            self._map = closing.enter_context(heatmap_writer(place / "heatmaps.npz"))
        self.columns = Sums([*scores.columns], seed=seed)
        self.leaked = Sums(["own", "chance"], seed=seed) if "leak" in scores.columns else None
        self.facts = Sums(["clean_accuracy", "calls"], seed=seed)
        self._sums: dict[tuple[str, str], tuple[Any, Any]] = {}  # of a curve's kind, with counts
        self._grids: dict[str, tuple[float, ...]] = {}

    def add(self, names: Sequence[str], numbers: Sequence[int], scores: Scores) -> None:
        """Write the rows of a unit and add them up."""
        import pyarrow

        frame, curves = scores.frame(), scores.curves()
        values = {name: frame[name].to_numpy() for name in frame.columns}
        self.columns.add(numbers, values)
        self.facts.add(numbers, values)
        if self.leaked is not None:
            self.leaked.add(numbers, both(values["leak"], values["leak_chance"]))
        frame.insert(0, "image", list(names))
        table = pyarrow.Table.from_pandas(frame, preserve_index=False)
        if scores.sampled:  # said where the values are, as run.json and the report say it
            known = table.schema.metadata or {}
            table = table.replace_schema_metadata({**known, ESTIMATES: b"each image's values"})
        self._rows(table)
        self._curves(_curves_table(curves, names))
        for name, curve in curves.items():
            self._grids[name] = curve.grid
            for kind in KINDS:
                drawn: Tensor = getattr(curve, kind)
                total, count = self._sums.get((name, kind), (0, 0))
                total, count = total + drawn.nansum(0), count + (~drawn.isnan()).sum(0)
                self._sums[name, kind] = total, count

    def add_maps(self, names: Sequence[str], maps: Tensor) -> None:
        """Write the heatmaps of a unit: [n,H,W]."""
        assert self._map is not None  # they are wanted
        with _named(self._place / "heatmaps.npz"):
            for name, one in zip(names, maps, strict=True):
                self._map(name, one)

    def mean_curves(self) -> dict[str, dict[str, Any]]:
        """Every curve averaged over the images, NaN left out, as curves.json holds it."""
        return {
            name: {"grid": list(grid)}
            | {k: (self._sums[name, k][0] / self._sums[name, k][1]).tolist() for k in KINDS}
            for name, grid in self._grids.items()
        }


def _curves_table(curves: Mapping[str, Curve], names: Sequence[str]) -> "pyarrow.Table":
    """One row per image, one column per curve and kind of score; the grids are in the schema."""
    import pyarrow

    columns: dict[str, Any] = {"image": list(names)}
    for name, curve in curves.items():
        ends = np.arange(len(names) + 1, dtype=np.int32) * len(curve.grid)
        for kind in KINDS:
            values = getattr(curve, kind).float().numpy().ravel()
            columns[f"{name}_{kind}"] = pyarrow.ListArray.from_arrays(ends, values)
    grids = {name: list(curve.grid) for name, curve in curves.items()}
    return pyarrow.table(columns).replace_schema_metadata({"grids": json.dumps(grids)})


@contextmanager
def table_writer(path: Path, group: int) -> Iterator[Callable[["pyarrow.Table"], None]]:
    """A function that adds rows to a parquet file, in row groups of so many bytes or more."""
    import pyarrow
    from pyarrow import parquet

    waiting: list[pyarrow.Table] = []
    writer: Any = None
    size = 0

    def flush() -> None:
        nonlocal writer, size
        with _named(path):
            table = pyarrow.concat_tables(waiting)
            writer = writer or closing.enter_context(parquet.ParquetWriter(part, table.schema))
            writer.write_table(table)
            waiting.clear()
            size = 0

    def add(table: pyarrow.Table) -> None:
        nonlocal size
        waiting.append(table)
        size += table.nbytes
        if size >= group:
            flush()

    with writing(path) as part, ExitStack() as closing:
        yield add
        if waiting:
            flush()


@contextmanager
def csv_writer(path: Path, heads: Sequence[str]) -> Iterator[Callable[[Sequence[str]], None]]:
    """A function that adds a row to a CSV file."""
    with (
        writing(path) as part,
        part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(heads)

        def add(row: Sequence[str]) -> None:
            with _named(path):
                rows.writerow([csv_cell(cell) for cell in row])

        yield add


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file that cannot be written; several are open at a time."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror or error}") from error


class StoredRows(Mapping[str, "pandas.DataFrame"]):
    """One row per image of every source; `rows[source]` reads all of them, each time."""

    def __init__(self, folder: Path, files: Mapping[str, Path | bytes]) -> None:
        self._folder, self._files = folder, files

    def __getitem__(self, source: str) -> "pandas.DataFrame":
        with self._open(source) as file:
            found: pandas.DataFrame = file.read().to_pandas()
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def in_memory(self) -> "StoredRows":
        """The same rows, where the files are about to be deleted."""
        files = self._files.items()
        kept = {name: f if isinstance(f, bytes) else f.read_bytes() for name, f in files}
        return StoredRows(self._folder, kept)

    def count(self, source: str) -> int:
        """The number of images."""
        with self._open(source) as file:
            return int(file.metadata.num_rows)

    def columns(self, source: str) -> list[str]:
        """The columns of scores."""
        with self._open(source) as file:
            return list(file.schema_arrow.names[FACTS:])

    def column(self, source: str, name: str) -> np.ndarray[Any, Any]:
        """A column of numbers of all images: [N]."""
        with self._open(source) as file:
            found: np.ndarray[Any, Any] = file.read([name])[name].to_numpy()
        return found

    def zeros(self, source: str, name: str) -> int:
        """The number of images whose value in a column is 0, some in memory at a time."""
        with self._open(source) as file:
            parts = (np.asarray(batch[name]) for batch in file.iter_batches(columns=[name]))
            return sum(int((values == 0).sum()) for values in parts)

    def names(self, source: str) -> Iterator[str]:
        """The names of the images in order, some in memory at a time."""
        with self._open(source) as file:
            for batch in file.iter_batches(columns=["image"]):
                yield from batch["image"].to_pylist()

    def some(self, source: str, rows: Sequence[int], columns: Sequence[str]) -> "pandas.DataFrame":
        """Some columns of some images, in their order."""
        import pyarrow

        parts, start, wanted = [], 0, sorted({*rows})
        with self._open(source) as file:
            for batch in file.iter_batches(columns=[*columns]):
                here = [row - start for row in wanted if 0 <= row - start < len(batch)]
                parts.append(pyarrow.table(batch).take(pyarrow.array(here, pyarrow.int64())))
                start += len(batch)
        places = pyarrow.array([wanted.index(row) for row in rows], pyarrow.int64())
        found: pandas.DataFrame = pyarrow.concat_tables(parts).take(places).to_pandas()
        return found

    @contextmanager
    def _open(self, source: str) -> Iterator["parquet.ParquetFile"]:
        from pyarrow import ArrowException, parquet

        file = self._files[source]
        try:
            with (
                BytesIO(file) if isinstance(file, bytes) else file.open("rb") as opened,
                parquet.ParquetFile(opened) as rows,
            ):
                yield rows
        except GoneError:
            raise
        except (OSError, ArrowException, ValueError) as error:
            reason = " ".join(str(error).split())  # pyarrow's may have several lines
            raise UserError(
                f"{self._folder} is not complete ({reason}): run it again with --overwrite"
            ) from error
