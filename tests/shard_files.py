"""Images and tar shards for tests."""

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def png(number: int) -> bytes:
    """A small PNG with random pixels by number."""
    pixels = np.random.default_rng(number).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "png")
    return written.getvalue()


def write_shard(
    path: Path, files: Sequence[tuple[str, bytes]], kind: int = tarfile.GNU_FORMAT
) -> Path:
    """A tar with these files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as shard:
        for name, content in files:
            facts = tarfile.TarInfo(name)
            facts.size = len(content)
            shard.addfile(facts, io.BytesIO(content))
    return path


def write_labelled_shard(path: Path, labels: Sequence[str | None]) -> Path:
    """One sample per label, without a .cls file where the label is None."""
    files = []
    for number, label in enumerate(labels):
        files.append((f"{number:03d}.png", png(number)))
        if label is not None:
            files.append((f"{number:03d}.cls", label.encode()))
    return write_shard(path, files)
