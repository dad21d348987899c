"""Pictures one after the other, found as they are asked for: below a folder, in shards, listed."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from os.path import join, splitext
from pathlib import Path

from sufficit.data.images import SUFFIXES, Classes, ImageFile, classes_of
from sufficit.data.places import check_there
from sufficit.data.shards import is_shards, pictures_of_shards, shards_of
from sufficit.errors import UserError
from sufficit.files import is_unfinished


@dataclass(frozen=True)
class ImageSource:
    """Pictures in one order, found anew whenever they are gone through; none is kept."""

    walk: Callable[[], Iterable[ImageFile]]
    classes: Callable[[], Classes] | None = None  # None where only each picture tells its own

    def __iter__(self) -> Iterator[ImageFile]:
        return iter(self.walk())

    @staticmethod
    def of(pictures: Sequence[ImageFile]) -> "ImageSource":
        """Pictures that are known already."""
        return ImageSource(lambda: pictures, lambda: classes_of(pictures))


def open_images(root: Path) -> ImageSource:
    """Every picture below a folder, sorted by name; a first-level folder is a class.

    A .tar, a pattern as shards/{0000..0012}.tar, or a folder with shards and no pictures gives the
    pictures inside. Of a folder one directory is listed at a time, of a shard one header read.
    """
    if is_shards(root):
        return _shards(shards_of(root))
    if not root.is_dir():
        raise UserError(f"no folder of images at {root}")
    search = partial(_Search, root, set())
    if next(search().pictures(), None) is not None:
        return ImageSource(lambda: search().known(), lambda: search().classes())
    if shards := sorted(root.glob("*.tar")):
        return _shards(shards)
    raise _none_in(str(root))


def _shards(paths: Sequence[Path]) -> ImageSource:
    if next(pictures_of_shards(paths), None) is None:
        more = f" and {len(paths) - 1} more shards" if len(paths) > 1 else ""
        raise _none_in(f"{paths[0]}{more}")
    return ImageSource(lambda: pictures_of_shards(paths))


def _none_in(place: str) -> UserError:
    return UserError(f"no images in {place}: looked for {', '.join(sorted(SUFFIXES))}")


@dataclass
class _Search:
    """All that is below a folder and named as a picture, be it a file or not.

    A link to a folder elsewhere is followed, once; one to a folder around or inside the root is
    not, as it would bring the same pictures again, or never end.
    """

    root: Path
    told: set[str]  # folders of which it was said that they can't be opened
    seen: set[Path] = field(default_factory=set)  # where links have led
    odd: set[str] = field(default_factory=set)  # names with bytes that are written as text

    def pictures(self) -> Iterator[ImageFile]:
        """In the order of their paths."""
        for picture in self._below(str(self.root), "", None):
            if "\\x" in picture.name:
                self._check_alike(picture.name)
            yield picture

    def known(self) -> Iterator[ImageFile]:
        """The same of a folder that held some: where a mount was, an empty one is left."""
        found = None
        for found in self.pictures():
            yield found
        if found is None:
            check_there(self.root, FileNotFoundError(0, "it is empty"))

    def classes(self) -> Classes:
        """The first-level folders that hold a picture, looked into no further than to one."""
        found = self._listed(str(self.root))
        inside = [n for n in found.names if n in found.folders and self._holds_any(n)]
        loose = [name for name in found.names if name not in found.folders]
        first = _as_text(loose[0]) if loose else ""
        return Classes(tuple(sorted(map(_as_text, inside))), len(loose), first)

    def _below(self, folder: str, inside: str, label: str | None) -> Iterator[ImageFile]:
        found = self._listed(folder)
        for entry in found.names:
            name, path = f"{inside}{_as_text(entry)}", join(folder, entry)  # noqa: PTH118
            if entry not in found.folders:
                yield ImageFile(path, name, label)
            elif self._enters(path):
                yield from self._below(path, f"{name}/", label or _as_text(entry))

    def _holds_any(self, name: str) -> bool:
        path = join(self.root, name)  # noqa: PTH118  # as above
        return self._enters(path) and any(self._unsorted(path))

    def _unsorted(self, folder: str) -> Iterator[str]:
        """Pictures below a folder in any order: the first costs no more than a look."""
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if self._is_folder(entry):
                        if self._enters(entry.path):
                            yield from self._unsorted(entry.path)
                    elif _is_picture(entry.name):
                        yield entry.name
        except OSError as error:
            check_there(self.root, error)

    def _enters(self, folder: str) -> bool:
        path = Path(folder)
        if not path.is_symlink():
            return True
        place, top = path.resolve(), self.root.resolve()
        if place in self.seen or place.is_relative_to(top) or top.is_relative_to(place):
            return False
        self.seen.add(place)
        return True

    def _listed(self, folder: str) -> "_Listing":
        """What a folder holds, by name; nothing where it can't be opened, which is said once.

        Where all of the root is gone, it is no folder's own fault.
        """
        names, folders = list[str](), set[str]()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if self._is_folder(entry):
                        folders.add(entry.name)
                    if entry.name in folders or _is_picture(entry.name):
                        names.append(entry.name)
        except OSError as error:
            check_there(self.root, error)
            if folder not in self.told:
                self.told.add(folder)
                warnings.warn(
                    f"{folder} can't be opened ({error.strerror}): images in it are left out",
                    stacklevel=2,
                )
            return _Listing([], set())
        return _Listing(sorted(names), folders)

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        try:
            return entry.is_dir()
        except OSError as error:  # a link to itself
            check_there(self.root, error)
            return False

    def _check_alike(self, name: str) -> None:
        if name in self.odd:
            raise UserError(
                f"two images in {self.root} have names that are written alike: rename them"
            )
        self.odd.add(name)


@dataclass(frozen=True)
class _Listing:
    """The pictures and folders of a folder, sorted; text takes a third of an entry's memory."""

    names: list[str]
    folders: set[str]


def _is_picture(name: str) -> bool:
    # A Path for each of millions would take long.
    return splitext(name)[1].lower() in SUFFIXES and not is_unfinished(name)  # noqa: PTH122


def _as_text(name: str) -> str:
    r"""A name that can be written anywhere: bytes that are no UTF-8 stand as \xff.

    >>> print(_as_text("caf\udce9.png"))
    caf\xe9.png
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")
