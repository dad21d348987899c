"""Image files: found below a folder or by a pattern, and decoded as the model sees them.

Every file that cannot be read is a BadImageError.
"""

import errno
import math
import os
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from glob import glob
from io import BytesIO
from os.path import commonpath
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any, BinaryIO, ClassVar, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.data.pictures import FORMATS, BadImageError, read_picture
from sufficit.errors import GoneError, UserError, changed, warn_user
from sufficit.files import is_remote, is_unfinished, place, version_of

__all__ = ["FORMATS", "BadImageError", "ImageFile", "decode_image", "read_image"]  # for others

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

# Errors of a disk or mount that no longer responds, as against those of one bad file.
BROKEN = ("EHOSTDOWN", "EIO", "ENODEV", "ENOTCONN", "ENXIO", "ESTALE", "ETIMEDOUT")
MOST_IMAGE = 2**26  # bytes of an image that is read whole
REQUESTS = 16  # to object storage, at a time
MOST_FILES = 100_000  # that a pattern names
_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file, its name relative to the root folder, and its class folder if it has one.

    Every kind of stored image has text and numbers alone, so that it can be a row of a table.
    """

    file: str  # its path or address
    name: str
    folder: str | None
    problem: str = ""  # why it cannot be read, if that is known without opening it
    size: int = -1  # bytes, as listed; -1 if unknown
    version: str = ""  # what changes when the file is written again; "" if unknown
    start: int = 0  # its first byte or its row, inside a larger file
    inside: ClassVar[bool] = False  # a larger file, without which no image in it can be read

    @property
    def path(self) -> Path:
        """The file's path."""
        return place(self.file)

    @property
    def root(self) -> Path:
        """The folder that the name is relative to, or the larger file."""
        if self.inside:
            return self.path
        # A name may have more parts than the path has folders, as that of a file of a pattern.
        above = self.path.parents
        return above[min(self.name.count("/"), len(above) - 1)]

    def is_there(self) -> bool:
        """Whether the file can be seen from this machine now."""
        try:
            return self.path.exists()
        except OSError:
            return False

    def read(self, view: View | None) -> Tensor:
        """Decode it as the model sees it: [C,H,W] in 0..1."""
        if self.inside or is_remote(self.file):
            return decode_image(BytesIO(self.content()), view)
        path = self.path
        with while_there(self.root, path.parent):
            check_version(path, self.version, self.size)
            return read_image(path, view)

    def content(self) -> bytes:
        """The bytes of its file."""
        if self.fault:
            raise BadImageError(self.fault)
        path = self.path
        with while_there(self.root):
            try:
                if is_remote(path):
                    return path.read_object(self.version)
                check_version(path, self.version, self.size)
                return path.read_bytes()
            except OSError as error:
                raise BadImageError(f"can't be opened ({error.strerror})") from error

    @property
    def fault(self) -> str:
        """Why it can't be read whole, if that is known before it is opened."""
        if self.problem or 0 < self.size <= MOST_IMAGE or self.size < 0:
            return self.problem
        return f"a file of {self.size} bytes, the limit is {MOST_IMAGE}"


def check_version(path: Path, listed: str, size: int = -1) -> None:
    """Raise if a file was replaced after it was listed with this version and so many bytes.

    An unknown version is "", an unknown size -1.
    """
    now = version_of(path)
    if not listed or not now:  # a file that is gone: its reader says so
        return
    if now != listed or (size >= 0 and path.stat().st_size != size):
        raise changed(path)


def is_image(name: str) -> bool:
    """Whether a file of this name is taken for an image.

    >>> is_image("cat.JPG"), is_image("cat.txt")
    (True, False)
    """
    plain = not name.startswith(".") or (name.count(".") > 1 and not is_unfinished(name))
    return plain and name.lower().endswith(SUFFIXES)


_Listed = tuple[dict[str, tuple[int, str]], set[str]]
"""The images in a folder with size and version, and its folders."""


def images_below(root: Path, warned: set[str]) -> Iterator[ImageFile]:
    """Every image below a folder, in the order of the paths; first-level folders are classes.

    A folder without read permission is an error, because its images, maybe a whole class, would be
    missing. One that can't be opened for another reason is skipped, with a warning unless it is in
    `warned`; so is lost+found, which systems keep for themselves, without one. A link to a
    folder elsewhere is followed once; one to a folder around or inside the root is not, because it
    would give the same images again, or never end. On object storage subfolders are listed ahead.
    """
    local = partial(_listed, root, warned, set[Path]())

    def below(folder: str, listed: _Listed, inside: str, label: str | None) -> Iterator[Any]:
        files, folders = listed
        start = folder.rstrip("/") + "/"  # a Path for each of millions would take long
        paths = (start + name for name in sorted(folders))
        deeper = ahead(_listed_remote, paths) if is_remote(root) else map(local, paths)
        for entry in sorted([*files, *folders]):
            name = as_text(entry)
            if entry in files:
                yield ImageFile(start + entry, inside + name, label, "", *files[entry])
            else:
                yield below(start + entry, next(deeper), f"{inside}{name}/", label or name)

    # A stack of generators, one per open folder: the images come in the order of their paths, and
    # nothing but the names in these folders is in memory.
    top = str(root)
    listed = _listed_remote(top) if is_remote(root) else local(top)
    open_folders = [below(top, listed, "", None)]  # no recursion: there may be thousands of levels
    while open_folders:
        found = next(open_folders[-1], None)
        if found is None:
            open_folders.pop()
        elif isinstance(found, ImageFile):
            yield found
        else:
            open_folders.append(found)


def _listed(root: Path, warned: set[str], linked: set[Path], folder: str) -> _Listed:
    """What is in a folder below the root; nothing if it is a link that is not followed."""
    files = dict[str, tuple[int, str]]()
    folders = set[str]()
    if folder != str(root) and Path(folder).is_symlink():
        top = root.resolve()
        target = Path(folder).resolve()
        if target in linked or target.is_relative_to(top) or top.is_relative_to(target):
            return files, folders
        linked.add(target)
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    is_folder = entry.is_dir()
                except OSError as error:  # a link to itself
                    check_there(root, error)
                    is_folder = False
                if is_folder:
                    folders |= {entry.name} - {"lost+found"}
                elif is_image(entry.name):
                    files[entry.name] = _facts(entry)
    except OSError as error:
        check_there(root, error)
        reason = f"{folder} can't be opened ({error.strerror})"
        if isinstance(error, PermissionError):
            raise UserError(
                f"{reason}, so its images would be missing: give permission to read and enter"
                " it, or move it out of the data"
            ) from error
        if folder not in warned:
            warned.add(folder)
            warn_user(f"{reason}: its images are skipped")
        return {}, set()
    return files, folders


def _listed_remote(folder: str) -> _Listed:
    path = place(folder)
    assert is_remote(path)  # the caller asked
    try:
        entries = list(path.entries())
    except FileNotFoundError as error:
        raise UserError(f"no folder of images at {folder}: check the address") from error
    files = {name: (size, version) for name, kind, size, version in entries if kind != "directory"}
    folders = {name for name, kind, *_ in entries if kind == "directory"}
    return {name: facts for name, facts in files.items() if is_image(name)}, folders


def ahead(work: Callable[[S], T], items: Iterable[S], threads: int = REQUESTS) -> Iterator[T]:
    """What `work` returns for each item, in order, computed by threads a few items ahead.

    >>> list(ahead(abs, [-1, 2, -3], threads=2))
    [1, 2, 3]
    """
    waiting = deque[Future[T]]()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


# Files that a pattern names: web/{000..012}.tar, data/train-*.parquet


def files_named(data: Path, suffix: str) -> list[Path]:
    """The files with this suffix that a path or a pattern names; none if it names another thing."""
    if data.suffix != suffix:
        return []
    paths = [path for name in expand(str(data)) for path in _matching(name)]
    # On object storage each question is a request, so several are sent at a time.
    for path, there in zip(paths, ahead(lambda path: path.is_file(), paths), strict=True):
        if not there and path == data and path.is_dir():
            return []
        if not there:
            raise UserError(f"no file at {path}: check the path or the range in the pattern")
    return paths


def names_in_common(paths: Sequence[Path]) -> list[str]:
    """Each path relative to the folder that all of them are in.

    >>> names_in_common([Path("in/a/1.tar"), Path("in/b/1.tar")])
    ['a/1.tar', 'b/1.tar']
    """
    whole = [PurePosixPath(p.path) if is_remote(p) else p.resolve() for p in paths]
    root = commonpath([path.parent for path in whole]) if whole else ""
    return [path.relative_to(root).as_posix() for path in whole]


def expand(pattern: str) -> list[str]:
    """Every path of a pattern with {first..last}.

    >>> expand("train-{08..11}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'train-11.tar']
    """
    found = _RANGE.search(pattern)
    if found is None:
        return [pattern]
    counts = [int(high) - int(low) + 1 for low, high in _RANGE.findall(pattern)]
    if math.prod(max(0, count) for count in counts) > MOST_FILES:
        raise UserError(f"{pattern} names more than {MOST_FILES} files: give a smaller range")
    low, high = found.groups()
    head = pattern[: found.start()]
    tails = expand(pattern[found.end() :])
    numbers = (f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1))
    return [head + number + tail for number in numbers for tail in tails]


def _matching(name: str) -> list[Path]:
    """The path of this name, or those that match it if it has a * or **."""
    if "*" not in name or (not is_remote(name) and Path(name).exists()):
        return [place(name)]
    if is_remote(name):
        folder, _, _ = name.partition("*")[0].rpartition("/")
        found = sorted(place(folder).glob(name[len(folder) + 1 :]), key=str)
    else:
        found = [Path(path) for path in sorted(glob(name, recursive=True))]  # noqa: PTH207  # may be absolute
    if not found:
        raise UserError(f"no file matches {name}: check the path or the pattern")
    return found


def as_text(name: str) -> str:
    r"""A name that can be written anywhere: bytes that are not UTF-8 become \xff.

    >>> print(as_text("caf\udce9.png"))
    caf\xe9.png
    """
    if name.isascii():
        return name
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _facts(entry: os.DirEntry[str]) -> tuple[int, str]:
    """Size and version of a file."""
    try:
        known = entry.stat()
        return known.st_size, str(known.st_mtime_ns)
    except OSError as error:  # a broken link: what is wrong with it is said when it is read
        if isinstance(error, PermissionError) and not entry.is_symlink():
            raise  # of the folder, which is listed and may not be entered
        return -1, ""


def read_image(path: Path, view: View | None) -> Tensor:
    """Decode a file as the model sees it: [C,H,W] in 0..1."""
    try:
        facts = path.stat()
    except OSError as error:
        raise BadImageError(f"can't be opened ({error.strerror})") from error
    if not S_ISREG(facts.st_mode):  # opening a pipe would block for ever
        raise BadImageError("a pipe, socket, device or folder, not a file")
    if facts.st_size == 0:
        raise BadImageError("the file is empty")
    return decode_image(path, view)


def decode_image(
    file: Path | BinaryIO,
    view: View | None,
    kinds: tuple[str, ...] | None = None,
    most_pixels: int | None = None,
) -> Tensor:
    """Decode a file or its bytes as the model sees it: [C,H,W] in 0..1.

    Options are those of `read_picture`.
    """
    return pixels_of(read_picture(file, view or View(), kinds, most_pixels))


def pixels_of(seen: Image.Image) -> Tensor:
    """An image in mode L or RGB as float: [C,H,W] in 0..1.

    >>> pixels_of(Image.new("RGB", (1, 1), (255, 0, 255))).flatten().tolist()
    [1.0, 0.0, 1.0]
    """
    values = torch.from_numpy(np.array(seen))
    return in_0_1(values.view(seen.height, seen.width, -1).permute(2, 0, 1))


def in_0_1(values: Tensor) -> Tensor:
    """Bytes as float in 0..1, to the bit as torchvision converts them, which is slow to import."""
    return values.to(torch.float32).mul_(1 / 255)


@contextmanager
def ignore_image_warnings() -> Iterator[None]:
    """Silence Pillow's warnings about odd metadata and large images: what matters is an error."""
    with warnings.catch_warnings():  # of the whole process, so around a run, not around each file
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


@contextmanager
def while_there(root: Path, folder: Path | None = None) -> Iterator[None]:
    """Raise GoneError for a read error inside if the cause is that root or folder are gone."""
    try:
        yield
    except (BadImageError, OSError) as error:
        check_there(root, error)
        if folder is not None:
            check_there(folder, error, may_be_empty=True)
        raise


def check_there(root: Path, error: BaseException, *, may_be_empty: bool = False) -> None:
    """Raise GoneError if a read error means that the folder or shard is gone, not one bad file."""
    cause = error if isinstance(error, OSError) else error.__cause__
    # Pillow's errors have the one of the disk as their cause.
    number = getattr(cause, "errno", None)
    reason = getattr(cause, "strerror", None)
    broken = errno.errorcode.get(number or 0) in BROKEN
    if not broken and _can_be_read(root, may_be_empty):
        return
    raise GoneError(
        f"{root} can't be read any more ({reason or 'it does not exist'}): bring it back and give"
        " the same command to resume"
    ) from error


def _can_be_read(root: Path, may_be_empty: bool) -> bool:
    """Whether a file or folder can be read; a lost mount is an empty folder."""
    if is_remote(root):
        return root.exists()
    try:
        if root.is_file():
            root.open("rb").close()
            return True
        os.stat(f"{root}/.")  # noqa: PTH116  # needs permission to enter; a Path drops the dot
        with os.scandir(root) as entries:
            return may_be_empty or next(entries, None) is not None
    except OSError:
        return False
