"""Small files that ask for much memory or time: made by code, for tests."""

import io
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image


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


def late_epoch(path: Path, epoch: int = 10**9, extra: Sequence[object] = ()) -> Path:
    """A checkpoint that claims to have trained so many epochs."""
    state = {"epoch": epoch, "history": list(extra), "best": None, "best_worth": 0.0, "stale": 0}
    torch.save({"settings": {}, "state": state}, path)
    return path
