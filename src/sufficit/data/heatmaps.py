"""Heatmap files: .npz or .safetensors, one array [h,w] an image, keyed by the image's name."""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

import numpy as np
import torch
from torch import Tensor

from sufficit.errors import UserError
from sufficit.files import writing


class HeatmapError(UserError):
    """One heatmap of a file that can't be used; the others may be."""


class HeatmapFile:
    """The arrays of a file, read one at a time; keys may be paths, file names or stems.

    It is open inside `with HeatmapFile(path) as maps`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._closing = ExitStack()
        self.keys, self._read = _open(path, self._closing)
        self._known = frozenset(self.keys)

    def __enter__(self) -> "HeatmapFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def match(self, names: Sequence[str]) -> dict[str, str | None]:
        """The key of each image: its path in the folder, or what is unique of its name and stem."""
        forms = {name: _forms(name) for name in names}
        taken = Counter(form for written in forms.values() for form in written)
        found: dict[str, str | None] = {}
        for name, written in forms.items():
            if name in self._known:
                found[name] = name
                continue
            keys = [form for form in written if form in self._known]
            unique = [key for key in keys if taken[key] == 1]
            if keys and not unique:
                raise UserError(
                    f"key {keys[0]!r} of {self.path} fits {taken[keys[0]]} images ({name}, ...):"
                    " use the path inside the folder as key"
                )
            found[name] = unique[0] if unique else None
        return found

    def read(self, key: str) -> Tensor:
        """One heatmap: [h,w] float32."""
        try:
            heatmap = self._read(key)
        except (ValueError, OSError, KeyError, EOFError, BadZipFile, zlib.error) as error:
            raise HeatmapError(
                f"heatmap {key!r} of {self.path} could not be read: {error}"
            ) from error
        if heatmap.ndim != 2 or 0 in heatmap.shape:
            raise HeatmapError(
                f"heatmap {key!r} of {self.path} must be [h,w], got {list(heatmap.shape)}"
            )
        return heatmap.float()


def write_heatmaps(path: Path, heatmaps: dict[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
    """Write heatmaps by image name, one at a time, to a .npz that HeatmapFile reads."""
    pairs = heatmaps.items() if isinstance(heatmaps, dict) else heatmaps
    with writing(path) as part, ZipFile(part, "w", ZIP_DEFLATED) as archive:
        for name, value in pairs:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, value.cpu().numpy(), allow_pickle=False)


def _forms(name: str) -> list[str]:
    """How a file may write an image's name, most exact first, each once."""
    path = PurePosixPath(name)
    return list(dict.fromkeys([name, path.with_suffix("").as_posix(), path.name, path.stem]))


def _open(path: Path, closing: ExitStack) -> tuple[list[str], Callable[[str], Tensor]]:
    """The keys of a file, and how to read one of them."""
    if not path.is_file():
        raise UserError(f"no heatmap file at {path}")
    try:
        if path.suffix == ".npz":
            archive = closing.enter_context(np.load(path, allow_pickle=False))
            return list(archive.files), lambda key: torch.from_numpy(_floats(archive[key]))
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            opened = closing.enter_context(safe_open(path, framework="pt"))
            return list(opened.keys()), opened.get_tensor
    except Exception as error:
        raise UserError(f"{path} could not be read as heatmaps: {error}") from error
    raise UserError(f"heatmaps must be a .npz or .safetensors file, got {path.name}")


def _floats(array: Any) -> Any:
    if array.dtype.kind not in "fiub":
        raise ValueError(f"numbers wanted, got dtype {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.float32)
