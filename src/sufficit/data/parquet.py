"""Images in parquet files, as Hugging Face writes them: a row per image, its bytes in a column.

Footers, labels and paths are read to list the images. To read one, the image column of its row
group is read, and the last few row groups are kept.
"""

import json
import math
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from os.path import commonprefix
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from sufficit.data.image_files import (
    BadImageError,
    ImageFile,
    ahead,
    check_version,
    names_in_common,
    while_there,
)
from sufficit.errors import UserError, setting
from sufficit.files import is_remote, place, version_of

LABELS = ("label", "labels", "fine_label")  # columns that hold labels, unless another is named
MOST_KEPT = 2**28  # bytes of row groups in memory, if they are more than two
_SPLIT = re.compile(r"(?:^|[-_./])(train|test|validation|valid|val|dev)(?=[-_./\d])")
_UNSAFE = r"(^|[/\\])\.\.([/\\]|$)|^[/\\]|^[A-Za-z]:|\x00|^$"  # names that lead out of a folder
_BYTES = ("binary", "large_binary", "binary_view")
_LABEL = re.compile(r"u?int\d+|float|double|(large_)?string(_view)?")  # types of pyarrow
_groups: dict[tuple[str, str, range], Any] = {}
"""The images of row groups, a pyarrow array by file, column and rows; the last one read is last."""
_reading = Lock()


@dataclass(frozen=True, slots=True)
class ParquetImage(ImageFile):
    """An image in a row: `file` is the parquet file, `size` the mean of its row group."""

    column: str = ""  # that holds the bytes; image.bytes is a field of a struct
    inside = True

    def content(self) -> bytes:
        """Return the bytes in its row."""
        with _reading:  # one at a time: threads mostly wait for the same row group
            of_column = (key for key in _groups if key[:2] == (self.file, self.column))
            key = next((key for key in of_column if self.start in key[2]), None)
            if key is None:
                key, images = _read_group(self)
            else:
                images = _groups.pop(key)
            _groups[key] = images  # now the last one
            # Two always stay: neighbours at the border of two groups would read both in turns.
            while len(_groups) > 2 and sum(kept.nbytes for kept in _groups.values()) > MOST_KEPT:
                del _groups[next(iter(_groups))]
        content: bytes | None = images[self.start - key[2].start].as_py()
        if not content:
            raise BadImageError("no bytes in its row")
        fault = replace(self, size=len(content)).fault
        if fault:  # too large
            raise BadImageError(fault)
        return content


@dataclass(frozen=True)
class Columns:
    """Where a parquet file has its images and labels."""

    image: str  # a column, or a field of a struct, as in image.bytes
    path: str | None  # the field with the path of each image
    label: str | None
    names: tuple[str, ...] | None  # of the classes, by number


@dataclass(frozen=True)
class _Rows:
    """The columns, groups, paths and labels of a parquet file, of which images are listed."""

    columns: Columns
    groups: tuple[tuple[int, int], ...]  # rows, and bytes of the images
    paths: Any  # a pyarrow array, None if there are none
    labels: Any
    version: str


def images_of_tables(
    paths: Sequence[Path],
    image_column: str | None = None,
    label_column: str | None = None,
    classes: list[str] | None = None,
) -> Iterator[ParquetImage]:
    """Return every row of these files; an image is named by its path in the row, or FILE/ROW.

    The paths are names if all rows have one, and no two the same. `classes` gets the names of all
    classes, in order, where the files have them.
    """

    def read(path: Path) -> _Rows:
        with _reading:  # it may have been changed since it was read
            for key in [key for key in _groups if key[0] == str(path)]:
                del _groups[key]
        return _rows_of(path, image_column, label_column)

    remote = any(is_remote(path) for path in paths)
    # Footers on object storage are read several at a time.
    tables = list(ahead(read, paths) if remote else map(read, paths))
    for path, table in zip(paths, tables, strict=True):
        if table.columns.names != tables[0].columns.names:
            other = f"{path} names other classes than {paths[0]}"
            raise UserError(f"{other}: give the files of one data set")
    if classes is not None and tables:
        classes[:] = tables[0].columns.names or ()
    # Names in all files, or in none: half of each would not tell images apart.
    named = _are_names([table.paths for table in tables])
    for path, short, table in zip(paths, names_in_common(paths), tables, strict=True):
        file = str(path)
        stem = short.removesuffix(".parquet")
        at = 0  # the first row of a group
        for rows, size in table.groups:
            group = slice(at, at + rows)
            names = table.paths[group].to_pylist() if named else None
            labels = [None] * rows if table.labels is None else table.labels[group].to_pylist()
            for row, label in enumerate(labels, at):
                name = f"{stem}/{row}" if names is None else names[row - at]
                word = _word(label, table.columns.names, path)
                yield ParquetImage(
                    file,
                    name,
                    word,
                    size=size // max(rows, 1),
                    version=table.version,
                    start=row,
                    column=table.columns.image,
                )
            at += rows


def tables_below(root: Path) -> list[Path]:
    """Return every parquet file below a folder; raise if they are the splits of a data set."""
    paths = sorted(root.rglob("*.parquet"), key=str)
    hidden = (".", "_", "metadata.")  # metadata.parquet goes with a folder of images
    paths = [path for path in paths if not path.name.startswith(hidden)]
    names = [str(path).removeprefix(str(root)).lstrip("/\\") for path in paths]
    parts: dict[tuple[str, str], list[str]] = {}
    for name in names:
        split = _SPLIT.search(name)
        config = PurePosixPath(name).parent.as_posix() if str(root).startswith("hf://") else ""
        parts.setdefault((config, split[1] if split else ""), []).append(name)
    if len(parts) > 1:
        patterns = [_pattern(names) for names in parts.values()]
        raise UserError(
            f"{root} holds several splits ({', '.join(patterns[:20])}): give one of them, as in"
            f" --data '{str(root).rstrip('/')}/{patterns[0]}'"
        )
    return paths


def choose_columns(
    schema: Any, path: Path, image_column: str | None = None, label_column: str | None = None
) -> Columns:
    """Return the columns of a pyarrow schema that hold the images and the labels."""
    features = _features(schema)
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise UserError(f"{path} has two columns called {twice[0]!r}: rename one of them")
    fields = {field.name: field.type for field in schema}
    bytes_of = {name: _bytes_in(name, kind) for name, kind in fields.items()}
    images = {name: column for name, column in bytes_of.items() if column}
    if image_column is None:
        marked = [name for name in images if features.get(name, {}).get("_type") == "Image"]
        nested = [name for name in images if images[name] != name]
        # Those that the data set calls images, else structs of bytes and path, else any bytes.
        options = marked or nested or list(images)
        if len(options) != 1:
            how_many = f"{len(options)} columns that may be" if options else "no column of"
            raise _wrong(path, f"{how_many} images", fields, "image_column", "NAME")
        image_column = options[0]
    elif image_column not in images:
        what = f"no column of images {image_column!r}"
        raise _wrong(path, what, fields, "image_column", "ANOTHER")
    # A dictionary is how pyarrow stores few values that repeat: its values say what they are.
    labels = [
        name
        for name, kind in fields.items()
        if _LABEL.fullmatch(str(kind.value_type if "dictionary<" in str(kind) else kind))
    ]
    if label_column is not None and label_column not in labels:
        what = f"no column of labels {label_column!r}"
        raise _wrong(path, what, fields, "label_column", "ANOTHER")
    label = label_column or next((name for name in LABELS if name in labels), None)
    names = features.get(label, {}).get("names") if label else None
    kind = fields[image_column]
    nested_path = None
    if images[image_column] != image_column and kind.get_field_index("path") >= 0:
        nested_path = f"{image_column}.path"
    classes = tuple(str(name) for name in names) if isinstance(names, list) else None
    return Columns(images[image_column], nested_path, label, classes)


def _wrong(path: Path, what: str, fields: dict[str, Any], option: str, value: str) -> UserError:
    """Return the error for a file whose columns do not say what is what."""
    listed = ", ".join(f"{name} ({kind})" for name, kind in list(fields.items())[:50])
    remedy = setting(option, value).replace("set", "Set", 1)
    return UserError(f"{path} has {what}. Its columns: {listed}. {remedy}")


def _bytes_in(name: str, kind: Any) -> str | None:
    """Return the column or its field that holds bytes; None if it does not."""
    if str(kind) in _BYTES:
        return name
    at = kind.get_field_index("bytes") if str(kind).startswith("struct<") else -1
    return f"{name}.bytes" if at >= 0 and str(kind.field(at).type) in _BYTES else None


def _features(schema: Any) -> dict[str, Any]:
    """Return the features that Hugging Face's metadata describe, by column."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            str(name): feature for name, feature in features.items() if isinstance(feature, dict)
        }
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return {}


def _rows_of(path: Path, image_column: str | None, label_column: str | None) -> _Rows:
    """Read the footer, the labels and the paths of a file."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        with while_there(path), _opened(path) as table:
            version = version_of(path)  # before it is read: what is read is not newer
            facts = table.metadata
            groups = [facts.row_group(k) for k in range(facts.num_row_groups)]
            columns = choose_columns(table.schema_arrow, path, image_column, label_column)
            wanted = [name for name in (columns.path, columns.label) if name is not None]
            texts = table.read(columns=wanted)
            texts.validate(full=True)  # or text that is none would fail later
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is no readable parquet file ({error}): fetch it again") from error
    # Sizes are known of leaves only, of which a struct of bytes and path has two.
    leaves = [facts.schema.column(k).path for k in range(facts.num_columns)]
    at = leaves.index(columns.image)
    images = tuple((group.num_rows, group.column(at).total_compressed_size) for group in groups)
    labels = None if columns.label is None else texts.column(columns.label)
    paths = None
    if columns.path is not None:
        paths = pc.struct_field(texts.column(columns.path.removesuffix(".path")), "path")
    return _Rows(columns, images, paths, labels, version)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a parquet file for the block; what is read of it comes in few requests."""
    import pyarrow.parquet as pq

    with path.open("rb") as file, pq.ParquetFile(file, pre_buffer=True) as table:
        yield table


def _read_group(image: ParquetImage) -> tuple[tuple[str, str, range], Any]:
    """Return the row group that an image is in, as `_groups` has it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    path = place(image.file)
    try:
        with while_there(path), _opened(path) as table:
            check_version(path, image.version)
            facts = table.metadata
            counts = [facts.row_group(k).num_rows for k in range(facts.num_row_groups)]
            ends = list(accumulate(counts))
            number = bisect_right(ends, image.start)
            if number == len(ends):
                raise BadImageError(f"{path} has {facts.num_rows} rows now: it was changed")
            (images,) = table.read_row_group(number, columns=[image.column]).columns
            if pa.types.is_struct(images.type):
                images = pc.struct_field(images, "bytes")
    except (pa.ArrowException, OSError) as error:
        raise BadImageError(f"row group of {path} can't be read ({error})") from error
    rows = range(ends[number] - counts[number], ends[number])
    return (image.file, image.column, rows), images


def _are_names(columns: Sequence[Any]) -> bool:
    """Return whether all paths are there, lead nowhere else, and differ."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not columns or any(column is None or column.null_count for column in columns):
        return False
    chunks = [chunk for column in columns for chunk in column.cast(pa.large_string()).chunks]
    whole = pa.chunked_array(chunks, pa.large_string())
    unsafe = pc.any(pc.match_substring_regex(whole, _UNSAFE)).as_py()
    return not unsafe and pc.count_distinct(whole).as_py() == len(whole)


def _word(value: Any, names: Sequence[str] | None, path: Path) -> str | None:
    """Return the word for a label; None if there is none."""
    if isinstance(value, float):  # whole numbers are stored so where some are missing
        if not math.isnan(value) and not value.is_integer():
            raise UserError(f"{path} has label {value}: give class numbers or names as labels")
        value = None if math.isnan(value) else int(value)
    if value is None or value == "" or (isinstance(value, int) and value < 0):
        return None
    if isinstance(value, int) and names is not None:
        if value >= len(names):
            wrong = f"{path} has label {value} and {len(names)} class names"
            raise UserError(f"{wrong}: fetch it again")
        return names[value]
    return sys.intern(str(value))  # one string in memory for each label


def _pattern(names: Sequence[str]) -> str:
    """Return a pattern that these names match.

    >>> _pattern(["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"])
    'data/train-*.parquet'
    """
    if len(names) == 1:
        return names[0]
    start = commonprefix(names)  # noqa: RUF071  # by characters
    return start.removesuffix(".parquet").rstrip("0123456789") + "*.parquet"
