"""Decode image files to what the model sees, safely: every bad file is a BadImageError."""

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
from sufficit.errors import GoneError
from sufficit.files import is_remote

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

# The formats that are decoded, for any suffix: Pillow would run Ghostscript for others.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

# Errors of a disk or mount that no longer responds, as against those of one bad file.
BROKEN = ("EHOSTDOWN", "EIO", "ENODEV", "ENOTCONN", "ENXIO", "ESTALE", "ETIMEDOUT")


class BadImageError(Exception):
    """A file that cannot be read as an image; the message says why."""


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

    `kinds` are the formats to try, by Pillow's names; `most_pixels` is checked before any pixel is
    decoded. An animation gives its first frame; transparency is dropped.
    """
    view = view or View()
    try:
        with Image.open(file, formats=kinds or FORMATS) as opened:
            _check_size(*opened.size, most_pixels)
            upright = ImageOps.exif_transpose(opened)
            seen = _crop(_to_mode(upright, "L" if view.channels == 1 else "RGB"), view)
    except BadImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImageError(f"too large to open safely ({error})") from error
    except Exception as error:  # Pillow raises nearly anything for a corrupt file
        raise BadImageError(f"not a readable image ({error})") from error
    pixels: Tensor = V.to_dtype(V.to_image(seen), torch.float32, scale=True)
    return pixels.as_subclass(Tensor)


@contextmanager
def ignore_image_warnings() -> Iterator[None]:
    """Silence Pillow's warnings about odd metadata and large images: what matters is an error."""
    with warnings.catch_warnings():  # of the whole process, so around a run, not around each file
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


@contextmanager
def while_there(root: Path) -> Iterator[None]:
    """Raise GoneError for a read error inside if the cause is that `root` is gone."""
    try:
        yield
    except (BadImageError, OSError) as error:
        check_there(root, error)
        raise


def check_there(root: Path, error: BaseException) -> None:
    """Raise GoneError if a read error means that the folder or shard is gone, not one bad file."""
    cause = error if isinstance(error, OSError) else error.__cause__
    known = cause if isinstance(cause, OSError) else None
    broken = known is not None and errno.errorcode.get(known.errno or 0) in BROKEN
    if not broken and _is_there(root):
        return
    reason = (known and known.strerror) or "it does not exist"
    lost = f"{root} can't be read any more ({reason})"
    raise GoneError(f"{lost}: bring it back and give the same command to resume") from error


def _is_there(root: Path) -> bool:
    """Whether this is a file or a folder that is not empty: a lost mount is an empty folder."""
    if is_remote(root):
        return root.exists()
    try:
        if root.is_file():
            return True
        with os.scandir(root) as entries:
            return next(entries, None) is not None
    except PermissionError:
        return True
    except OSError:
        return False


def _check_size(width: int, height: int, most_pixels: int | None = None) -> None:
    limit = Image.MAX_IMAGE_PIXELS if most_pixels is None else most_pixels
    if limit is not None and width * height > limit:
        size = f"{width} x {height}, the limit is {limit} pixels"
        raise BadImageError(f"too large to open safely ({size})")


def _to_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert to 8-bit colour or grey, without transparency."""
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise BadImageError(f"pixels of mode {image.mode} have no known range: save as 8 bit")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # as Pillow's own warning asks for
    return image.convert(mode)


def _crop(image: Image.Image, view: View) -> Image.Image:
    """Resize, then crop the centre, as the view says; sizes are rounded as torchvision does."""
    h, w = image.height, image.width
    if view.crop is None or (h, w) == view.crop:
        return image
    if view.stretch:
        size = list(view.crop)
    elif view.resize is None:
        scale = max(view.crop[0] / h, view.crop[1] / w)
        size = [max(view.crop[0], round(h * scale)), max(view.crop[1], round(w * scale))]
    else:
        longer = int(view.resize * max(h, w) / min(h, w))
        size = [view.resize, longer] if h <= w else [longer, view.resize]
    _check_size(*size)
    resized = V.resize(image, size, interpolation=InterpolationMode(view.interpolation))
    cropped: Image.Image = V.center_crop(resized, list(view.crop))
    return cropped
