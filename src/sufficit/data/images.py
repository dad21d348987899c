"""Image sources: a folder, class folders, tar shards or tensors."""

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import join, splitext
from pathlib import Path

from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.classifier.classifier import check_images
from sufficit.data import pixels
from sufficit.data.pixels import BadImageError, ignore_image_warnings, read_image, while_there
from sufficit.errors import UserError
from sufficit.files import is_unfinished

__all__ = ["BadImageError", "ignore_image_warnings", "read_image"]  # of `pixels`, for others


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file, its name relative to the root folder, and its class folder if it has one."""

    file: Path | str  # a str takes a quarter of a Path's memory
    name: str
    folder: str | None
    problem: str = ""  # why it cannot be read, if that is known without opening it

    @property
    def path(self) -> Path:
        """The file's path."""
        return Path(self.file)

    @property
    def root(self) -> Path:
        """The folder that the name is relative to."""
        above = self.path.parents
        return above[min(self.name.count("/"), len(above) - 1)]

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
class ImageSource:
    """Images in a fixed order."""

    images: Sequence[SourceImage]

    def __iter__(self) -> Iterator[SourceImage]:
        return iter(self.images)

    @staticmethod
    def of(images: Sequence[SourceImage]) -> "ImageSource":
        """A source of images that are listed already."""
        return ImageSource(images)

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
        return ImageSource([ImageTensor(*one) for one in found])


def open_images(root: Path | str) -> ImageSource:
    """Every image below a folder, sorted by path; first-level folders are classes.

    A .tar file, a pattern such as shards/{0000..0012}.tar, or a folder with shards and no images
    gives the images inside the shards, of which only the headers are read.
    """
    return ImageSource(list_images(root))


def list_images(root: Path | str) -> list[ImageFile]:
    """All images that `open_images` finds, as a list."""
    from sufficit.data import shards  # it builds on ImageFile

    root = Path(root)
    paths = shards.shards_of(root)
    found: list[ImageFile] = []
    if not paths:
        if not root.is_dir():
            raise UserError(f"no folder of images at {root}: give an existing folder or .tar file")
        found = list(_walk(root, str(root), "", None, set()))
        paths = [] if found else sorted(root.glob("*.tar"))
    found += shards.images_of_shards(paths)
    if not found:
        more = f" and {len(paths) - 1} more shards" if len(paths) > 1 else ""
        raise UserError(
            f"no images in {paths[0] if paths else root}{more}: expected files ending in"
            f" {', '.join(pixels.SUFFIXES)}"
        )
    escaped = Counter(image.name for image in found if "\\x" in image.name)
    for name, times in escaped.items():
        if times > 1:
            alike = f"two images in {root} have names that are written alike ({name})"
            raise UserError(f"{alike}: rename one")
    return found


def plain_name(name: str) -> str:
    """A class name in lower case, with spaces for _ and -.

    >>> plain_name("Rusty_Blackbird")
    'rusty blackbird'
    """
    return name.lower().replace("_", " ").replace("-", " ").strip()


def _walk(
    root: Path, folder: str, inside: str, label: str | None, seen: set[Path]
) -> Iterator[ImageFile]:
    """Everything below a folder that has an image's suffix, in the order of the paths.

    A link to a folder elsewhere is followed once (`seen`); one to a folder around or inside the
    root is not, because it would give the same images again, or never end.
    """
    files, folders = list[str](), set[str]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if _is_folder(entry, root):
                    folders.add(entry.name)
                # splitext: a Path for each of millions of names would take long.
                elif splitext(entry.name)[1].lower() in pixels.SUFFIXES:  # noqa: PTH122
                    files += [] if is_unfinished(entry.name) else [entry.name]
    except OSError as error:
        pixels.check_there(root, error)
        reason = f"{folder} can't be opened ({error.strerror})"
        warnings.warn(f"{reason}: its images are skipped", stacklevel=2)
        return
    for entry_name in sorted([*files, *folders]):
        name, path = _as_text(entry_name), join(folder, entry_name)  # noqa: PTH118  # fast
        if entry_name not in folders:
            yield ImageFile(path, inside + name, label)
            continue
        if Path(path).is_symlink():
            place, top = Path(path).resolve(), root.resolve()
            if place in seen or place.is_relative_to(top) or top.is_relative_to(place):
                continue
            seen.add(place)
        yield from _walk(root, path, f"{inside}{name}/", label or name, seen)


def _is_folder(entry: os.DirEntry[str], root: Path) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:  # a link to itself
        pixels.check_there(root, error)
        return False


def _as_text(name: str) -> str:
    r"""A name that can be written anywhere: bytes that are not UTF-8 become \xff.

    >>> print(_as_text("caf\udce9.png"))
    caf\xe9.png
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")
