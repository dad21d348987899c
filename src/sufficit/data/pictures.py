"""Image files to pixels with Pillow alone, within limits: every bad file is a BadImageError."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile

if TYPE_CHECKING:
    from sufficit.classifier.checkpoint import View

# The formats that are decoded, for any suffix: Pillow would run Ghostscript for others.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
TIFF_SIZE = (256, 257)  # the tags of width and height, as they are stored
TURNED = 274  # the tag of EXIF that says how to turn an image
CRITICAL = (b"PLTE", b"IDAT")  # chunks of a PNG whose checksums Pillow does not check
RESAMPLING = {mode.name.lower(): mode for mode in Image.Resampling}
RESAMPLING["nearest-exact"] = Image.Resampling.NEAREST


class BadImageError(Exception):
    """A file that cannot be read as an image; the message says why."""


class NotAnImageError(BadImageError):
    """A file of no known format."""


class LargeImageError(BadImageError):
    """A file that asks for more memory or time than an image may take."""


def read_picture(
    file: Path | BinaryIO,
    view: "View",
    kinds: tuple[str, ...] | None = None,
    most_pixels: int | None = None,
) -> Image.Image:
    """Return what the model sees of an image, in mode L or RGB.

    `kinds` are the formats to try, by Pillow's names. What the file announces is checked before any
    pixel is decoded. An animation gives its first frame; transparency is dropped.
    """
    with _reading(file, kinds, most_pixels) as opened:
        deep = opened.format == "PPM" and opened.mode == "I"  # Pillow scales them to 16 bit
        upright = ImageOps.exif_transpose(opened)
        return seen(_to_mode(upright, "L" if view.channels == 1 else "RGB", deep), view)


def read_mask(file: Path | BinaryIO) -> Image.Image:
    """Return the numbers of a palette, bits or grey values as they are; colours as grey."""
    with _reading(file) as opened:
        upright = ImageOps.exif_transpose(opened)
        return upright.copy() if upright.mode in ("1", "P", "L") else upright.convert("L")


def upright_size(file: Path | BinaryIO) -> tuple[int, int]:
    """Return height and width of an image, turned as its orientation says; no pixel is decoded."""
    with _reading(file) as opened:
        width, height = opened.size
        if opened.format == "TIFF":  # of which Pillow turns `size`, some versions do not
            width, height = (opened.tag_v2[tag] for tag in TIFF_SIZE)  # type: ignore[attr-defined]  # of TIFF alone
        return (width, height) if opened.getexif().get(TURNED) in (5, 6, 7, 8) else (height, width)


@contextmanager
def _reading(
    file: Path | BinaryIO, kinds: tuple[str, ...] | None = None, most_pixels: int | None = None
) -> Iterator[ImageFile]:
    """Open an image whose announced size is safe; what goes wrong inside is a BadImageError."""
    try:
        with Image.open(file, formats=kinds or FORMATS) as opened:
            _check_size(*opened.size, most_pixels)
            # Pillow reads a PNG with a flipped bit without a word: other pixels, the same image.
            if opened.format == "PNG" and opened.fp is not None:
                place = opened.fp.tell()
                opened.fp.seek(0)
                _check_sums(opened.fp.read())
                opened.fp.seek(place)
            yield opened
    except BadImageError:
        raise
    except UnidentifiedImageError as error:
        raise NotAnImageError(f"not a readable image ({error})") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise LargeImageError(f"too large to open safely ({error})") from error
    except Exception as error:  # Pillow raises nearly anything for a corrupt file
        raise BadImageError(f"not a readable image ({error})") from error


def _check_size(width: int, height: int, most_pixels: int | None = None) -> None:
    """Raise for an image of more pixels than Pillow, or the caller, takes for safe."""
    limit = Image.MAX_IMAGE_PIXELS if most_pixels is None else most_pixels
    if limit is not None and width * height > limit:
        size = f"{width} x {height}, the limit is {limit} pixels"
        raise LargeImageError(f"too large to open safely ({size})")


def _check_sums(content: bytes) -> None:
    """Raise for a PNG with a wrong checksum, as libpng does for chunks it cannot do without."""
    place = 8
    while place + 12 <= len(content):
        end = place + 8 + int.from_bytes(content[place : place + 4])
        kind = content[place + 4 : place + 8]
        stored = content[end : end + 4]
        wanted = zlib.crc32(memoryview(content)[place + 4 : end]) if kind in CRITICAL else None
        if wanted is not None and len(stored) == 4 and int.from_bytes(stored) != wanted:
            raise BadImageError(f"not a readable image (wrong checksum of {kind.decode()})")
        if kind == b"IEND":
            return
        place = end + 4


def _to_mode(image: Image.Image, mode: str, deep: bool) -> Image.Image:
    """Convert to 8-bit colour or grey, without transparency; `deep` says that I is 16 bit."""
    if image.mode.startswith("I;16") or (image.mode == "I" and deep):
        import numpy as np  # here, because its import takes longer than a small image

        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise BadImageError(f"pixels of mode {image.mode} have no known range: save as 8 bit")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # as Pillow's own warning asks for
    return image.convert(mode)


def seen(image: Image.Image, view: "View") -> Image.Image:
    """Resize, then crop the centre, as the view says; sizes are rounded as torchvision does."""
    h = image.height
    w = image.width
    if view.crop is None or (h, w) == tuple(view.crop):
        return image
    height, width = view.crop
    if view.stretch:
        size = [height, width]
    elif view.resize is None:
        scale = max(height / h, width / w)
        size = [max(height, round(h * scale)), max(width, round(w * scale))]
    else:
        longer = int(view.resize * max(h, w) / min(h, w))
        size = [view.resize, longer] if h <= w else [longer, view.resize]
    _check_size(*size)
    resized = image.resize((size[1], size[0]), RESAMPLING[view.interpolation])
    top, left = (_start(side, crop) for side, crop in zip(size, view.crop, strict=True))
    return resized.crop((left, top, left + width, top + height))  # black beyond its borders


def _start(side: int, crop: int) -> int:
    """Return where a crop of the centre starts; below 0 if the side is shorter than the crop."""
    return round((side - crop) / 2) if side >= crop else -((crop - side) // 2)
