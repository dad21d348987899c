"""Folders of pictures: find them, give them labels, read them as the model sees them."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import splitext
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as V

from sufficit.errors import UserError
from sufficit.files import is_unfinished
from sufficit.parts import View

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)

# What a file may hold, whatever its suffix: Pillow would run Ghostscript for others.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


@dataclass(frozen=True, slots=True)
class Picture:
    """A file, its name relative to the folder, and the name of its class folder if it has one."""

    file: Path | str  # text takes a quarter of a Path's memory
    name: str
    folder: str | None

    @property
    def path(self) -> Path:
        """Where it lies."""
        return Path(self.file)

    def read(self, view: View | None) -> Tensor:
        """What the model sees of it: [C,H,W] in 0..1."""
        return read_picture(self.path, view)

    def bytes(self) -> int:
        """The size of its file."""
        return self.path.stat().st_size


class BadPictureError(Exception):
    """A file that can't be read as a picture; the message says why."""


def find_pictures(root: Path) -> list[Picture]:
    """Every picture below a folder, sorted by name; a first-level folder is a class.

    A .tar, a pattern as shards/{0000..0012}.tar, or a folder with shards and no pictures gives the
    pictures inside.
    """
    from sufficit.data.shards import find_in_shards, is_shards, pictures_of_shards

    if is_shards(root):
        return find_in_shards(root)
    if not root.is_dir():
        raise UserError(f"no folder of images at {root}")
    found = list(_Search(root).pictures())
    if not found and (shards := sorted(root.glob("*.tar"))):
        return pictures_of_shards(shards)
    if not found:
        raise UserError(f"no images in {root}: looked for {', '.join(sorted(SUFFIXES))}")
    if any("\\x" in picture.name for picture in found):
        _check_alike(root, found)
    return found


class _Search:
    """All that is below a folder and named as a picture, be it a file or not.

    A link to a folder elsewhere is followed, once; one to a folder around or inside the root is
    not, as it would bring the same pictures again, or never end.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.top, self.seen = root, root.resolve(), set[Path]()

    def pictures(self) -> Iterator[Picture]:
        """In the order of their paths."""
        return self._below(str(self.root), "", None)

    def _below(self, folder: str, inside: str, label: str | None) -> Iterator[Picture]:
        for entry in _listed(folder):
            name = f"{inside}{_as_text(entry.name)}"
            if _is_folder(entry):
                if self._enters(entry):
                    yield from self._below(entry.path, f"{name}/", label or _as_text(entry.name))
            # A Path for each of millions would take long.
            elif splitext(entry.name)[1].lower() in SUFFIXES and not is_unfinished(entry.name):  # noqa: PTH122
                yield Picture(entry.path, name, label)

    def _enters(self, folder: os.DirEntry[str]) -> bool:
        if not folder.is_symlink():
            return True
        place = Path(folder.path).resolve()
        if place in self.seen or place.is_relative_to(self.top) or self.top.is_relative_to(place):
            return False
        self.seen.add(place)
        return True


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _listed(folder: str) -> list[os.DirEntry[str]]:
    """What a folder holds, by name; nothing where it can't be opened, which is said."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        warnings.warn(
            f"{folder} can't be opened ({error.strerror}): images in it are left out", stacklevel=2
        )
        return []


def _check_alike(root: Path, pictures: Sequence[Picture]) -> None:
    if len({picture.name for picture in pictures}) < len(pictures):
        raise UserError(f"two images in {root} have names that are written alike: rename them")


def _as_text(name: str) -> str:
    r"""A name that can be written anywhere: bytes that are no UTF-8 stand as \xff.

    >>> print(_as_text("caf\udce9.png"))
    caf\xe9.png
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def labels_of(
    pictures: Sequence[Picture], classes: Sequence[str] | None, num_classes: int
) -> list[int] | None:
    """The class number of each picture, or None where pictures lie in no class folders."""
    folders = sorted({picture.folder for picture in pictures if picture.folder is not None})
    loose = [picture.name for picture in pictures if picture.folder is None]
    if not folders:
        return None
    if loose:
        raise UserError(
            f"{len(loose)} images (first {loose[0]}) lie beside class folders ({folders[0]}, ...):"
            " move them, or score the model's own predictions with --targets prediction"
        )
    numbers = _class_numbers(folders, classes, num_classes)
    return [numbers[picture.folder] for picture in pictures if picture.folder is not None]


def _class_numbers(
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


def read_picture(path: Path, view: View | None) -> Tensor:
    """What the model sees of a file: [C,H,W] in 0..1."""
    try:
        facts = path.stat()
    except OSError as error:
        raise BadPictureError(f"can't be opened ({error.strerror})") from error
    if not S_ISREG(facts.st_mode):  # opening a pipe would wait for ever
        raise BadPictureError("a pipe, socket, device or folder, and no file")
    if facts.st_size == 0:
        raise BadPictureError("the file is empty")
    return decode_picture(path, view)


def decode_picture(
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
    except BadPictureError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadPictureError(f"too large to open safely ({error})") from error
    except Exception as error:  # Pillow raises nearly anything for a damaged file
        raise BadPictureError(f"not a readable image ({error})") from error
    pixels: Tensor = V.to_dtype(V.to_image(seen), torch.float32, scale=True)
    return pixels.as_subclass(Tensor)


@contextmanager
def quiet_reading() -> Iterator[None]:
    """No remarks about odd metadata and large pictures: what matters is an error of its own.

    Filters belong to the whole process, so they are set around a run and not around each file.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def _refuse_size(width: int, height: int, most_pixels: int | None = None) -> None:
    limit = Image.MAX_IMAGE_PIXELS if most_pixels is None else most_pixels
    if limit is not None and width * height > limit:
        raise BadPictureError(
            f"too large to open safely ({width} x {height}, the limit is {limit} pixels)"
        )


def _eight_bits(picture: Image.Image) -> Image.Image:
    """16-bit grey as 8-bit; other deep pixels have no range that could be known."""
    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture) / 257).round().astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise BadPictureError(f"pixels of mode {picture.mode} have no known range: save as 8 bit")
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
