"""Image files: one file per image, below a folder, with its class folder."""

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from os.path import join, splitext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.data import pixels
from sufficit.data.pixels import BadImageError, decode_image, read_image, while_there
from sufficit.errors import UserError
from sufficit.files import is_remote, is_unfinished, place

if TYPE_CHECKING:
    from sufficit.storage import RemotePath

MOST_IMAGE = 2**26  # bytes of an image that is read whole
REQUESTS = 16  # to object storage, at a time
_Folder = tuple[str, str, str | None]  # its path, the start of its images' names, their class
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

    @property
    def path(self) -> Path:
        """The file's path."""
        return place(self.file)

    @property
    def root(self) -> Path:
        """The folder that the name is relative to."""
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
        if is_remote(self.file):
            return decode_image(BytesIO(self.content()), view)
        with while_there(self.root):
            return read_image(self.path, view)

    def content(self) -> bytes:
        """The bytes of its file."""
        if self.fault:
            raise BadImageError(self.fault)
        with while_there(self.root):
            try:
                return self.path.read_bytes()
            except OSError as error:
                raise BadImageError(f"can't be opened ({error.strerror})") from error

    @property
    def fault(self) -> str:
        """Why it can't be read whole, if that is known before it is opened."""
        if self.problem or not (self.size == 0 or self.size > MOST_IMAGE):
            return self.problem
        return f"a file of {self.size} bytes, the limit is {MOST_IMAGE}"


def is_image(name: str) -> bool:
    """Whether a file of this name is taken for an image.

    >>> is_image("cat.JPG"), is_image("cat.txt")
    (True, False)
    """
    if name.startswith("."):
        return splitext(name)[1].lower() in pixels.SUFFIXES and not is_unfinished(name)  # noqa: PTH122
    return name.lower().endswith(pixels.SUFFIXES)  # fast, as there may be millions


def images_below(root: Path, warned: set[str]) -> Iterator[ImageFile]:
    """Every image below a folder, in the order of the paths; first-level folders are classes.

    A folder that can't be opened is skipped, with a warning unless it is in `warned`. A link to a
    folder elsewhere is followed once; one to a folder around or inside the root is not, because it
    would give the same images again, or never end.
    """
    if is_remote(root):
        yield from _remote_images(str(root), _listed(str(root)), "", None)
        return
    top, seen = root.resolve(), set[Path]()

    def below(folder: str, inside: str, label: str | None) -> Iterator[ImageFile | _Folder]:
        files, folders = dict[str, tuple[int, str]](), set[str]()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if _is_folder(entry, root):
                        folders.add(entry.name)
                    elif is_image(entry.name):
                        files[entry.name] = _facts(entry)
        except OSError as error:
            pixels.check_there(root, error)
            if folder not in warned:
                warned.add(folder)
                reason = f"{folder} can't be opened ({error.strerror})"
                warnings.warn(f"{reason}: its images are skipped", stacklevel=2)
            return
        start = join(folder, "")  # noqa: PTH118  # a Path for each of millions would take long
        for entry_name in sorted([*files, *folders]):
            name, path = as_text(entry_name), start + entry_name
            if entry_name in files:
                yield ImageFile(path, inside + name, label, "", *files[entry_name])
                continue
            if Path(path).is_symlink():
                target = Path(path).resolve()
                if target in seen or target.is_relative_to(top) or top.is_relative_to(target):
                    continue
                seen.add(target)
            yield path, f"{inside}{name}/", label or name

    open_folders = [below(str(root), "", None)]  # no recursion: there may be thousands of levels
    while open_folders:
        found = next(open_folders[-1], None)
        if found is None:
            open_folders.pop()
        elif isinstance(found, ImageFile):
            yield found
        else:
            open_folders.append(below(*found))


def _remote_images(
    folder: str, listed: "_Listed", inside: str, label: str | None
) -> Iterator[ImageFile]:
    """The same below a folder on object storage, whose subfolders are listed ahead."""
    files, folders = listed
    start = folder.rstrip("/") + "/"
    deeper = ahead(_listed, (start + name for name in sorted(folders)))
    for name in sorted([*files, *folders]):
        if name in files:
            yield ImageFile(start + name, inside + name, label, "", *files[name])
        else:
            yield from _remote_images(start + name, next(deeper), f"{inside}{name}/", label or name)


_Listed = tuple[dict[str, tuple[int, str]], set[str]]
"""The images in a folder with size and version, and its folders."""


def _listed(folder: str) -> _Listed:
    files, folders = dict[str, tuple[int, str]](), set[str]()
    try:
        for name, kind, size, version in cast("RemotePath", place(folder)).entries():
            if kind == "directory":
                folders.add(name)
            elif is_image(name):
                files[name] = size, version
    except FileNotFoundError as error:
        raise UserError(f"no folder of images at {folder}: check the address") from error
    return files, folders


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


def as_text(name: str) -> str:
    r"""A name that can be written anywhere: bytes that are not UTF-8 become \xff.

    >>> print(as_text("caf\udce9.png"))
    caf\xe9.png
    """
    if name.isascii():
        return name
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _is_folder(entry: os.DirEntry[str], root: Path) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:  # a link to itself
        pixels.check_there(root, error)
        return False


def _facts(entry: os.DirEntry[str]) -> tuple[int, str]:
    """Size and version of a file."""
    try:
        known = entry.stat()
        return known.st_size, str(known.st_mtime_ns)
    except OSError:  # a broken link: what is wrong with it is said when it is read
        return -1, ""
