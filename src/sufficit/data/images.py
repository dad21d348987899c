"""Folders of pictures: find them, give them labels, read them as the model sees them."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as V

from sufficit.classifier.checkpoint import View
from sufficit.data.places import check_there
from sufficit.errors import UserError

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)

# What a file may hold, whatever its suffix: Pillow would run Ghostscript for others.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file, its name relative to the folder, and the name of its class folder if it has one."""

    file: Path | str  # text takes a quarter of a Path's memory
    name: str
    folder: str | None

    @property
    def path(self) -> Path:
        """Where it lies."""
        return Path(self.file)

    @property
    def root(self) -> Path:
        """The folder that its name is relative to."""
        above = self.path.parents
        return above[min(self.name.count("/"), len(above) - 1)]

    @property
    def problem(self) -> str:
        """Why it is never read, where that is known before."""
        return ""

    def read(self, view: View | None) -> Tensor:
        """What the model sees of it: [C,H,W] in 0..1."""
        with while_there(self.root):
            return read_image(self.path, view)

    def bytes(self) -> int:
        """The size of its file."""
        with while_there(self.root):
            return self.path.stat().st_size


class BadImageError(Exception):
    """A file that can't be read as a picture; the message says why."""


@contextmanager
def while_there(root: Path) -> Iterator[None]:
    """What can't be read is its own fault only as long as the place it lies in is there."""
    try:
        yield
    except (BadImageError, OSError) as error:
        check_there(root, error)
        raise


def list_images(root: Path) -> list[ImageFile]:
    """All that `sufficit.data.finding.open_images` finds, at once."""
    from sufficit.data.finding import open_images

    return list(open_images(root))


@dataclass(frozen=True)
class Classes:
    """The names of class folders, and how many pictures lie beside them, with one of them."""

    folders: tuple[str, ...]  # sorted
    loose: int = 0
    first_loose: str = ""

    def numbers(self, names: Sequence[str] | None, num_classes: int) -> dict[str, int]:
        """The class number of each folder; raise where some pictures lie in none."""
        if self.loose:
            raise UserError(
                f"{self.loose} images (first {self.first_loose}) lie beside class folders"
                f" ({self.folders[0]}, ...): move them, or score the model's own predictions with"
                " --targets prediction"
            )
        return class_numbers(self.folders, names, num_classes)


def classes_of(pictures: Sequence[ImageFile]) -> Classes:
    """The class folders of pictures that are known."""
    folders = sorted({picture.folder for picture in pictures if picture.folder is not None})
    loose = [picture.name for picture in pictures if picture.folder is None]
    return Classes(tuple(folders), len(loose), loose[0] if loose else "")


def labels_of(
    pictures: Sequence[ImageFile], classes: Sequence[str] | None, num_classes: int
) -> list[int] | None:
    """The class number of each picture, or None where pictures lie in no class folders."""
    found = classes_of(pictures)
    if not found.folders:
        return None
    numbers = found.numbers(classes, num_classes)
    return [numbers[picture.folder] for picture in pictures if picture.folder is not None]


def class_numbers(
    folders: Sequence[str], classes: Sequence[str] | None, num_classes: int
) -> dict[str, int]:
    """Class folders by the model's own names, by number, or in order where there are as many."""
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
    """A class's name without what people write differently."""
    return name.lower().replace("_", " ").replace("-", " ").strip()


def read_image(path: Path, view: View | None) -> Tensor:
    """What the model sees of a file: [C,H,W] in 0..1."""
    try:
        facts = path.stat()
    except OSError as error:
        raise BadImageError(f"can't be opened ({error.strerror})") from error
    if not S_ISREG(facts.st_mode):  # opening a pipe would wait for ever
        raise BadImageError("a pipe, socket, device or folder, and no file")
    if facts.st_size == 0:
        raise BadImageError("the file is empty")
    return decode_image(path, view)


def decode_image(
    file: Path | BinaryIO,
    view: View | None,
    kinds: tuple[str, ...] | None = None,
    most_pixels: int | None = None,
) -> Tensor:
    """What the model sees of a file or of its bytes: [C,H,W] in 0..1.

    `kinds` are the formats that are tried, as Pillow names them; `most_pixels` is looked at before
    any pixel is decoded. Of a film the first picture is taken; transparency is dropped.
    """
    view = view or View()
    try:
        with Image.open(file, formats=kinds or FORMATS) as opened:
            _refuse_size(*opened.size, most_pixels)
            picture = _eight_bits(ImageOps.exif_transpose(opened))
            seen = _seen(_coloured(picture, "L" if view.channels == 1 else "RGB"), view)
    except BadImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImageError(f"too large to open safely ({error})") from error
    except Exception as error:  # Pillow raises nearly anything for a damaged file
        raise BadImageError(f"not a readable image ({error})") from error
    pixels: Tensor = V.to_dtype(V.to_image(seen), torch.float32, scale=True)
    return pixels.as_subclass(Tensor)


@contextmanager
def ignore_image_warnings() -> Iterator[None]:
    """No remarks about odd metadata and large pictures: what matters is an error of its own.

    Filters belong to the whole process, so they are set around a run and not around each file.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def _refuse_size(width: int, height: int, most_pixels: int | None = None) -> None:
    limit = Image.MAX_IMAGE_PIXELS if most_pixels is None else most_pixels
    if limit is not None and width * height > limit:
        raise BadImageError(
            f"too large to open safely ({width} x {height}, the limit is {limit} pixels)"
        )


def _eight_bits(picture: Image.Image) -> Image.Image:
    """16-bit grey as 8-bit; other deep pixels have no range that could be known."""
    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture) / 257).round().astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise BadImageError(f"pixels of mode {picture.mode} have no known range: save as 8 bit")
    return picture


def _coloured(picture: Image.Image, mode: str) -> Image.Image:
    """A picture in colour or grey, without its transparency."""
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")  # the way Pillow asks for
    return picture.convert(mode)


def _seen(picture: Image.Image, view: View) -> Image.Image:
    """A picture resized and cropped as the view says."""
    if view.crop is None or (picture.height, picture.width) == view.crop:
        return picture
    how = InterpolationMode(view.interpolation)
    size = _scaled(picture, view)
    _refuse_size(*size)
    resized = V.resize(picture, size, interpolation=how)
    cropped: Image.Image = V.center_crop(resized, list(view.crop))
    return cropped


def _scaled(picture: Image.Image, view: View) -> list[int]:
    """Height and width before cropping, rounded as torchvision does it."""
    h, w = picture.height, picture.width
    crop = view.crop or (h, w)
    if view.stretch:
        return list(crop)
    if view.resize is None:
        scale = max(crop[0] / h, crop[1] / w)
        return [max(crop[0], round(h * scale)), max(crop[1], round(w * scale))]
    longer = int(view.resize * max(h, w) / min(h, w))
    return [view.resize, longer] if h <= w else [longer, view.resize]
