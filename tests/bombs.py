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


def late_epoch(path: Path, epoch: int = 10**9, extra: Sequence[object] = ()) -> Path:
    """A checkpoint that claims to have trained so many epochs."""
    state = {"epoch": epoch, "history": list(extra), "best": None, "best_worth": 0.0, "stale": 0}
    torch.save({"settings": {}, "state": state}, path)
    return path
