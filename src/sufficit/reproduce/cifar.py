"""CIFAR-10: the binary files in either of their forms, or class folders of pictures."""

import pickle
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from sufficit.data.images import list_images, plain_name
from sufficit.data.splits import Sets, Split
from sufficit.errors import UserError
from sufficit.reproduce.photos import read_bytes

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
SIDE = 32
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = ("test_batch",)
LAYOUTS = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10/{train,test}/CLASS")


def cifar10(root: Path, *, side: int, device: torch.device) -> Sets:
    """Both parts of CIFAR-10 below a folder."""
    folder = find_cifar(root)
    if folder is None:
        raise UserError(f"no CIFAR-10 in {root}: looked for {', '.join(LAYOUTS)}")
    parts = [_FORMS[folder.name](folder, part) for part in ("train", "test")]
    train, test = (Split(images, labels, side).to(device) for images, labels in parts)
    return Sets(train, test, CLASSES, f"CIFAR-10 ({folder.name})")


def find_cifar(root: Path) -> Path | None:
    """The folder that holds CIFAR-10 in one of its forms."""
    if not root.is_dir():
        raise UserError(f"no folder of data at {root}")
    return next((root / name for name in _FORMS if (root / name).is_dir()), None)


def _from_batches(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    names = TRAIN if part == "train" else TEST
    images, labels = zip(*(read_batch(folder / name) for name in names), strict=True)
    return torch.cat(images), torch.cat(labels)


def _from_bin(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    names = TRAIN if part == "train" else TEST
    images, labels = zip(*(read_bin(folder / f"{name}.bin") for name in names), strict=True)
    return torch.cat(images), torch.cat(labels)


def _from_folders(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    pictures = list_images(folder / part)
    known = {plain_name(name): number for number, name in enumerate(CLASSES)}
    strange = {p.folder for p in pictures if plain_name(p.folder or "") not in known}
    if strange:
        raise UserError(
            f"{folder / part} has pictures in {sorted(map(str, strange))[0]!r}: wanted are class"
            f" folders called {', '.join(CLASSES)}"
        )
    labels = torch.tensor([known[plain_name(p.folder or "")] for p in pictures])
    return read_bytes([picture.path for picture in pictures], SIDE), labels


_FORMS = {
    "cifar-10-batches-py": _from_batches,
    "cifar-10-batches-bin": _from_bin,
    "cifar10": _from_folders,
}


def read_bin(path: Path) -> tuple[Tensor, Tensor]:
    """A file of the binary version: a label's byte, then 3,072 of the picture, and so on."""
    content = np.frombuffer(_content(path), np.uint8)
    if not len(content) or len(content) % 3073:
        raise UserError(f"{path} is no CIFAR-10 file: {len(content)} bytes are no whole records")
    records = torch.from_numpy(content.copy()).view(-1, 3073)
    return _checked(path, records[:, 1:], records[:, 0].long())


def read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """A file of the Python version; of what a pickle can do, only arrays are allowed."""
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="bytes").load()
        pixels, labels = np.asarray(content[b"data"], np.uint8), content[b"labels"]
        return _checked(path, torch.from_numpy(pixels.copy()), torch.tensor(labels))
    except FileNotFoundError as error:
        raise UserError(f"no file of CIFAR-10 at {path}") from error
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path} can't be read as a file of CIFAR-10: {error}") from error


class _ArraysOnly(pickle.Unpickler):
    """Reads dicts, lists, bytes and numpy arrays, and refuses whatever else a pickle names."""

    ALLOWED = frozenset(
        {("_reconstruct", "multiarray"), ("ndarray", "numpy"), ("dtype", "numpy"),
         ("encode", "_codecs")}
    )  # fmt: skip

    def __init__(self, file: IO[bytes], *, encoding: str) -> None:
        super().__init__(file, encoding=encoding)

    def find_class(self, module: str, name: str) -> Any:
        """One of the four things that an array is made of."""
        if (name, module.rpartition(".")[2]) not in self.ALLOWED:
            raise UserError(f"it names {module}.{name}, which no file of CIFAR-10 does")
        if name == "_reconstruct":  # numpy has moved it
            return np.ndarray.__reduce__(np.zeros(1))[0]
        return super().find_class(module, name)


def _checked(path: Path, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures [N,3,32,32] and labels [N] that belong together."""
    if pixels.ndim != 2 or pixels.shape[1] != 3072 or len(pixels) != len(labels):
        raise UserError(f"{path} is no CIFAR-10 file: {list(pixels.shape)}, {list(labels.shape)}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(CLASSES):
        raise UserError(f"{path} is no CIFAR-10 file: it has labels outside 0..9")
    return pixels.reshape(-1, 3, SIDE, SIDE), labels.long()


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"no file of CIFAR-10 at {path}: {error.strerror}") from error
