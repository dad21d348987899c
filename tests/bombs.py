"""Small files that ask for much memory or time: made by code, for tests and tools/attack.py."""

import io
import struct
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

TIFF_TAGS = {
    "width": 256,
    "height": 257,
    "bits": 258,
    "compression": 259,
    "photometric": 262,
    "strip_offsets": 273,
    "samples": 277,
    "rows_per_strip": 278,
    "strip_bytes": 279,
    "tile_width": 322,
    "tile_height": 323,
    "tile_offsets": 324,
    "tile_bytes": 325,
}


def tiff(**tags: int) -> bytes:
    """A TIFF of one image with these tags, by their names in TIFF_TAGS; its pixels are missing."""
    entries = sorted((TIFF_TAGS[name], value) for name, value in tags.items())
    parts = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries]
    return b"II*\0" + struct.pack("<IH", 8, len(parts)) + b"".join(parts) + bytes(4) + bytes(16)


def giant_tile(side: int = 2**16, samples: int = 1) -> bytes:
    """A TIFF of 16 x 16 pixels in one tile of side x side, in deflate."""
    tags = {"width": 16, "height": 16, "bits": 8, "compression": 8, "photometric": 1}
    tile = {"tile_width": side, "tile_height": side, "tile_offsets": 8, "tile_bytes": 8}
    return tiff(**tags, samples=samples, **tile)


def wide_strip(rows: int = 2**31 - 1) -> bytes:
    """A TIFF of 16 x 16 pixels whose strip claims many rows."""
    tags = {"width": 16, "height": 16, "bits": 8, "compression": 8, "photometric": 1}
    strip = {"strip_offsets": 8, "strip_bytes": 8, "rows_per_strip": rows}
    return tiff(**tags, samples=1, **strip)


def many_scans(scans: int = 4000, side: int = 2000) -> bytes:
    """A progressive JPEG whose last scan is repeated: each one is decoded over the whole image."""
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "jpeg", progressive=True)
    content = file.getvalue()
    end = content.rindex(b"\xff\xd9")
    last = content.rindex(b"\xff\xda", 0, end)
    tables = content.rfind(b"\xff\xc4", 0, last)
    scan = content[tables:end]
    return content[:end] + scan * scans + b"\xff\xd9"


def big_picture(side: int = 60_000) -> bytes:
    """A PNG that announces side x side pixels and holds none."""
    file = io.BytesIO()
    Image.new("L", (1, 1)).save(file, "png")
    head = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    import zlib

    content = file.getvalue()
    return content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]


def packed(path: Path, members: dict[str, bytes], kind: int = zipfile.ZIP_BZIP2) -> Path:
    """A zip archive of some kind of compression."""
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def long_header(size: int = 2**28) -> bytes:
    """A .npy of version 2 whose header has so many bytes."""
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", size) + b" " * size


def wide_numbers(values: int, dtype: str = "<f16") -> bytes:
    """A .npy of zeros in a wide type."""
    words = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': (1, {values}), }}\n".encode()
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(words)) + words
    return head + bytes(values * int(dtype[2:]))


def pax_tar(path: Path, records: bytes) -> Path:
    """A tar with one pax header of these records before an empty file."""
    with path.open("wb") as file:
        for name, kind, content in (("x", tarfile.XHDTYPE, records), ("a.png", b"0", b"")):
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(content)
            file.write(info.tobuf(tarfile.USTAR_FORMAT))
            file.write(content + bytes(-len(content) % 512))
        file.write(bytes(1024))
    return path


def late_epoch(path: Path, epoch: int = 10**9, extra: Sequence[object] = ()) -> Path:
    """A checkpoint that claims to have trained so many epochs."""
    state = {"epoch": epoch, "history": list(extra), "best": None, "best_worth": 0.0, "stale": 0}
    torch.save({"settings": {}, "state": state}, path)
    return path
