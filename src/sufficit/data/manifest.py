"""The images of a run in order: a parquet file with a row per unit, of which parts are read."""

import json
import math
import os
import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from importlib.util import find_spec
from itertools import islice, pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from sufficit.data.images import KINDS, ImageTensor, SourceImage
from sufficit.data.loader import Entry, Unit
from sufficit.errors import UserError
from sufficit.files import temporary_folder, writing

TEXTS = ("name", "folder", "problem", "column", "version")  # of images
NUMBERS = ("size", "start")
FILE = "file"  # as bytes, because a file's name need not be text
MANIFEST = "manifest.parquet"
GROUP = 256  # units that are read at a time
HELD = 4  # groups in memory, so that memory does not grow with the number of images


class Manifest:
    """Images with their labels, read from the manifest as they are needed.

    `numbers` gives the class number of a class word; `target` is the class of every image instead.
    Images in memory are given as `tensors`.
    """

    def __init__(
        self,
        path: Path,
        numbers: Mapping[str, int] | None = None,
        target: int | None = None,
        tensors: Sequence[ImageTensor] = (),
    ) -> None:
        from pyarrow import parquet

        self.path = path
        self.numbers = numbers
        self.target = target
        self.tensors = tensors
        try:
            self._file = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:  # pyarrow's errors are both
            raise UserError(
                f"cannot read {path} ({error}): use another --out, or --overwrite"
            ) from error
        facts = json.loads(self._file.metadata.metadata[b"facts"])
        self.unit: int = facts["unit"]
        self.images: int = facts["images"]
        self.words: list[str] = facts["words"]  # class folders or labels
        self.loose = facts["loose"], facts["first_loose"]  # images without one
        # pyarrow's file has one position, and several threads read.
        self._read = partial(_read_group, self._file, Lock())
        # Units are read nearly in order, so that the last few groups serve all threads.
        self._group = lru_cache(HELD)(self._read)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the file itself.
        return Manifest, (self.path, self.numbers, self.target, self.tensors)

    def labelled(
        self, numbers: Mapping[str, int] | None = None, target: int | None = None
    ) -> "Manifest":
        """Return the same images with other labels."""
        return self._with(numbers=numbers, target=target)

    def at(self, path: Path) -> "Manifest":
        """Return the same images; pickled, they are read from another copy of the file."""
        return self._with(path=path)

    def _with(self, **changed: Any) -> "Manifest":
        """Return a copy that shares the open file, whose temporary folder goes with it."""
        copy = object.__new__(Manifest)
        copy.__dict__ = self.__dict__ | changed
        return copy

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, number: int) -> Entry:
        unit, place = divmod(range(len(self))[number], self.unit)
        return [*self.of_unit(unit)][place]

    def __iter__(self) -> Iterator[Entry]:
        units = range(math.ceil(len(self) / self.unit))
        return (entry for unit in units for entry in self.of_unit(unit))

    def labels(self) -> npt.NDArray[np.int64]:
        """Return the class number of every image; its own number where it has no label: [N]."""
        if self.target is not None:
            return np.full(len(self), self.target)
        if self.numbers is None:
            return np.arange(len(self))
        words = self._column("folder")
        labels = (self._label(word) for unit in words for word in unit)
        return np.fromiter(labels, np.int64, len(self))

    def digests(self) -> list[str]:
        """Return a digest of each unit: names, sizes, versions and labels of its images."""
        return [str(digest) for digest in self._column("digest")]

    def save(self, path: Path) -> None:
        """Write a copy of the file."""
        with writing(path) as part:
            shutil.copyfile(self.path, part)

    def row(self, unit: int) -> dict[str, Any]:
        """Return the images of a unit by column."""
        group = self._group(unit // GROUP)
        row: dict[str, Any] = group.slice(unit % GROUP, 1).to_pylist()[0]
        return row

    def of_unit(self, unit: int) -> Iterator[Entry]:
        """Return the images of a unit."""
        row = self.row(unit)
        for k, kind in enumerate(row["kind"]):
            number = unit * self.unit + k
            if kind is None:
                image: SourceImage = self.tensors[number]
            else:
                fields: dict[str, Any] = {f: row[f][k] for f in KINDS[kind].__match_args__}
                fields[FILE] = os.fsdecode(fields[FILE])
                image = KINDS[kind](**fields)
            yield Entry(number, image, self._label(row["folder"][k]))

    def _label(self, word: str | None) -> int | None:
        """Return the class number for a class word."""
        if self.target is not None or self.numbers is None:
            return self.target
        # An image that is never read may have no label: any number will do.
        return next(iter(self.numbers.values())) if word is None else self.numbers[word]

    def _column(self, name: str) -> Iterator[Any]:
        """Return a column, unit by unit, of which no group stays in memory."""
        for group in range(self._file.num_row_groups):
            yield from self._read(group, [name]).column(name).to_pylist()


@dataclass(frozen=True)
class Units:
    """The images of a run in numbered batches, read from the manifest as they are needed."""

    entries: Manifest
    order: npt.NDArray[np.int64] | None = None  # the images' numbers; all of them, or some

    @property
    def images(self) -> int:
        """The number of all images."""
        return len(self.entries) if self.order is None else len(self.order)

    def __len__(self) -> int:
        return math.ceil(self.images / self.entries.unit)

    def __iter__(self) -> Iterator[Unit]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Unit:
        if self.order is None:
            return Unit(number, tuple(self.entries.of_unit(number)))
        rows = slice(number * self.entries.unit, (number + 1) * self.entries.unit)
        # Sorted, because the manifest and the data are read by neighbours.
        return Unit(number, tuple(self.entries[k] for k in sorted(self.order[rows].tolist())))

    def images_in(self, numbers: Iterable[int]) -> int:
        """Return the number of images of some units; the last one may be smaller."""
        unit = self.entries.unit
        n = self.images
        return sum(min(unit, n - number * unit) for number in numbers)


def listed(images: Iterable[SourceImage], unit: int) -> Manifest:
    """Return the manifest of images, in a temporary file that is deleted with it."""
    if find_spec("pyarrow") is None:
        raise UserError(
            "a run lists its images and writes its results with pyarrow, which is not installed:"
            " pip install pyarrow"
        )
    path = temporary_folder() / MANIFEST
    try:
        manifest = Manifest(path, tensors=_write(path, images, unit))
    except BaseException:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise
    # With the open file, not the manifest: copies with other labels share it.
    weakref.finalize(manifest._file, shutil.rmtree, path.parent, ignore_errors=True)
    return manifest


def _write(path: Path, images: Iterable[SourceImage], unit: int) -> list[ImageTensor]:
    """Write images as they are listed, a unit per row, and return those in memory.

    Memory does not grow with the number of the others.
    """
    import pyarrow
    from pyarrow import parquet

    types = dict.fromkeys(("kind", *TEXTS), pyarrow.string())
    types |= dict.fromkeys(NUMBERS, pyarrow.int64()) | {FILE: pyarrow.binary()}
    lists = {name: pyarrow.list_(kind) for name, kind in types.items()}
    schema = pyarrow.schema({"digest": pyarrow.string(), **lists})
    facts: dict[str, Any] = {"unit": unit, "images": 0, "loose": 0, "first_loose": None}
    words = set[str]()
    tensors = list[ImageTensor]()
    rest = iter(images)
    with writing(path) as part, parquet.ParquetWriter(part, schema) as writer:
        while group := list(islice(rest, GROUP * unit)):
            columns = {name: [getattr(image, name, None) for image in group] for name in types}
            columns[FILE] = [None if file is None else os.fsencode(file) for file in columns[FILE]]
            kinds = (type(image).__name__ for image in group)
            # Images in memory have no kind: they are not in the file, but next to it.
            columns["kind"] = [kind if kind in KINDS else None for kind in kinds]
            starts = [*range(0, len(group), unit), len(group)]
            table = {
                name: pyarrow.ListArray.from_arrays(starts, pyarrow.array(values, types[name]))
                for name, values in columns.items()
            }
            identities = list(
                zip(
                    columns["name"],
                    columns["size"],
                    columns["folder"],
                    columns["version"],
                    strict=True,
                )
            )
            # One digest per unit: to resume, a million images need not be compared one by one.
            digests = [sha256(repr(identities[a:b]).encode()) for a, b in pairwise(starts)]
            table["digest"] = pyarrow.array([digest.hexdigest()[:16] for digest in digests])
            writer.write_table(pyarrow.table(table, schema))
            tensors += [image for image in group if isinstance(image, ImageTensor)]
            words.update(word for word in columns["folder"] if word is not None)
            loose = [image.name for image in group if image.folder is None and not image.problem]
            facts["images"] += len(group)
            facts["loose"] += len(loose)
            facts["first_loose"] = facts["first_loose"] or next(iter(loose), None)
        facts["words"] = sorted(words)
        writer.add_key_value_metadata({"facts": json.dumps(facts)})
    return tensors


def _read_group(file: Any, lock: Lock, group: int, columns: Sequence[str] | None = None) -> Any:
    """Return a row group of a ParquetFile, as a table."""
    with lock:
        return file.read_row_group(group, columns=columns)
