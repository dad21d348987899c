"""Where the object is: masks or boxes from outside, as the model sees the image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.classifier.fingerprint import digest
from sufficit.data.annotations import Box, boxes_at
from sufficit.data.image_files import SUFFIXES, BadImageError, ImageFile, images_below
from sufficit.data.images import ImageTensor, SourceImage, plain_name
from sufficit.data.loader import Entry
from sufficit.data.pictures import read_mask, seen, upright_size
from sufficit.errors import UserError
from sufficit.files import place

OBJECT, BOX = 2, 1  # in a truth: the object's pixels, the others in its box; 0 is outside
ALIKE = 1.02  # proportions of a mask and its image may differ by this factor, from rounding


class TruthError(UserError):
    """The truth of one image that cannot be used; the others may be fine."""


@dataclass(frozen=True)
class TruthMasks:
    """Masks in memory, one per image, in the order of the images."""

    masks: Tensor  # [N,H,W]: the object is where it is above 0

    def check(self, names: Sequence[str]) -> int:
        """The number of images that have a truth; raise unless there is a mask for every image."""
        if self.masks.ndim != 3 or len(self.masks) != len(names):
            raise UserError(
                f"truth must be [N,H,W] with N = {len(names)} images, got"
                f" {list(self.masks.shape)}: give one mask per image, all zeros where none is known"
            )
        return int((self.masks > 0).flatten(1).any(1).sum())

    def read(self, entry: Entry, view: View | None) -> Tensor:
        """The truth of an image: uint8 [H,W]."""
        return with_boxes((self.masks[entry.number] > 0).cpu()[None])[0]

    def digest(self) -> str:
        """What tells this truth from another."""
        return digest(self.masks)


@dataclass(frozen=True)
class TruthFiles:
    """Masks in a folder, or boxes in files, found by the name of the image."""

    path: Path

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}  # each process reads the files once

    @cached_property
    def records(self) -> Mapping[str, ImageFile | Sequence[Box]]:
        """The mask or the boxes of each image, by its name there."""
        if not self.path.exists():
            raise UserError(f"no truth at {self.path}: check the path")
        found: Mapping[str, Any] | None = boxes_at(self.path)
        if found is None:
            found = {image.name: image for image in images_below(self.path, set())}
        if not found:
            raise UserError(f"{self.path} has no masks and no boxes: give a folder that has some")
        return found

    @cached_property
    def _stems(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for key in self.records:
            found.setdefault(_path(key).name, []).append(key)
        return found

    def key(self, name: str) -> str | None:
        """The record of an image: of the same path without suffix, or of the end of one.

        Names from a file may begin above the folder of the images, or below it.
        """
        own = _path(name)
        paths = {key: _path(key) for key in self._stems.get(own.name, ())}
        alike = [key for key, path in paths.items() if _ends(own, path)]
        found = [key for key in alike if paths[key] == own] or alike
        if len(found) > 1:
            raise UserError(
                f"{self.path} has two or more truths for {name} ({found[0]}, {found[1]}): use the"
                " path inside the folder of the images as name"
            )
        return found[0] if found else None

    def check(self, names: Sequence[str]) -> int:
        """The number of images that have a truth; raise for none, or one truth of two images."""
        owners: dict[str, str] = {}
        for name in names:
            key = self.key(name)
            if key is not None and owners.setdefault(key, name) != name:
                raise UserError(
                    f"{key} in {self.path} fits two images ({owners[key]}, {name}): use the path"
                    " inside the folder of the images as name"
                )
        if not owners:
            raise UserError(
                f"{self.path} has the truth of none of the {len(names)} images. Images are named"
                f" like {names[0]!r}, its truths like {next(iter(self.records))!r}: use the image"
                " names"
            )
        return len(owners)

    def read(self, entry: Entry, view: View | None) -> Tensor:
        """The truth of an image as the model sees it, all 0 where none is known: uint8 [H,W]."""
        image, key = entry.image, self.key(entry.image.name)
        try:
            size = size_of(image)
            known = () if key is None else self.records[key]
            if isinstance(known, ImageFile):
                return with_boxes(_as_seen(_mask(known, size, view), view)[None])[0]
            return OBJECT * _as_seen(_drawn(known, size, image.folder), view).to(torch.uint8)
        except BadImageError as error:
            raise TruthError(f"its truth in {self.path.name}: {error}") from error

    def digest(self) -> str:
        """What tells this truth from another: names with boxes, or with sizes of the masks."""
        known = [
            (key, one.size if isinstance(one, ImageFile) else [*one])
            for key, one in sorted(self.records.items())
        ]
        return sha256(repr(known).encode()).hexdigest()[:16]


Truth = TruthMasks | TruthFiles


def truth_from(given: "Tensor | Path | str | Truth | None") -> Truth | None:
    """The truth that a user gave: masks [N,H,W], a path, or none."""
    if given is None or isinstance(given, TruthMasks | TruthFiles):
        return given
    if isinstance(given, Tensor):
        return TruthMasks(given)
    if not isinstance(given, str | Path):
        came = type(given).__name__
        raise UserError(f"truth must be masks [N,H,W] or a path, got {came}: pass such a tensor")
    return TruthFiles(place(given))


def with_boxes(masks: Tensor) -> Tensor:
    """Mark the object, and the rest of the smallest box around it: bool [N,H,W] -> uint8 [N,H,W].

    >>> with_boxes(torch.tensor([[[True, False, False], [False, True, False]]]))
    tensor([[[2, 1, 0],
             [1, 2, 0]]], dtype=torch.uint8)
    """
    masks = masks.bool()
    across, down = masks.any(1), masks.any(2)  # [N,W], [N,H]

    def between(line: Tensor) -> Tensor:
        return line.int().cummax(1).values & line.flip(1).int().cummax(1).values.flip(1)

    boxes = between(down)[:, :, None] * between(across)[:, None]
    return (boxes * BOX).to(torch.uint8).masked_fill(masks, OBJECT)


def size_of(image: SourceImage) -> tuple[int, int]:
    """Height and width of an image before the model's view."""
    if isinstance(image, ImageTensor):
        return image.pixels.shape[1], image.pixels.shape[2]
    local = type(image) is ImageFile and image.is_there()
    return upright_size(image.path if local else BytesIO(image.content()))


def _path(name: str) -> PurePosixPath:
    """A name without the suffix of an image or of XML."""
    path = PurePosixPath(name)
    return path.with_suffix("") if path.suffix.lower() in (*SUFFIXES, ".xml") else path


def _ends(one: PurePosixPath, other: PurePosixPath) -> bool:
    """Whether the shorter of two paths is the end of the longer."""
    count = min(len(one.parts), len(other.parts))
    return one.parts[-count:] == other.parts[-count:]


def _mask(file: ImageFile, size: tuple[int, int], view: View | None) -> Image.Image:
    """A mask as a grey picture: 255 on the object."""
    try:
        picture = read_mask(BytesIO(file.content()))
    except BadImageError as error:
        raise BadImageError(f"{file.name}: {error}") from error
    values = np.asarray(picture)
    grey = picture.mode not in ("1", "P") and values.max(initial=0) > 1
    h, w = values.shape
    crop = None if view is None else view.crop
    if (h, w) not in (size, crop) and not 1 / ALIKE < h / w / (size[0] / size[1]) < ALIKE:
        raise BadImageError(
            f"{file.name} has {w} x {h} pixels, the image {size[1]} x {size[0]}: give masks with"
            " the proportions of their images"
        )
    return Image.fromarray(((values >= 128 if grey else values > 0) * 255).astype(np.uint8))


def _drawn(boxes: Sequence[Box], size: tuple[int, int], label: str | None) -> Image.Image:
    """Boxes as a grey picture of the image's size: 255 where the middle of a pixel is inside.

    Where boxes have the image's own class, those of other classes are left out.
    """
    own = [box for box in boxes if label and plain_name(box.category) == plain_name(label)]
    found = np.zeros(size, np.uint8)
    for box in own or boxes:
        rows, columns = (
            slice(*(int(min(max(np.ceil(edge - 0.5), 0), side)) for edge in (low, low + length)))
            for low, length, side in ((box.y, box.height, size[0]), (box.x, box.width, size[1]))
        )
        found[rows, columns] = 255
    return Image.fromarray(found)


def _as_seen(picture: Image.Image, view: View | None) -> Tensor:
    """What the model sees of a grey picture, to the nearest pixel: bool [H,W]."""
    if view is not None:
        picture = seen(picture, replace(view, interpolation="nearest-exact"))
    return torch.from_numpy(np.asarray(picture) > 0)
