"""Tar shards in the webdataset convention: images with their labels, found without unpacking.

Only headers are read to find the images, and an image's bytes when it is wanted. Nothing is written
to disk, links and devices are passed over, and every size is checked before it is believed. A
file with a name that leads elsewhere, or that was there before, and a cut are bad pictures.
"""

import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from os import SEEK_END
from os.path import commonpath
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO

from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.data.images import ImageFile
from sufficit.data.pixels import SUFFIXES, BadImageError, decode_image, while_there
from sufficit.errors import UserError

BLOCK = 512  # bytes of a header; what follows is filled up to a multiple
MOST_IMAGE = 2**26  # bytes of an image's file
MOST_WORDS = 2**20  # bytes of a label's file, and of a long name
KEYS = ("label", "cls")  # of the label in a .json
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


@dataclass(frozen=True, slots=True)
class Member(ImageFile):
    """A picture inside a shard, whose path is the shard's; its folder is the label's word."""

    offset: int
    size: int

    @property
    def root(self) -> Path:
        """The shard."""
        return self.path

    def read(self, view: View | None) -> Tensor:
        """What the model sees of it: [C,H,W] in 0..1."""
        if not 0 < self.size <= MOST_IMAGE:
            raise BadImageError(f"a file of {self.size} bytes, the limit is {MOST_IMAGE}")
        with while_there(self.root), self.path.open("rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
        return decode_image(BytesIO(content), view)

    def bytes(self) -> int:
        """The size of its file."""
        return self.size


@dataclass(frozen=True, slots=True)
class Refused(Member):
    """What is never read, under the byte where it lies: no picture's name, and safe in paths."""

    reason: str

    @property
    def problem(self) -> str:
        """Why it is refused."""
        return self.reason

    def read(self, view: View | None) -> Tensor:
        """Raise."""
        raise BadImageError(self.reason)


@dataclass(frozen=True)
class _File:
    """A plain file inside a tar: its name, where its bytes begin, and how many they are.

    The last one may stand for the place where the tar is cut off, and says so.
    """

    name: str
    offset: int
    size: int
    cut: str = ""

    @property
    def key(self) -> str:
        """The name without what follows the first dot of its last part."""
        path = PurePosixPath(self.name)
        return (path.parent / path.name.partition(".")[0]).as_posix()

    @property
    def kind(self) -> str:
        """What follows the last dot, in small letters."""
        return PurePosixPath(self.name).suffix.lower()


def is_shards(data: Path) -> bool:
    """Whether this names tar shards: one, or many as in shards/{0000..0012}.tar."""
    return data.suffix == ".tar" and not data.is_dir()


def expand(pattern: str) -> list[str]:
    """Every path that a pattern with {first..last} stands for.

    >>> expand("train-{08..11}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'train-11.tar']
    """
    found = _RANGE.search(pattern)
    if found is None:
        return [pattern]
    low, high = found.groups()
    numbers = range(int(low), int(high) + 1)
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [head + f"{n:0{len(low)}d}" + rest for n in numbers for rest in expand(tail)]


def shards_of(data: Path) -> list[Path]:
    """The shards that a path or pattern names."""
    paths = [Path(name) for name in expand(str(data))]
    for path in paths:
        if not path.is_file():
            raise UserError(f"no shard at {path}")
    return paths


def images_of_shards(paths: Sequence[Path]) -> Iterator[ImageFile]:
    """Every picture of these shards, in their order, under shard/name, found header by header.

    Files of one key are one sample. Its label may be among them: the word in KEY.cls, or under
    "label" or "cls" in KEY.json, a number or a class name.
    """
    return _labelled(_all_pictures(paths))


def _all_pictures(paths: Sequence[Path]) -> Iterator[Member]:
    root = Path(commonpath([path.parent.resolve() for path in paths]))
    words: dict[str, str] = {}  # so that each class is one string in memory
    for path in paths:
        yield from _pictures(path, path.resolve().relative_to(root).as_posix(), words)


def _labelled(pictures: Iterator[Member]) -> Iterator[Member]:
    """Those that are refused have the label of one beside them, if they have none of their own.

    So a cut does not look as a picture without a label among others that have one.
    """
    waiting, beside = list[Member](), None
    for picture in pictures:
        if isinstance(picture, Refused) and picture.folder is None:
            waiting.append(picture)
        else:
            beside = picture
        if beside is not None:
            yield from (replace(one, folder=beside.folder) for one in waiting)
            waiting.clear()
        if picture is beside:
            yield picture
    yield from waiting


def _pictures(shard: Path, name: str, words: dict[str, str]) -> Iterator[Member]:
    taken = set[str]()
    with while_there(shard), shard.open("rb") as file:
        for sample in _samples(_files(file, shard)):
            label = _label(file, sample)
            label = None if label is None else words.setdefault(label, label)
            lost = sample[-1].cut and label is None and bool(words)
            for one in sample:
                problem = one.cut or (lost and "the shard is cut off before its label")
                if one.kind in SUFFIXES or one.cut:
                    yield _member(shard, name, label, one, problem or _problem(one.name, taken))


def _member(shard: Path, name: str, label: str | None, one: _File, problem: str) -> Member:
    if problem:
        place = f"{name}/at byte {one.offset - BLOCK}"
        return Refused(shard, place, label, one.offset, one.size, problem)
    return Member(shard, f"{name}/{one.name}", label, one.offset, one.size)


def _problem(name: str, taken: set[str]) -> str:
    """Why a file of this name is refused, if it is; `taken` are the names before it."""
    path = PureWindowsPath(name)  # it knows both kinds of slashes
    if path.root or ".." in path.parts or "\0" in name:
        return f"its name can't be that of a file below a folder ({name[:100]!r})"
    plain = PurePosixPath(name).as_posix()
    if plain in taken:
        return f"a second file of this name in the shard ({name[:100]!r})"
    taken.add(plain)
    return ""


def _samples(files: Iterator[_File]) -> Iterator[list[_File]]:
    """Files of one key that follow each other; a cut belongs to those before it."""
    sample: list[_File] = []
    for file in files:
        if sample and not file.cut and file.key != sample[0].key:
            yield sample
            sample = []
        sample.append(file)
    if sample:
        yield sample


def _label(file: BinaryIO, sample: Sequence[_File]) -> str | None:
    """The word that names a sample's class; None where there is none."""
    for one in sample:
        if one.kind == ".cls" and one.size <= MOST_WORDS:
            return _content(file, one).decode("utf-8", "replace").strip() or None
        if one.kind == ".json" and one.size <= MOST_WORDS:
            return _json_label(_content(file, one))
    return None


def _json_label(content: bytes) -> str | None:
    try:
        facts = json.loads(content)
    except (ValueError, RecursionError):
        return None
    found = [facts[key] for key in KEYS if key in facts] if isinstance(facts, dict) else []
    known = [word for word in found if isinstance(word, int | str) and not isinstance(word, bool)]
    return str(known[0]) if known else None


def _content(file: BinaryIO, one: _File) -> bytes:
    file.seek(one.offset)
    return file.read(one.size)


def _files(file: BinaryIO, shard: Path) -> Iterator[_File]:
    """The plain files of a tar, by its headers alone."""
    end = file.seek(0, SEEK_END)
    place, renamed = 0, dict[str, str]()
    while place + BLOCK <= end:
        file.seek(place)
        header = _header(file.read(BLOCK), shard, place)
        if header is None:
            return
        about = header.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE)  # what follows it
        size = header.size if about else int(renamed.get("size", header.size))
        offset, place = place + BLOCK, place + BLOCK * (1 + -(-size // BLOCK))
        if size < 0 or offset + size > end:
            yield _File("", offset, 0, f"cut off in {header.name!r}: fetch it again")
            return
        if about:
            if size > MOST_WORDS:
                raise UserError(f"{shard} has a name of {size} bytes at byte {offset}: not read")
            content = _content(file, _File("", offset, size))
            long = header.type == tarfile.GNUTYPE_LONGNAME
            renamed |= {"path": _text(content)} if long else _records(content, shard)
            continue
        name, renamed = renamed.get("path", header.name), {}
        if header.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not _is_hidden(name):
            yield _File(name, offset, size)
    yield _File("", place + BLOCK, 0, f"cut off at byte {place}: fetch it again")


def _header(block: bytes, shard: Path, place: int) -> tarfile.TarInfo | None:
    """What a header says; None at the end."""
    if not any(block):
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise UserError(
            f"{shard} is no plain tar at byte {place} ({error}): unpack .tar.gz to .tar first"
        ) from error


def _records(content: bytes, shard: Path) -> dict[str, str]:
    """The path and size that a pax header gives to what follows it."""
    found: dict[str, str] = {}
    while match := re.match(rb"(\d{1,7}) ([^=]+)=", content):
        length = int(match[1])
        value = content[match.end() : length - 1]
        if match[2] in (b"path", b"size"):
            found[match[2].decode()] = _text(value)
        if match[2].startswith(b"GNU.sparse"):
            raise UserError(f"{shard} holds a sparse file: make it with plain files")
        content = content[max(length, 1) :]
    if not re.fullmatch(r"[0-9]{1,18}", size := found.get("size", "0")):
        raise UserError(f"{shard} has a header with size {size[:20]!r}")
    return found


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode("utf-8", "surrogateescape")


def _is_hidden(name: str) -> bool:
    """Whether the convention passes it over."""
    return PurePosixPath(name).name.startswith((".", "__"))
