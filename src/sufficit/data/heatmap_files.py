"""Heatmap files: .npz or .safetensors, one array [h,w] an image, keyed by the image's name."""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import IO, Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np
import torch
from torch import Tensor

from sufficit.data.pixels import check_there
from sufficit.errors import UserError
from sufficit.files import writing

MOST = 2**27  # values of a heatmap: more than any image that is opened has pixels
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class HeatmapError(UserError):
    """One heatmap of a file that can't be used; the others may be."""


class HeatmapFile:
    """The arrays of a file, read one at a time; keys may be paths, file names or stems.

    It is open inside `with HeatmapFile(path) as maps`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._closing = ExitStack()
        self._arrays = _open(path, self._closing)
        self.keys = self._arrays.keys
        self._known = frozenset(self.keys)
        self._fits: dict[str, str] = {}  # key -> the first image that it fits
        self._loose: set[str] = set()  # keys of images that are called otherwise
        self._one_at_a_time = Lock()  # of the threads that read

    def __enter__(self) -> "HeatmapFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def key(self, name: str) -> str | None:
        """The key of an image: its path in the folder, or what is unique of its name and stem.

        Raise where an image asked for before fits as well, be it that one's key or this one's.
        """
        fits = [form for form in _forms(name) if form in self._known]
        with self._one_at_a_time:
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
        """What tells this file's heatmaps from others of the same names and shapes."""
        return self._arrays.digest()

    def read(self, key: str) -> Tensor:
        """One heatmap: [h,w] float32."""
        what = f"heatmap {key!r} of {self.path}"
        try:
            with self._one_at_a_time:
                return self._checked(key, what)
        except HeatmapError:
            raise
        except Exception as error:  # zip, numpy and safetensors have many errors of their own
            if isinstance(error, OSError):
                check_there(self.path, error)
            raise HeatmapError(f"{what} could not be read: {error}") from error

    def _checked(self, key: str, what: str) -> Tensor:
        shape = self._arrays.shape(key)  # known before there is memory for it
        if len(shape) != 2 or 0 in shape:
            raise HeatmapError(f"{what} must be [h,w], got {list(shape)}")
        if math.prod(shape) > MOST:
            raise HeatmapError(f"{what} is too large: {list(shape)}, at most {MOST} values")
        return self._arrays.read(key)


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


@dataclass(frozen=True)
class _Arrays:
    """The keys of a file, the shape of a key's array, how to read it as float32, a checksum."""

    keys: list[str]
    shape: Callable[[str], tuple[int, ...]]
    read: Callable[[str], Tensor]
    digest: Callable[[], str]


def _open(path: Path, closing: ExitStack) -> _Arrays:
    if not path.is_file():
        raise UserError(f"no heatmap file at {path}")
    try:
        if path.suffix == ".npz":
            return _in_npz(closing.enter_context(ZipFile(path)))
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            return _in_safetensors(path, closing.enter_context(safe_open(path, framework="pt")))
    except Exception as error:
        raise UserError(f"{path} could not be read as heatmaps: {error}") from error
    raise UserError(f"heatmaps must be a .npz or .safetensors file, got {path.name}")


def _in_npz(archive: ZipFile) -> _Arrays:
    """As numpy.load, but that nothing is believed which a header says of the array's size."""
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}

    def shape(key: str) -> tuple[int, ...]:
        with archive.open(members[key]) as file:
            return _header(file)[0]

    def digest() -> str:
        known = [(name, info.CRC, info.file_size) for name, info in members.items()]
        return sha256(repr(known).encode()).hexdigest()[:16]

    return _Arrays(list(members), shape, lambda key: _from_npy(archive, members[key]), digest)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, Any]:
    """Shape, whether columns come first, dtype."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of .npy is not known")
    shape, by_column, dtype = _HEADERS[version](file)
    if any(side < 0 for side in shape):
        raise ValueError(f"no array has the shape {list(shape)}")
    if dtype.kind not in "fiub":
        reason = "objects need pickle, which is not run" if dtype.kind == "O" else dtype
        raise ValueError(f"numbers wanted, got {reason}")
    return shape, by_column, dtype


def _from_npy(archive: ZipFile, member: ZipInfo) -> Tensor:
    with archive.open(member) as file:
        shape, by_column, dtype = _header(file)
        size = math.prod(shape) * dtype.itemsize
        content = file.read(size)
        if file.read(1) or len(content) < size:
            raise ValueError(f"{size} bytes announced, and more or fewer there")
    array = np.frombuffer(content, dtype).reshape(shape, order="F" if by_column else "C")
    with np.errstate(over="ignore"):  # what is infinite then is told as such
        return torch.from_numpy(np.array(array, dtype=np.float32, order="C"))


def _in_safetensors(path: Path, opened: Any) -> _Arrays:
    def read(key: str) -> Tensor:
        found: Tensor = opened.get_tensor(key)
        if found.is_complex():
            raise ValueError(f"numbers wanted, got {found.dtype}")
        return found.float()

    def shape(key: str) -> tuple[int, ...]:
        return tuple(opened.get_slice(key).get_shape())

    def digest() -> str:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()[:16]

    return _Arrays(list(opened.keys()), shape, read, digest)
