"""The 3,000 training photographs: pixels, boxes and the split into learn, choose and report."""

import csv
import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

ARCHIVES = ("imagenet-val-train-0.tar", "imagenet-val-train-1.tar")
SPLITS = "imagenet-splits.csv"
BOXES = "imagenet-val-train-boxes.csv"
PARTS = ("learn", "choose", "report")


@dataclass(frozen=True)
class Photographs:
    """Photographs of one part, with their names, classes and boxes."""

    names: list[str]
    pixels: Tensor  # uint8 [N,3,224,224]
    labels: Tensor  # [N] the class by the folder
    boxes: list[list[tuple[float, float, float, float]]]  # x, y, width, height

    def __len__(self) -> int:
        return len(self.names)

    def images(self, rows: slice | Tensor) -> Tensor:
        """Return some photographs as float [n,3,224,224] in 0..1."""
        return self.pixels[rows].float() / 255


def _parts(root: Path) -> dict[str, str]:
    with (root / SPLITS).open() as file:
        return {row["image"]: row["part"] for row in csv.DictReader(file)}


def _boxes(root: Path) -> dict[str, list[tuple[float, float, float, float]]]:
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    with (root / BOXES).open() as file:
        for row in csv.DictReader(file):
            box = (float(row["x"]), float(row["y"]), float(row["width"]), float(row["height"]))
            found.setdefault(row["image"], []).append(box)
    return found


def _decode(blob: bytes) -> Tensor:
    with Image.open(io.BytesIO(blob)) as image:
        return pil_to_tensor(image.convert("RGB"))


def load(
    root: Path, device: str, limit: int | None = None, wanted: tuple[str, ...] = PARTS
) -> dict[str, Photographs]:
    """Read the wanted parts; with a limit only so many photographs of each."""
    parts, boxes = _parts(root), _boxes(root)
    blobs: dict[str, bytes] = {}
    for archive in ARCHIVES:
        with tarfile.open(root / archive) as tar:
            for member in tar:
                if member.isfile() and parts.get(member.name) in wanted:
                    blobs[member.name] = tar.extractfile(member).read()
    found = {}
    for part in wanted:
        names = sorted(name for name in blobs if parts[name] == part)
        if limit:
            names = names[:: max(1, len(names) // limit)][:limit]
        with ThreadPoolExecutor(16) as pool:
            pixels = torch.stack(list(pool.map(_decode, (blobs[name] for name in names))))
        found[part] = Photographs(
            names=names,
            pixels=pixels.to(device),
            labels=torch.tensor([int(name.split("/")[0]) for name in names], device=device),
            boxes=[boxes.get(name, []) for name in names],
        )
    return found
