"""Any folder of class folders as a data set to train and test a classifier on."""

from collections.abc import Sequence
from pathlib import Path

import torch

from sufficit.data.images import ImageFile, list_images
from sufficit.data.splits import Sets, Split, held_out
from sufficit.errors import UserError
from sufficit.reproduce.photos import ROOM, read_bytes

PARTS = (("train", "test"), ("train", "val"))  # folders that part a data set
TESTED = 5  # one in so many is tested on, where nothing parts them


def image_folder(root: Path, *, side: int, seed: int = 0, device: torch.device) -> Sets:
    """ROOT/train/CLASS and ROOT/test/CLASS (or val); or ROOT/CLASS, a fifth of it tested on."""
    parted = next((p for p in PARTS if all((root / name).is_dir() for name in p)), None)
    if parted is None:
        classes, whole = _read([root], side)
        train, test = held_out(whole[0], max(1, len(whole[0]) // TESTED), seed)
    else:
        classes, (train, test) = _read([root / name for name in parted], side)
    source = f"{root.resolve().name}, {len(classes)} classes"
    return Sets(train.to(device), test.to(device), tuple(classes), source)


def _read(folders: Sequence[Path], side: int) -> tuple[list[str], list[Split]]:
    """The classes of the first folder, and all pictures of each folder."""
    found = [list_images(folder) for folder in folders]
    classes = sorted({_class(picture, folders[0]) for picture in found[0]})
    if len(classes) < 2:
        raise UserError(
            f"{folders[0]} has pictures of {classes[0]!r} alone: two classes are needed"
        )
    return classes, [_split(f, p, classes, side) for f, p in zip(folders, found, strict=True)]


def _split(folder: Path, pictures: Sequence[ImageFile], classes: list[str], side: int) -> Split:
    labels = []
    for picture in pictures:
        name = _class(picture, folder)
        if name not in classes:
            raise UserError(f"{folder / name} is no class of the training pictures: {classes[:9]}")
        labels.append(classes.index(name))
    images = read_bytes([picture.path for picture in pictures], round(side * ROOM))
    return Split(images, torch.tensor(labels), side)


def _class(picture: ImageFile, folder: Path) -> str:
    if picture.folder is None:
        raise UserError(
            f"{picture.name} in {folder} lies in no class folder: wanted is CLASS/image"
        )
    return picture.folder
