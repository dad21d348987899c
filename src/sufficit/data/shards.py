"""Tar shards in the WebDataset convention: images with their labels, read without unpacking.

Only headers are read to list the images. A file whose name leads outside the shard, a second file
of one name, and a cut are bad images, listed under their byte position.
"""

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import SEEK_END
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO

from sufficit.data.image_files import (
    SUFFIXES,
    BadImageError,
    ImageFile,
    ahead,
    as_text,
    check_version,
    names_in_common,
    while_there,
)
from sufficit.errors import UserError
from sufficit.files import is_remote, version_of

AHEAD = 2**22  # bytes of a remote shard per request for headers
LABEL_KEYS = ("label", "cls")  # in a .json


@dataclass(frozen=True, slots=True)
class ShardImage(ImageFile):
    """An image inside a shard: `file` is the shard, `folder` the label's word."""

    inside = True

    def content(self) -> bytes:
        """Return the bytes of its file inside the shard."""
        if self.fault:
            raise BadImageError(self.fault)
        with while_there(self.path):
            path = self.path
            if is_remote(path):
                return path.read_range(self.start, self.start + self.size, self.version)
            check_version(path, self.version)
            with path.open("rb") as file:
                return _content(file, self.start, self.size)


@dataclass(frozen=True, slots=True)
class _File:
    """A regular file inside a tar; or, with `cut`, the place where the tar ends too early."""

    name: str
    offset: int
    size: int
    cut: str = ""

    @property
    def key(self) -> str:
        """The name up to the first dot of its last part: files of one key are one sample."""
        folder, slash, name = PurePosixPath(self.name).as_posix().rpartition("/")
        return folder + slash + name.partition(".")[0]

    @property
    def suffix(self) -> str:
        """Return the last suffix of the name, in lower case."""
        return PurePosixPath(self.name).suffix.lower()


def images_of_shards(paths: Sequence[Path]) -> Iterator[ShardImage]:
    """Return every image of these shards, in their order, named shard/name.

    The label of a sample is the word in KEY.cls, or under "label" or "cls" in KEY.json: a class
    name or number.
    """
    remote = any(is_remote(path) for path in paths)
    samples = ahead(_samples_in, paths) if remote else map(_samples_in, paths)
    words: dict[str, str] = {}  # so that each label is one string in memory
    shards = zip(paths, names_in_common(paths), samples, strict=True)
    for path, short, (version, labelled) in shards:
        file = str(path)
        taken = set[str]()
        for sample, word in labelled:
            label = None if word is None else words.setdefault(word, word)
            # Other samples have labels, so that of this one is behind the cut.
            lost = bool(sample[-1].cut and label is None and words)
            for member in sample:
                if member.suffix not in SUFFIXES and not member.cut:
                    continue
                problem = member.cut or (lost and "the shard is cut off before its label") or ""
                problem = problem or _name_problem(member.name, taken)
                # A refused name is not shown as one: the place in the shard names the image.
                name = f"at byte {member.offset - tarfile.BLOCKSIZE}" if problem else member.name
                name = as_text(f"{short}/{name}")
                yield ShardImage(file, name, label, problem, member.size, version, member.offset)


def _samples_in(path: Path) -> tuple[str, list[tuple[list[_File], str | None]]]:
    """Return the version of a shard, and its samples, each with the word for its class."""
    # Requests for single headers would take longer than reading all in between.
    with while_there(path), path.open("rb", AHEAD if is_remote(path) else -1) as file:
        samples = _samples(_files(file, path))
        return version_of(path), [(sample, _label(file, sample)) for sample in samples]


def _name_problem(name: str, taken: set[str]) -> str:
    """Return why a file of this name is refused, or ""; `taken` are the names before it."""
    path = PureWindowsPath(name)  # it knows both kinds of slashes
    if path.root or ".." in path.parts or "\0" in name:
        return f"its name can't be that of a file below a folder ({name[:100]!r})"
    plain = PurePosixPath(name).as_posix()
    if plain in taken:
        return f"a second file of this name in the shard ({name[:100]!r})"
    taken.add(plain)
    return ""


def _samples(files: Iterator[_File]) -> Iterator[list[_File]]:
    """Return consecutive files of one key; a cut belongs to the sample before it."""
    sample: list[_File] = []
    for file in files:
        if sample and not file.cut and file.key != sample[0].key:
            yield sample
            sample = []
        sample.append(file)
    if sample:
        yield sample


def _label(file: BinaryIO, sample: Sequence[_File]) -> str | None:
    """Return the word for a sample's class; None if there is none."""
    for member in sample:
        if member.suffix not in (".cls", ".json"):
            continue
        content = _content(file, member.offset, member.size)
        if member.suffix == ".cls":
            return content.decode("utf-8", "replace").strip() or None
        try:
            facts = json.loads(content)
        except (ValueError, RecursionError):
            return None
        words = [facts[key] for key in LABEL_KEYS if key in facts] if type(facts) is dict else []
        word = next((str(word) for word in words if type(word) in (int, str)), None)
        return word and word.encode("utf-8", "backslashreplace").decode()  # \ud800
    return None


def _content(file: BinaryIO, offset: int, size: int) -> bytes:
    """Return so many bytes from a place in a file."""
    file.seek(offset)
    return file.read(size)


def _files(file: BinaryIO, shard: Path) -> Iterator[_File]:
    """Return the regular files of a tar, found by its headers alone."""
    end = file.seek(0, SEEK_END)
    file.seek(0)
    place = 0
    try:
        # tarfile.open would also accept compressed files, of which no part can be read alone.
        with tarfile.TarFile(fileobj=file, errors="surrogateescape", encoding="utf-8") as tar:
            while member := tar.next():
                tar.members = []  # type: ignore[attr-defined]  # else it keeps a record of each
                place = tar.offset
                if member.issparse() or member.size < 0:
                    raise UserError(f"{shard} holds a sparse file: write it with plain files")
                if member.offset_data + member.size > end:
                    cut = f"cut off in {member.name!r}: fetch it again"
                    yield _File("", member.offset_data, 0, cut)
                    return
                hidden = PurePosixPath(member.name).name.startswith((".", "__"))  # by convention
                if member.isreg() and not hidden:
                    yield _File(member.name, member.offset_data, member.size)
            place = tar.offset
    except tarfile.TarError as error:
        if place == 0 and end >= tarfile.BLOCKSIZE:
            reason = f"{shard} is no plain tar at byte {place} ({error})"
            raise UserError(f"{reason}: unpack .tar.gz to .tar first") from error
    # tarfile ends in silence at a cut or a corrupt header. A whole tar ends with a block of zeros.
    block = _content(file, place, tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE or any(block):
        cut = f"cut off at byte {place}: fetch it again"
        yield _File("", place + tarfile.BLOCKSIZE, 0, cut)
