"""Heatmap files: .npz or .safetensors with one array [h,w] per image, keyed by the image's name."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import file_digest, sha256
from io import BytesIO
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import IO, Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
import torch
from torch import Tensor

from sufficit.data.image_files import check_there
from sufficit.errors import GoneError, UserError
from sufficit.files import local_file, writing

MOST = 2**27  # values of a heatmap: more than the pixels of any image that is opened
MOST_HEADER = 2**16  # bytes
PART = 2**20  # values that are read at a time
_HEADERS = {  # bytes of its length, and its reader
    (1, 0): (2, np.lib.format.read_array_header_1_0),
    (2, 0): (4, np.lib.format.read_array_header_2_0),
}


class HeatmapError(UserError):
    """One heatmap of a file that cannot be used; the others may be fine."""


class HeatmapFile:
    """The arrays of a file, read one at a time; keys may be paths, file names or stems.

    Use it as `with HeatmapFile(path) as maps`.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"no heatmap file at {path}: check the path")
        if path.suffix not in (".npz", ".safetensors"):
            raise UserError(f"heatmaps must be a .npz or .safetensors file, got {path.name}")
        self.path, self._closing = path, ExitStack()
        self._members: dict[str, Any]  # of a .npz, with what the archive says about each
        try:
            if path.suffix == ".npz":
                opened = self._closing.enter_context(path.open("rb"))
                self._file: Any = self._closing.enter_context(ZipFile(opened))
                infos = self._file.infolist()
                self._members = {info.filename.removesuffix(".npy"): info for info in infos}
            else:
                from safetensors import safe_open

                self._local = self._closing.enter_context(local_file(path))
                self._file = self._closing.enter_context(safe_open(self._local, framework="pt"))
                self._members = dict.fromkeys(self._file.keys())
        except Exception as error:
            self._closing.close()
            if isinstance(error, GoneError):
                raise
            raise UserError(f"{path} could not be read as heatmaps: {error}") from error
        self.keys = list(self._members)
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
        fits = [form for form in forms if form in self._members]  # the most exact one first
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
        if self.path.suffix == ".npz":
            known = [(name, info.CRC, info.file_size) for name, info in self._members.items()]
            return sha256(repr(known).encode()).hexdigest()[:16]
        with self._local.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()[:16]

    def read(self, key: str) -> Tensor:
        """One heatmap: [h,w] float32."""
        what = f"heatmap {key!r} of {self.path}"
        try:
            with self._lock:
                if self.path.suffix == ".npz":
                    member = self._members[key]
                    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                        kinds = "it must be stored or deflated"
                        raise ValueError(f"{kinds}: other kinds unpack all at once")
                    with self._file.open(member) as file:
                        return _read_npy(file, member.file_size, what)
                _check_shape(tuple(self._file.get_slice(key).get_shape()), what)
                found: Tensor = self._file.get_tensor(key)
                if found.is_complex():
                    raise ValueError(f"expected numbers, got {found.dtype}")
                return found.float()
        except (HeatmapError, GoneError):
            raise
        except Exception as error:  # zip, numpy and safetensors have many errors of their own
            if isinstance(error, OSError):
                check_there(self.path, error)
            raise HeatmapError(f"{what} could not be read: {error}") from error


def write_heatmaps(path: Path, heatmaps: dict[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
    """Write heatmaps by image name, one at a time, to a .npz that HeatmapFile reads."""
    with heatmap_writer(path) as write:
        for name, value in heatmaps.items() if isinstance(heatmaps, dict) else heatmaps:
            write(name, value)


@contextmanager
def heatmap_writer(path: Path) -> Iterator[Callable[[str, Tensor], None]]:
    """A function that writes one heatmap by its image's name: [h,w]."""
    with writing(path) as part, ZipFile(part, "w", ZIP_DEFLATED) as archive:

        def write(name: str, value: Tensor) -> None:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, value.cpu().numpy(), allow_pickle=False)

        yield write


def _read_npy(file: IO[bytes], total: int, what: str) -> Tensor:
    """By hand, because numpy.load allocates whatever size a header claims."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of .npy is unknown")
    width, read_header = _HEADERS[version]
    head = file.read(width)
    length = int.from_bytes(head, "little")
    if length > MOST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    shape, by_column, dtype = read_header(BytesIO(head + file.read(length)))
    if any(side < 0 for side in shape):
        raise ValueError(f"no array has the shape {list(shape)}")
    if dtype.kind not in "fiub":
        reason = "objects, which need pickle" if dtype.kind == "O" else dtype
        raise ValueError(f"expected numbers, got {reason}")
    if dtype.itemsize > 8:
        raise ValueError(f"expected numbers of at most 8 bytes, got {dtype}")
    _check_shape(shape, what)
    size = math.prod(shape) * dtype.itemsize
    if file.tell() + size != total:
        raise ValueError(f"{size} bytes announced, but the file holds more or fewer")
    array = np.empty(math.prod(shape), np.float32)
    with np.errstate(over="ignore"):  # infinite values are reported later
        for start in range(0, len(array), PART):  # so that wide types take no more memory
            part = array[start : start + PART]
            part[:] = np.frombuffer(file.read(part.size * dtype.itemsize), dtype)
    ordered = array.reshape(shape, order="F" if by_column else "C")
    return torch.from_numpy(np.ascontiguousarray(ordered))


def _check_shape(shape: tuple[int, ...], what: str) -> None:
    if len(shape) != 2 or 0 in shape:
        raise HeatmapError(f"{what} must be [h,w], got {list(shape)}")
    if math.prod(shape) > MOST:
        raise HeatmapError(f"{what} has {list(shape)} values, more than {MOST}: reduce it")
