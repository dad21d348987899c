"""Heatmap files: .npz or .safetensors with one array [h,w] per image, keyed by the image's name.

A map that is cut is stored as the map before the cut, and the share of the pixels that it marks: a
number under the image's key and SHARE.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import file_digest, sha256
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import IO, Any, Protocol
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import torch
from torch import Tensor

from sufficit.data.image_files import check_there
from sufficit.errors import GoneError, UserError
from sufficit.files import local_file, writing

SHARE = "@share"  # behind an image's key


class HeatmapError(UserError):
    """One heatmap of a file that cannot be used; the others may be fine."""


class HeatmapFile:
    """The arrays of a file, read one at a time; keys may be paths, file names or stems.

    Use it as `with HeatmapFile(path) as maps`.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"no heatmap file at {path}")
        if path.suffix not in (".npz", ".safetensors"):
            raise UserError(f"heatmaps must be a .npz or .safetensors file, got {path.name}")
        self.path = path
        self._closing = ExitStack()
        self._shares: dict[str, str] = {}  # key -> the member that holds its share
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
        # Only behind the key of a map is it a share: an image may have such a name.
        self._shares = {
            name.removesuffix(SHARE): name
            for name in self._members
            if name.endswith(SHARE) and name.removesuffix(SHARE) in self._members
        }
        self._maps = self._members.keys() - self._shares.values()
        self.keys = [name for name in self._members if name in self._maps]
        self._fits: dict[str, str] = {}  # key -> the first image that it fits
        self._loose: set[str] = set()  # keys that are not the full name of their image
        self._lock = Lock()  # several threads read

    def __enter__(self) -> "HeatmapFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def key(self, name: str) -> str | None:
        """Return the key of an image: its path in the folder, or its name or stem, if unique.

        Raise if a key also fits an image that was asked for before.
        """
        path = PurePosixPath(name)
        forms = dict.fromkeys([name, path.with_suffix("").as_posix(), path.name, path.stem])
        fits = [form for form in forms if form in self._maps]  # the most exact one first
        with self._lock:
            if fits and fits[0] != name:
                self._loose.add(fits[0])
            # Two images of one file name in two folders would otherwise share a map silently.
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
        """Return a short hash of the file's heatmaps."""
        if self.path.suffix == ".npz":
            # The archive has a checksum of each array, so that none need be unpacked.
            sums = [(name, info.CRC, info.file_size) for name, info in self._members.items()]
            return sha256(repr(sums).encode()).hexdigest()[:16]
        with self._local.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()[:16]

    @property
    def is_cut(self) -> bool:
        """Whether its maps are stored before the cut, with shares."""
        return bool(self._shares)

    def share(self, key: str) -> float:
        """Return the share of the pixels that a cut map marks: above 0, at most 1."""
        what = f"the share of heatmap {key!r} of {self.path}"
        if key not in self._shares:
            raise HeatmapError(f"{what} is missing, and other heatmaps of the file have one")
        share = self._read(self._shares[key], what, dimensions=0).item()
        if not 0 < share <= 1:
            raise HeatmapError(f"{what} must be above 0 and at most 1, got {share}")
        return float(share)

    def read(self, key: str) -> Tensor:
        """Return one heatmap, before the cut if it is cut: [h,w] float32."""
        return self._read(key, f"heatmap {key!r} of {self.path}", dimensions=2).float()

    def _read(self, key: str, what: str, dimensions: int) -> Tensor:
        """Return the array under a key; what is wrong with it is a HeatmapError."""
        try:
            with self._lock:
                if self.path.suffix == ".npz":
                    with self._file.open(self._members[key]) as file:
                        return _read_npy(file, what, dimensions)
                # The shape first: it costs nothing, and a wrong array may be of any size.
                _check_shape(tuple(self._file.get_slice(key).get_shape()), what, dimensions)
                array: Tensor = self._file.get_tensor(key)
                if array.is_complex():
                    raise ValueError(f"expected numbers, got {array.dtype}")
                return array
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


class Write(Protocol):
    """Writes one heatmap of a file."""

    def __call__(self, name: str, value: Tensor, share: float | None = None, /) -> None:
        """Write the map of an image [h,w]; one that is cut as it was before, with its share."""


@contextmanager
def heatmap_writer(path: Path) -> Iterator[Write]:
    """Return a function that writes one heatmap by its image's name: [h,w]."""
    with writing(path) as part, ZipFile(part, "w", ZIP_DEFLATED) as archive:

        def write(name: str, value: Tensor, share: float | None = None, /) -> None:
            _write_npy(archive, name, value.cpu().numpy())
            if share is not None:
                _write_npy(archive, name + SHARE, np.float64(share))

        yield write


def _write_npy(archive: ZipFile, name: str, array: Any) -> None:
    """Add an array to an archive, as numpy's savez does, which would hold all arrays in memory."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _read_npy(file: IO[bytes], what: str, dimensions: int) -> Tensor:
    """Return an array of numbers with so many dimensions; nothing that is pickled is loaded."""
    array = np.lib.format.read_array(file, allow_pickle=False)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"expected numbers, got {array.dtype}")
    _check_shape(array.shape, what, dimensions)
    kind = np.float32 if dimensions == 2 else np.float64
    with np.errstate(over="ignore"):  # infinite values are reported later
        return torch.from_numpy(np.ascontiguousarray(array.astype(kind)).reshape(array.shape))


def _check_shape(shape: tuple[int, ...], what: str, dimensions: int) -> None:
    """Raise unless a shape has so many dimensions and a value at least."""
    if len(shape) != dimensions or 0 in shape:
        wanted = "[h,w]" if dimensions == 2 else "a number"
        raise HeatmapError(f"{what} must be {wanted}, got {list(shape)}")
