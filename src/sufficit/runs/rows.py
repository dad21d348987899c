"""The rows of a finished run: a parquet file per source, read where and when it is asked for."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sufficit.errors import GoneError, UserError

if TYPE_CHECKING:
    import pandas
    from pyarrow import parquet

FACTS = 4  # columns before the scores: image, target, clean_accuracy, calls


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

    def names(self, source: str) -> Iterator[str]:
        """The names of the images in order, some in memory at a time."""
        with self._open(source) as file:
            for batch in file.iter_batches(columns=["image"]):
                yield from batch["image"].to_pylist()

    def some(self, source: str, rows: Sequence[int], columns: Sequence[str]) -> "pandas.DataFrame":
        """Some columns of some images, in their order."""
        import pandas

        with self._open(source) as file:
            sizes = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
            starts = np.cumsum([0, *sizes])
            groups = (np.searchsorted(starts, rows, side="right") - 1).tolist()
            parts = [file.schema_arrow.empty_table().select([*columns]).to_pandas()]
            for group in sorted(set(groups)):
                own = sorted({row for row, k in zip(rows, groups, strict=True) if k == group})
                found = file.read_row_group(group, columns=[*columns]).to_pandas()
                found.index += starts[group]
                parts.append(found.loc[own])
        whole: pandas.DataFrame = pandas.concat(parts[1:] or parts)
        return whole.loc[list(rows)].reset_index(drop=True)

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
            raise UserError(f"{self._folder} is not complete ({reason}): run it again") from error
