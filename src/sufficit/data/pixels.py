"""Image files as tensors that the model sees: every bad file is a BadImageError."""

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

import torch
from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.data.pictures import FORMATS, BadImageError, read_picture
from sufficit.errors import GoneError
from sufficit.files import is_remote

__all__ = ["FORMATS", "BadImageError", "decode_image", "read_image"]  # for others

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

# Errors of a disk or mount that no longer responds, as against those of one bad file.
BROKEN = ("EHOSTDOWN", "EIO", "ENODEV", "ENOTCONN", "ENXIO", "ESTALE", "ETIMEDOUT")


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
    seen = read_picture(file, view or View(), kinds, most_pixels)
    from torchvision.transforms.v2 import functional as V  # slow to import

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
    except OSError:  # also without permission: it was listed before
        return False
