"""Heatmap files: .npz or .safetensors with one array [h,w] per image, keyed by the image's name."""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import IO, Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import torch
from torch import Tensor

from sufficit.data.pixels import check_there
from sufficit.errors import UserError
from sufficit.files import writing

MOST = 2**27  # values of a heatmap: more than the pixels of any image that is opened
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class HeatmapError(UserError):
    """One heatmap of a file that cannot be used; the others may be fine."""


class HeatmapFile:
    """The arrays of a file, read one at a time; keys may be paths, file names or stems.

    Use it as `with HeatmapFile(path) as maps`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._closing = ExitStack()
        self._arrays = _open(path, self._closing)
        self.keys = self._arrays.keys
        self._known = frozenset(self.keys)
        self._fits: dict[str, str] = {}  # key -> the first image that it fits
        self._loose: set[str] = set()  # keys that are not the full name of their image
        self._lock = Lock()  # several threads read

    def __enter__(self) -> "HeatmapFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def key(self, name: str) -> str | None:
        """The key of an image: its path in the folder, or its name or stem if that is unique.

        Raise if a key also fits an image that was asked for before.
        """
        path = PurePosixPath(name)
        forms = dict.fromkeys([name, path.with_suffix("").as_posix(), path.name, path.stem])
        fits = [form for form in forms if form in self._known]  # the most exact one first
        with self._lock:
            if fits and fits[0] != name:
                self._loose.add(fits[0])
            for form in fits:
                other = self._fits.setdefault(form, name)
                if other != name and form in self._loose:
                    first, second = sorted((other, name))
                    raise UserError(
                        f"key {form!r} of {self.path} fits 2 images or more ({first}, {second}):"
                        " use the path inside the folder as key"
                    )
        return fits[0] if fits else None

    def digest(self) -> str:
        """A short hash of the file's heatmaps."""
        return self._arrays.digest()

    def read(self, key: str) -> Tensor:
        """One heatmap: [h,w] float32."""
        what = f"heatmap {key!r} of {self.path}"
        try:
            with self._lock:
                shape = self._arrays.shape(key)  # checked before memory is allocated
                if len(shape) != 2 or 0 in shape:
                    raise HeatmapError(f"{what} must be [h,w], got {list(shape)}")
                if math.prod(shape) > MOST:
                    raise HeatmapError(f"{what} is too large: {list(shape)}, at most {MOST} values")
                return self._arrays.read(key)
        except HeatmapError:
            raise
        except Exception as error:  # zip, numpy and safetensors have many errors of their own
            if isinstance(error, OSError):
                check_there(self.path, error)
            raise HeatmapError(f"{what} could not be read: {error}") from error


def write_heatmaps(path: Path, heatmaps: dict[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
    """Write heatmaps by image name, one at a time, to a .npz that HeatmapFile reads."""
    pairs = heatmaps.items() if isinstance(heatmaps, dict) else heatmaps
    with writing(path) as part, ZipFile(part, "w", ZIP_DEFLATED) as archive:
        for name, value in pairs:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, value.cpu().numpy(), allow_pickle=False)


@dataclass(frozen=True)
class _Arrays:
    """What both kinds of file offer."""

    keys: list[str]
    shape: Callable[[str], tuple[int, ...]]
    read: Callable[[str], Tensor]  # as float32
    digest: Callable[[], str]


def _open(path: Path, closing: ExitStack) -> _Arrays:
    if not path.is_file():
        raise UserError(f"no heatmap file at {path}: check the path")
    try:
        if path.suffix == ".npz":
            return _open_npz(closing.enter_context(ZipFile(path)))
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            return _open_safetensors(path, closing.enter_context(safe_open(path, framework="pt")))
    except Exception as error:
        raise UserError(f"{path} could not be read as heatmaps: {error}") from error
    raise UserError(f"heatmaps must be a .npz or .safetensors file, got {path.name}")


def _open_npz(archive: ZipFile) -> _Arrays:
    """By hand, because numpy.load allocates whatever size a header claims."""
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}

    def shape(key: str) -> tuple[int, ...]:
        with archive.open(members[key]) as file:
            return _npy_header(file)[0]

    def read(key: str) -> Tensor:
        with archive.open(members[key]) as file:
            shape, by_column, dtype = _npy_header(file)
            size = math.prod(shape) * dtype.itemsize
            content = file.read(size)
            if file.read(1) or len(content) < size:
                raise ValueError(f"{size} bytes announced, but the file holds more or fewer")
        array = np.frombuffer(content, dtype).reshape(shape, order="F" if by_column else "C")
        with np.errstate(over="ignore"):  # infinite values are reported later
            return torch.from_numpy(np.array(array, dtype=np.float32, order="C"))

    def digest() -> str:
        known = [(name, info.CRC, info.file_size) for name, info in members.items()]
        return sha256(repr(known).encode()).hexdigest()[:16]

    return _Arrays(list(members), shape, read, digest)


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, Any]:
    """Shape, whether the order is Fortran's, dtype."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of .npy is unknown")
    shape, by_column, dtype = _HEADERS[version](file)
    if any(side < 0 for side in shape):
        raise ValueError(f"no array has the shape {list(shape)}")
    if dtype.kind not in "fiub":
        reason = "objects, which need pickle" if dtype.kind == "O" else dtype
        raise ValueError(f"expected numbers, got {reason}")
    return shape, by_column, dtype


def _open_safetensors(path: Path, opened: Any) -> _Arrays:
    def read(key: str) -> Tensor:
        found: Tensor = opened.get_tensor(key)
        if found.is_complex():
            raise ValueError(f"expected numbers, got {found.dtype}")
        return found.float()

    def digest() -> str:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()[:16]

    return _Arrays(
        list(opened.keys()), lambda key: tuple(opened.get_slice(key).get_shape()), read, digest
    )
