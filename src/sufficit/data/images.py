"""Image sources: a folder, class folders, tar shards, parquet files or tensors."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import nsmallest
from itertools import chain
from operator import itemgetter
from pathlib import Path

from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.classifier.classifier import check_images
from sufficit.data.image_files import (
    SUFFIXES,
    BadImageError,
    ImageFile,
    files_named,
    ignore_image_warnings,
    images_below,
    read_image,
)
from sufficit.data.parquet import ParquetImage, images_of_tables, tables_below
from sufficit.data.shards import ShardImage, images_of_shards
from sufficit.errors import UserError
from sufficit.files import is_remote, place

__all__ = ["BadImageError", "ImageFile", "ignore_image_warnings", "read_image"]  # for others

KINDS = {kind.__name__: kind for kind in (ImageFile, ShardImage, ParquetImage)}  # of stored images


@dataclass(frozen=True, slots=True, eq=False)
class ImageTensor:
    """An image in memory, with the attributes of an ImageFile so that a run takes both."""

    name: str
    folder: str | None  # the word for its class, if it has a label
    pixels: Tensor  # [C,H,W] in 0..1
    problem: str = ""

    def read(self, view: View | None) -> Tensor:
        """Return the pixels as they are; the view does not apply: [C,H,W]."""
        return self.pixels

    @property
    def size(self) -> int:
        """The bytes of the pixels in memory."""
        return self.pixels.nbytes

    def is_there(self) -> bool:
        """Return True: nobody else can delete an image in memory."""
        return True

    def __reduce__(self) -> tuple[object, ...]:
        # A view would be pickled with the storage of all images.
        return ImageTensor, (self.name, self.folder, self.pixels.clone(), self.problem)


SourceImage = ImageFile | ImageTensor


def drawn(images: Iterable[SourceImage], count: int, seed: int) -> list[SourceImage]:
    """Return so many of the images, in their order; seed and names decide which, not the order."""

    # A hash of each name, so that the same images are drawn when others are added or listed first.
    def key(numbered: tuple[int, SourceImage]) -> bytes:
        _, image = numbered
        return blake2b(f"{seed}/{image.name}".encode(errors="surrogateescape")).digest()

    chosen = nsmallest(count, enumerate(images), key)
    return [image for _, image in sorted(chosen, key=itemgetter(0))]


@dataclass(frozen=True)
class ImageSource:
    """Images in a fixed order, that can be iterated over again."""

    images: Iterable[SourceImage]
    # The names of all classes in order, if files name them; known once it is listed.
    classes: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[SourceImage]:
        return iter(self.images)

    @staticmethod
    def from_tensors(
        images: Tensor,
        names: Sequence[str] | None = None,
        labels: Sequence[int | str] | Tensor | None = None,
    ) -> "ImageSource":
        """Return a source of images in memory: [N,C,H,W] in 0..1.

        - images: the pixels of all images.
        - names: of the images, each once; None: image-0000 and so on.
        - labels: class numbers or class names; None: the images have no labels.

        >>> import torch
        >>> [image.name for image in ImageSource.from_tensors(torch.zeros(2, 3, 8, 8))]
        ['image-0000', 'image-0001']
        """
        check_images(images)
        n = len(images)
        names = [f"image-{number:04d}" for number in range(n)] if names is None else list(names)
        words = labels.tolist() if isinstance(labels, Tensor) else labels
        folders = [None] * n if words is None else [str(word) for word in words]
        for what, entries in (("names", names), ("labels", folders)):
            if len(entries) != n:
                raise UserError(f"{what} must have one entry per image, {n}, got {len(entries)}")
        if len(set(names)) != n:
            raise UserError("names must differ from image to image: results are stored by name")
        rows = zip(names, folders, images, strict=True)
        return ImageSource([ImageTensor(name, folder, pixels) for name, folder, pixels in rows])


@dataclass(frozen=True)
class Listing:
    """The images that a path names. Each iteration lists them again, as it goes."""

    root: Path
    image_column: str | None = None
    label_column: str | None = None
    classes: list[str] = field(default_factory=list)  # in order, where the files name them
    _warned: set[str] = field(default_factory=set)

    def __iter__(self) -> Iterator[ImageFile]:
        escaped = set[str]()
        is_empty = True
        for image in self._listed():
            is_empty = False
            # So `as_text` writes bytes that are no text; a name may also hold these very letters.
            if "\\x" in image.name:
                if image.name in escaped:
                    alike = f"two images in {self.root} have names that are written alike"
                    raise UserError(f"{alike} ({image.name}): rename one")
                escaped.add(image.name)
            yield image
        if is_empty:
            kinds = f"{', '.join(SUFFIXES)}, .tar or .parquet"
            raise UserError(f"no images in {self.root}: expected files ending in {kinds}")

    def _listed(self) -> Iterator[ImageFile]:
        """Return the images of what the path names: shards, parquet files or a folder."""
        root = self.root
        names_columns = self.image_column is not None or self.label_column is not None
        if is_remote(root):
            root.fs.invalidate_cache()  # hf:// keeps what it listed before
        shards = files_named(root, ".tar")
        tables = files_named(root, ".parquet")
        if not shards and not tables and not root.is_dir():
            if is_remote(root) and root.lacks_bucket():
                raise UserError(f"no folder of images at {root}: there is no such bucket")
            if not is_remote(root) and root.exists():
                raise UserError(f"{root} is one file: give the folder it is in")
            kinds = "an existing folder, .tar or .parquet file"
            token = "; a private data set needs HF_TOKEN" if str(root).startswith("hf://") else ""
            raise UserError(f"no folder of images at {root}: give {kinds}{token}")
        # A data set of the Hub may have some pictures for its page next to its parquet files.
        if not shards and not tables and (names_columns or str(root).startswith("hf://")):
            tables = tables_below(root)
        if names_columns and not tables:
            raise UserError(
                f"{root} is no parquet file and holds none: leave out image_column and label_column"
            )
        if not shards and not tables:
            images = images_below(root, self._warned)
            for first in images:  # as soon as there is one, it is a folder of images
                return chain([first], images)
            shards = sorted(root.glob("*.tar"), key=str)
            tables = [] if shards else tables_below(root)
        if tables:
            return images_of_tables(tables, self.image_column, self.label_column, self.classes)
        return images_of_shards(shards)


def open_images(
    root: Path | str, *, image_column: str | None = None, label_column: str | None = None
) -> ImageSource:
    """Return every image below a folder, sorted by path; first-level folders are classes.

    A .tar file, a pattern such as shards/{0000..0012}.tar, or a folder with shards and no images
    gives the images inside the shards, of which only the headers are read. Parquet files give an
    image per row, from the column of images unless another is named. All of it may be on object
    storage or the Hugging Face Hub (hf://datasets/OWNER/NAME). Nothing is listed before it is
    asked for.
    """
    listing = Listing(place(root), image_column, label_column)
    return ImageSource(listing, listing.classes)


def list_images(
    root: Path | str, image_column: str | None = None, label_column: str | None = None
) -> list[ImageFile]:
    """Return all images that `open_images` finds, as a list."""
    return list(Listing(place(root), image_column, label_column))


def plain_name(name: str) -> str:
    """Return a class name in lower case, with spaces for _ and -, but for a sign before all.

    >>> plain_name("Rusty_Blackbird"), plain_name("-1")
    ('rusty blackbird', '-1')
    """
    return re.sub("_|(?<!^)-", " ", name.lower().strip()).strip()


def class_forms(classes: Sequence[str]) -> dict[str, list[int]]:
    """Return the numbers of the classes that have a name, to the letter or written plainly."""
    exact = dict[str, list[int]]()
    plain = dict[str, list[int]]()
    for number, name in enumerate(classes):
        exact.setdefault(name, []).append(number)
        plain.setdefault(plain_name(name), []).append(number)
    return plain | exact  # names to the letter win over those written plainly


def class_named(word: str, forms: Mapping[str, list[int]]) -> int | None:
    """Return the number of the class that a word names; None if none is; raise if several are.

    >>> class_named("tree-frog", class_forms(["Tree_Frog", "toad"]))
    0
    """
    numbers = forms.get(word) or forms.get(plain_name(word)) or []
    if len(numbers) > 1:
        listed = ", ".join(map(str, numbers[:4]))
        raise UserError(
            f"{len(numbers)} classes of the model are called {word!r} ({listed}): give the number"
        )
    return numbers[0] if numbers else None
