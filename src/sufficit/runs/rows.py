"""The rows of every source of a run: written and added up unit by unit, read where asked for."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sufficit.data.heatmap_files import heatmap_writer
from sufficit.errors import UserError
from sufficit.files import make_folder, writing
from sufficit.metrics.metric import CURVES, Curve, Schedule, curves_of
from sufficit.outside import csv_cell
from sufficit.probes.band import CURVE, BandProbe
from sufficit.runs.unit_rows import Rows
from sufficit.sources import Maps
from sufficit.sums import Floats

if TYPE_CHECKING:
    import pandas
    import pyarrow
    from pyarrow import parquet

FACTS = 4  # columns before the scores: image, target, clean_accuracy, calls
# Bytes of a row group. Each column of a group costs 1 KB of memory until the file is closed.
SCORES_GROUP = 2**21
CURVES_GROUP = 2**24
KINDS = ("accuracy", "confidence")
ANSWERED = 50  # answers behind each point of a mean curve, where images were asked some masks
ESTIMATES = b"estimates"  # in the metadata of scores.parquet, where images were asked some masks


class SourceWriter:
    """Writes scores.parquet, curves.parquet and heatmaps.npz of a source, and its mean curves."""

    def __init__(
        self,
        place: Path,
        closing: ExitStack,
        *,
        schedule: Schedule,
        asked: BandProbe | None,
        heatmaps: bool,
    ) -> None:
        make_folder(place)
        self._place = place
        self._schedule = schedule
        self._asked = asked
        self._rows = closing.enter_context(table_writer(place / "scores.parquet", SCORES_GROUP))
        self._curves = None
        if asked is not None and asked.keeps_answers:
            path = place / "curves.parquet"
            self._curves = closing.enter_context(table_writer(path, CURVES_GROUP))
        self._map = None
        if heatmaps:
            self._map = closing.enter_context(heatmap_writer(place / "heatmaps.npz"))
        # Sums, not values: memory must not grow with the images.
        self._sums: dict[str, Floats] = {}  # of a curve's kind: sum and count at each point

    def add(
        self, names: Sequence[str], targets: npt.NDArray[np.int64], columns: Mapping[str, Floats]
    ) -> None:
        """Write the rows of some images."""
        import pyarrow

        known: dict[str, Any] = {
            "image": list(names),
            "target": targets,
            "clean_accuracy": columns["clean_accuracy"],
            "calls": columns["calls"].astype(np.int64),
        }
        scores = {name: values for name, values in columns.items() if name not in known}
        table = pyarrow.table(known | scores)
        if self._curves is None:  # said where the values are, as run.json and the report say it
            table = table.replace_schema_metadata({ESTIMATES: b"each image's values"})
        self._rows(table)

    def add_curves(self, rows: Rows, source: str) -> None:
        """Add up the curves of a unit; write those of each image where all masks were asked."""
        for name, curve in rows.curves.get(source, {}).items():
            self._sums[name] = self._sums.get(name, 0.0) + curve.numpy()
        if self._curves is not None and source in rows.answers:
            assert self._asked is not None
            answers = self._asked.kept(rows.answers[source])
            self._curves(_curves_table(curves_of(answers, self._schedule), rows.names))

    def add_maps(self, names: Sequence[str], maps: Maps) -> None:
        """Write the heatmaps of a unit."""
        assert self._map is not None  # they are wanted
        with _named(self._place / "heatmaps.npz"):
            for name, (one, share) in zip(names, maps.with_shares(), strict=True):
                self._map(name, one, share)

    def mean_curves(self) -> dict[str, dict[str, Any]]:
        """Return every curve averaged over the images, NaN left out, as curves.json holds it.

        A point that few images were asked about is the mean of it and its neighbours.
        """
        found: dict[str, dict[str, Any]] = {}
        for key, (total, count) in self._sums.items():
            name, _, kind = key.removeprefix(CURVE).rpartition(".")
            curve = found.setdefault(name, {"grid": [*CURVES[name](self._schedule)]})
            curve[kind] = pooled_means(total, count).tolist()
        return found


def pooled_means(total: Floats, count: Floats) -> Floats:
    """Return the mean at each point, of as many neighbours as give enough answers: [G], [G] -> [G].

    A curve that has answers at less than half of its points is left as it is.

    >>> pooled_means(np.array([0.0, 0.0, 1.0, 4.0]), np.array([4.0, 0.0, 1.0, 4.0]))
    array([0. , 0.2, 1. , 1. ])
    """
    with np.errstate(invalid="ignore"):  # a point that no image was asked
        means: Floats = total / count
    if np.count_nonzero(count) < len(count) / 2:
        return means
    needed = min(ANSWERED, count.max())
    # Widen the window around each point until it has enough answers.
    for place in range(len(total)):
        for reach in range(len(total)):
            window = slice(max(0, place - reach), place + reach + 1)
            if count[window].sum() >= needed:
                means[place] = total[window].sum() / count[window].sum()
                break
    return means


def _curves_table(curves: Mapping[str, Curve], names: Sequence[str]) -> "pyarrow.Table":
    """Return a table of one row per image, one column per curve and kind of score.

    The grids are in its schema.
    """
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
    """Provide a function that adds rows to a parquet file, in row groups of `group` bytes."""
    import pyarrow
    from pyarrow import parquet

    waiting: list[pyarrow.Table] = []
    writer: Any = None
    size = 0

    def flush() -> None:
        nonlocal writer, size
        with _named(path):
            table = pyarrow.concat_tables(waiting)
            # The schema is known with the first rows.
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
    """Provide a function that adds a row to a CSV file."""
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
        self._folder = folder
        self._files = files

    def __getitem__(self, source: str) -> "pandas.DataFrame":
        with self._open(source) as file:
            found: pandas.DataFrame = file.read().to_pandas()
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def in_memory(self) -> "StoredRows":
        """Return the same rows, where the files are about to be deleted."""
        kept = {}
        for name, file in self._files.items():
            kept[name] = file if isinstance(file, bytes) else file.read_bytes()
        return StoredRows(self._folder, kept)

    def count(self, source: str) -> int:
        """Return the number of images."""
        with self._open(source) as file:
            return int(file.metadata.num_rows)

    def columns(self, source: str) -> list[str]:
        """Return the columns of scores."""
        with self._open(source) as file:
            return list(file.schema_arrow.names[FACTS:])

    def column(self, source: str, name: str) -> np.ndarray[Any, Any]:
        """Return a column of numbers of all images: [N]."""
        with self._open(source) as file:
            found: np.ndarray[Any, Any] = file.read([name])[name].to_numpy()
        return found

    def zeros(self, source: str, name: str) -> int:
        """Return the number of images whose value in a column is 0, some in memory at a time."""
        with self._open(source) as file:
            parts = (np.asarray(batch[name]) for batch in file.iter_batches(columns=[name]))
            return sum(int((values == 0).sum()) for values in parts)

    def names(self, source: str) -> Iterator[str]:
        """Yield the names of the images in order, some in memory at a time."""
        with self._open(source) as file:
            for batch in file.iter_batches(columns=["image"]):
                yield from batch["image"].to_pylist()

    def some(self, source: str, rows: Sequence[int], columns: Sequence[str]) -> "pandas.DataFrame":
        """Return some columns of some images, in their order."""
        import pyarrow

        # A batch at a time, in the order of the file; the order of `rows` is restored at the end.
        parts = []
        start = 0
        wanted = sorted({*rows})
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
        """Open the rows of a source; raise where the file is broken or gone."""
        from pyarrow import ArrowException, parquet

        file = self._files[source]
        try:
            with (
                # Rows of a run without a folder are in memory.
                BytesIO(file) if isinstance(file, bytes) else file.open("rb") as opened,
                parquet.ParquetFile(opened) as rows,
            ):
                yield rows
        except (OSError, ArrowException, ValueError) as error:
            reason = " ".join(str(error).split())  # pyarrow's may have several lines
            raise UserError(
                f"{self._folder} is not complete ({reason}): run it again with --overwrite"
            ) from error
