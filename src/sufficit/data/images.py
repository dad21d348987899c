"""Image sources: a folder, class folders, tar shards or tensors, found one image at a time."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from os.path import join, splitext
from pathlib import Path

from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.classifier.classifier import check_images
from sufficit.data.pixels import (
    FORMATS,
    SUFFIXES,
    BadImageError,
    check_there,
    decode_image,
    ignore_image_warnings,
    read_image,
    while_there,
)
from sufficit.errors import UserError
from sufficit.files import is_unfinished

__all__ = [
    "FORMATS",
    "SUFFIXES",
    "BadImageError",
    "Classes",
    "ImageFile",
    "ImageSource",
    "ImageTensor",
    "SourceImage",
    "class_numbers",
    "classes_of",
    "decode_image",
    "ignore_image_warnings",
    "labels_of",
    "list_images",
    "open_images",
    "plain_name",
    "read_image",
]


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file, its name relative to the root folder, and its class folder if it has one."""

    file: Path | str  # a str takes a quarter of a Path's memory
    name: str
    folder: str | None

    @property
    def path(self) -> Path:
        """The file's path."""
        return Path(self.file)

    @property
    def root(self) -> Path:
        """The folder that the name is relative to."""
        above = self.path.parents
        return above[min(self.name.count("/"), len(above) - 1)]

    @property
    def problem(self) -> str:
        """Why it cannot be read, if that is known without opening it."""
        return ""

    def read(self, view: View | None) -> Tensor:
        """Decode it as the model sees it: [C,H,W] in 0..1."""
        with while_there(self.root):
            return read_image(self.path, view)

    def bytes(self) -> int:
        """The size of the file."""
        with while_there(self.root):
            return self.path.stat().st_size


@dataclass(frozen=True, slots=True, eq=False)
class ImageTensor:
    """An image in memory, with the attributes of an ImageFile so that a run takes both."""

    name: str
    folder: str | None  # the word for its class, if it has a label
    pixels: Tensor  # [C,H,W] in 0..1
    problem: str = ""

    def read(self, view: View | None) -> Tensor:
        """The pixels as they are; the view does not apply: [C,H,W]."""
        return self.pixels

    def bytes(self) -> int:
        """The size of the pixels in memory."""
        return self.pixels.nbytes

    def __reduce__(self) -> tuple[object, ...]:
        # A view would be pickled with the storage of all images.
        return ImageTensor, (self.name, self.folder, self.pixels.clone(), self.problem)


SourceImage = ImageFile | ImageTensor


@dataclass(frozen=True)
class Classes:
    """The class folders of a source, and the images outside of any class folder."""

    folders: tuple[str, ...]  # sorted
    loose: int = 0
    first_loose: str = ""

    def numbers(self, names: Sequence[str] | None, num_classes: int) -> dict[str, int]:
        """The class number of each folder; raise if some images are in no class folder."""
        if self.loose:
            raise UserError(
                f"{self.loose} images (first {self.first_loose}) are not in a class folder"
                f" ({self.folders[0]}, ...): move them, or score the model's own predictions with"
                " --targets prediction"
            )
        return class_numbers(self.folders, names, num_classes)


@dataclass(frozen=True)
class ImageSource:
    """Images in a fixed order, found again in each iteration; none is kept in memory."""

    walk: Callable[[], Iterable[SourceImage]]
    classes: Callable[[], Classes] | None = None  # None: known only image by image, as in shards

    def __iter__(self) -> Iterator[SourceImage]:
        return iter(self.walk())

    @staticmethod
    def of(images: Sequence[SourceImage]) -> "ImageSource":
        """A source of images that are listed already."""
        return ImageSource(lambda: images, lambda: classes_of(images))

    @staticmethod
    def from_tensors(
        images: Tensor,
        names: Sequence[str] | None = None,
        labels: Sequence[int | str] | Tensor | None = None,
    ) -> "ImageSource":
        """A source of images in memory: [N,C,H,W] in 0..1; labels are class numbers or names.

        >>> import torch
        >>> [image.name for image in ImageSource.from_tensors(torch.zeros(2, 3, 8, 8))]
        ['image-0000', 'image-0001']
        """
        check_images(images)
        n = len(images)
        names = [f"image-{number:04d}" for number in range(n)] if names is None else list(names)
        words = labels.tolist() if isinstance(labels, Tensor) else labels
        folders = [None] * n if words is None else [str(word) for word in words]
        for what, given in (("names", names), ("labels", folders)):
            if len(given) != n:
                raise UserError(f"{what} must have one entry per image, {n}, got {len(given)}")
        if len(set(names)) != n:
            raise UserError("names must differ from image to image: results are stored by name")
        found = zip(names, folders, images, strict=True)
        return ImageSource.of([ImageTensor(*one) for one in found])


def open_images(root: Path | str) -> ImageSource:
    """Every image below a folder, sorted by path; first-level folders are classes.

    A .tar file, a pattern such as shards/{0000..0012}.tar, or a folder with shards and no images
    gives the images inside the shards. Of a folder, one directory is listed at a time; of a shard,
    one header is read at a time.
    """
    from sufficit.data import shards  # it builds on ImageFile

    root = Path(root)
    paths = shards.shards_of(root) if shards.is_shards(root) else []
    if not paths:
        if not root.is_dir():
            raise UserError(f"no folder of images at {root}: give an existing folder or .tar file")
        search = partial(_Search, root, set())
        if next(search().images(), None) is not None:
            return ImageSource(lambda: search().all_images(), lambda: search().classes())
        paths = sorted(root.glob("*.tar"))
    if not paths or next(shards.images_of_shards(paths), None) is None:
        more = f" and {len(paths) - 1} more shards" if len(paths) > 1 else ""
        raise UserError(
            f"no images in {paths[0] if paths else root}{more}: expected files ending in"
            f" {', '.join(sorted(SUFFIXES))}"
        )
    return ImageSource(lambda: shards.images_of_shards(paths))


def list_images(root: Path | str) -> list[ImageFile]:
    """All images that `open_images` finds, as a list."""
    return [image for image in open_images(root) if isinstance(image, ImageFile)]


def classes_of(images: Sequence[SourceImage]) -> Classes:
    """The class folders of listed images."""
    folders = sorted({image.folder for image in images if image.folder is not None})
    loose = [image.name for image in images if image.folder is None]
    return Classes(tuple(folders), len(loose), loose[0] if loose else "")


def labels_of(
    images: Sequence[SourceImage], classes: Sequence[str] | None, num_classes: int
) -> list[int] | None:
    """The class number of each image, or None if there are no class folders."""
    found = classes_of(images)
    if not found.folders:
        return None
    numbers = found.numbers(classes, num_classes)
    return [numbers[image.folder] for image in images if image.folder is not None]


def class_numbers(
    folders: Sequence[str], classes: Sequence[str] | None, num_classes: int
) -> dict[str, int]:
    """Match class folders to the model's class names, to numbers, or in order if as many."""
    known = {plain_name(name): number for number, name in enumerate(classes or ())}
    if known and all(plain_name(folder) in known for folder in folders):
        return {folder: known[plain_name(folder)] for folder in folders}
    if all(folder.isdecimal() and int(folder) < num_classes for folder in folders):
        return {folder: int(folder) for folder in folders}
    if not known and len(folders) == num_classes:
        return {folder: number for number, folder in enumerate(folders)}
    strange = [folder for folder in folders if plain_name(folder) not in known]
    named = f" ({', '.join(list(classes)[:4])}, ...)" if classes else ""
    raise UserError(
        f"{len(folders)} class folders (first {strange[0]!r}) do not fit the model's"
        f" {num_classes} classes{named}: name the folders as the model names its classes, or by"
        " class number, or score the model's own predictions with --targets prediction"
    )


def plain_name(name: str) -> str:
    """A class name in lower case, with spaces for _ and -.

    >>> plain_name("Rusty_Blackbird")
    'rusty blackbird'
    """
    return name.lower().replace("_", " ").replace("-", " ").strip()


@dataclass
class _Search:
    """One walk over everything below a folder that has an image's suffix.

    A link to a folder elsewhere is followed once; one to a folder around or inside the root is
    not, because it would give the same images again, or never end.
    """

    root: Path
    warned: set[str]  # folders that could not be opened, shared by all walks
    seen: set[Path] = field(default_factory=set)  # where links have led
    escaped: set[str] = field(default_factory=set)  # names with bytes that are not UTF-8

    def images(self) -> Iterator[ImageFile]:
        """In the order of their paths."""
        for image in self._below(str(self.root), "", None):
            if "\\x" in image.name:
                if image.name in self.escaped:
                    raise UserError(
                        f"two images in {self.root} have names that are written alike"
                        f" ({image.name}): rename one"
                    )
                self.escaped.add(image.name)
            yield image

    def all_images(self) -> Iterator[ImageFile]:
        """The same for a folder that held some: an empty one is a lost mount."""
        found = None
        for found in self.images():
            yield found
        if found is None:
            check_there(self.root, FileNotFoundError(0, "it is empty"))

    def classes(self) -> Classes:
        """The first-level folders that hold an image; each is searched up to its first image."""
        names, folders = self._listed(str(self.root))
        inside = [name for name in names if name in folders and self._holds_any(name)]
        loose = [name for name in names if name not in folders]
        first = _as_text(loose[0]) if loose else ""
        return Classes(tuple(sorted(map(_as_text, inside))), len(loose), first)

    def _below(self, folder: str, inside: str, label: str | None) -> Iterator[ImageFile]:
        names, folders = self._listed(folder)
        for entry in names:
            name, path = f"{inside}{_as_text(entry)}", join(folder, entry)  # noqa: PTH118  # fast
            if entry not in folders:
                yield ImageFile(path, name, label)
            elif self._enters(path):
                yield from self._below(path, f"{name}/", label or _as_text(entry))

    def _holds_any(self, name: str) -> bool:
        path = join(self.root, name)  # noqa: PTH118  # as above
        return self._enters(path) and any(self._unsorted(path))

    def _unsorted(self, folder: str) -> Iterator[str]:
        """Images below a folder in any order: the first is found without a full listing."""
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if self._is_folder(entry):
                        if self._enters(entry.path):
                            yield from self._unsorted(entry.path)
                    elif _is_image(entry.name):
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

    def _listed(self, folder: str) -> tuple[list[str], set[str]]:
        """Sorted names of images and folders, and the folders; nothing if it cannot be opened."""
        names, folders = list[str](), set[str]()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if self._is_folder(entry):
                        folders.add(entry.name)
                    if entry.name in folders or _is_image(entry.name):
                        names.append(entry.name)
        except OSError as error:
            check_there(self.root, error)
            if folder not in self.warned:
                self.warned.add(folder)
                reason = f"{folder} can't be opened ({error.strerror})"
                warnings.warn(f"{reason}: its images are skipped", stacklevel=2)
            return [], set()
        return sorted(names), folders

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        try:
            return entry.is_dir()
        except OSError as error:  # a link to itself
            check_there(self.root, error)
            return False


def _is_image(name: str) -> bool:
    # splitext: a Path for each of millions of names would take long.
    return splitext(name)[1].lower() in SUFFIXES and not is_unfinished(name)  # noqa: PTH122


def _as_text(name: str) -> str:
    r"""A name that can be written anywhere: bytes that are not UTF-8 become \xff.

    >>> print(_as_text("caf\udce9.png"))
    caf\xe9.png
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")
