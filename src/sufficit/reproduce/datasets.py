"""The data sets of the paper's tables, by name; and how to download them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sufficit.data.splits import Sets, Split, evenly
from sufficit.errors import UserError
from sufficit.reproduce.cifar import cifar10, find_cifar
from sufficit.reproduce.cub import cub200, holds_cub
from sufficit.reproduce.folders import image_folder
from sufficit.reproduce.mnist import find_mnist, synthetic_mnist

CUB_URL = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
CUB_MD5 = "97eceeb196236b17998738112f37df78"


@dataclass(frozen=True)
class DataOptions:
    """Which pictures are wanted, and at which size the model sees them."""

    side: int
    seed: int = 0
    train_images: int | None = None  # all by default
    classes: tuple[str, ...] = ()
    test_images: int | None = None
    device: torch.device | str = "cpu"


@dataclass(frozen=True)
class DataSet:
    """How a data set is read from a folder, and downloaded to one."""

    about: str
    read: Callable[[Path | None, DataOptions], Sets]
    download: Callable[[Path], None]


def load_sets(name: str, root: Path | None, options: DataOptions) -> Sets:
    """A data set by its name, with as many pictures of each part as are wanted."""
    found = DATASETS[name].read(root, options)
    train = _at_most(found.train, options.train_images, options.seed)
    test = _at_most(found.test, options.test_images, options.seed)
    if len(train.labels.unique()) < 2:
        raise UserError(f"{found.source}: a classifier needs images of two classes or more")
    return replace(found, train=train, test=test)


def _at_most(split: Split, n: int | None, seed: int) -> Split:
    return split if n is None or n >= len(split) else split.pick(evenly(split.labels, n, seed))


def _read_mnist(root: Path | None, options: DataOptions) -> Sets:
    return synthetic_mnist(
        root,
        train_images=options.train_images,
        test_images=options.test_images,
        seed=options.seed,
        device=torch.device(options.device),
    )


def _read_cifar(root: Path | None, options: DataOptions) -> Sets:
    return cifar10(_given(root, "CIFAR-10"), side=options.side, device=torch.device(options.device))


def _read_cub(root: Path | None, options: DataOptions) -> Sets:
    return cub200(
        _given(root, "CUB-200-2011"),
        side=options.side,
        classes=options.classes,
        seed=options.seed,
        device=torch.device(options.device),
    )


def _read_folder(root: Path | None, options: DataOptions) -> Sets:
    if root is None:
        raise UserError("give the folder that holds your class folders with --data")
    return image_folder(
        root,
        side=options.side,
        seed=options.seed,
        device=torch.device(options.device),
    )


def _given(root: Path | None, what: str) -> Path:
    if root is None:
        raise UserError(f"{what} is read from a folder: give --data ROOT, or --download it there")
    return root


def _download_mnist(root: Path) -> None:
    from torchvision.datasets import MNIST

    if find_mnist(root) is None:
        MNIST(str(root), download=True)


def _download_cifar(root: Path) -> None:
    from torchvision.datasets import CIFAR10

    if find_cifar(root) is None:
        CIFAR10(str(root), download=True)


def _download_cub(root: Path) -> None:
    from torchvision.datasets.utils import download_and_extract_archive

    if not holds_cub(root):
        download_and_extract_archive(CUB_URL, str(root), md5=CUB_MD5)


def _download_nothing(root: Path) -> None:
    raise UserError(f"an image folder of your own is not downloaded: leave --download out ({root})")


def download(name: str, root: Path) -> None:
    """Fetch a data set into a folder, unless it is there; its checksum is checked."""
    root.mkdir(parents=True, exist_ok=True)
    try:
        DATASETS[name].download(root)
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{DATASETS[name].about} could not be downloaded to {root} ({reason}): check the"
            " network, or lay the files there yourself"
        ) from error


DATASETS: dict[str, DataSet] = {
    "synthetic-mnist": DataSet("MNIST", _read_mnist, _download_mnist),
    "cifar10": DataSet("CIFAR-10", _read_cifar, _download_cifar),
    "cub200": DataSet("CUB-200-2011", _read_cub, _download_cub),
    "folder": DataSet("an image folder", _read_folder, _download_nothing),
}
