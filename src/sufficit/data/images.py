"""Folders of pictures: find them, give them labels, read them as the model sees them."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import functional as V

from sufficit.errors import UserError
from sufficit.sources import View

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)


@dataclass(frozen=True)
class Picture:
    """A file, its name relative to the folder, and the name of its class folder if it has one."""

    path: Path
    name: str
    folder: str | None


class BadPictureError(Exception):
    """A file that can't be read as a picture; the message says why."""


def find_pictures(root: Path) -> list[Picture]:
    """Every picture below a folder, sorted by name; a first-level folder is a class."""
    if not root.is_dir():
        raise UserError(f"no folder of images at {root}")
    files = sorted(p for p in root.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        raise UserError(f"no images in {root}: looked for {', '.join(sorted(SUFFIXES))}")
    return [_picture(path, root) for path in files]


def _picture(path: Path, root: Path) -> Picture:
    inside = path.relative_to(root)
    return Picture(path, inside.as_posix(), inside.parts[0] if len(inside.parts) > 1 else None)


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
    known = {_plain(name): number for number, name in enumerate(classes or ())}
    if known and all(_plain(folder) in known for folder in folders):
        return {folder: known[_plain(folder)] for folder in folders}
    if all(folder.isdecimal() and int(folder) < num_classes for folder in folders):
        return {folder: int(folder) for folder in folders}
    if len(folders) == num_classes:
        return {folder: number for number, folder in enumerate(folders)}
    strange = [folder for folder in folders if _plain(folder) not in known]
    raise UserError(
        f"{len(folders)} class folders (first {strange[0]!r}) do not fit the model's {num_classes}"
        " classes: name the folders as the model names its classes, or by class number, or score"
        " the model's own predictions with --targets prediction"
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", " ").replace("-", " ").strip()


def read_picture(path: Path, view: View | None) -> Tensor:
    """What the model sees of a file: [C,H,W] in 0..1."""
    if path.stat().st_size == 0:
        raise BadPictureError("the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            warnings.simplefilter("ignore", UserWarning)  # odd metadata does not matter here
            with Image.open(path) as opened:
                upright = ImageOps.exif_transpose(opened)
                picture = upright.convert("L" if view and view.channels == 1 else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadPictureError(f"not a readable image ({error})") from error
    except Image.DecompressionBombWarning as error:
        raise BadPictureError(f"too large to open safely ({error})") from error
    if view is not None and (picture.height, picture.width) != view.crop:
        picture = V.center_crop(V.resize(picture, _scaled(picture, view)), list(view.crop))
    pixels: Tensor = V.to_dtype(V.to_image(picture), torch.float32, scale=True)
    return pixels.as_subclass(Tensor)


def _scaled(picture: Image.Image, view: View) -> list[int]:
    """Height and width before cropping."""
    h, w = picture.height, picture.width
    scale = view.resize / min(h, w) if view.resize else max(view.crop[0] / h, view.crop[1] / w)
    return [max(1, round(h * scale)), max(1, round(w * scale))]
