"""Where the object is: masks or boxes from outside, as the model sees the image.

Boxes come by image name: COCO JSON, Pascal VOC XML, CSV. Files may be anyone's:
sizes are limited, and XML with a DOCTYPE is refused, because entities can be expanded to any size
or read other files.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from io import BytesIO, StringIO
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.classifier.fingerprint import digest
from sufficit.data.image_files import SUFFIXES, BadImageError, ImageFile, images_below
from sufficit.data.images import ImageTensor, plain_name
from sufficit.data.loader import Entry
from sufficit.data.pictures import read_mask, seen, upright_size
from sufficit.errors import UserError, changed
from sufficit.files import is_remote, place, read_json, read_limited

# The values of a truth; 0 is outside.
OBJECT = 2  # the object's own pixels
BOX = 1  # the other pixels of its box
ALIKE = 1.02  # proportions of a mask and its image may differ by this factor, from rounding
MOST_BYTES = 2**30  # of a list of boxes; COCO's own have 2**29
MOST_XML = 2**22  # of the XML of one image
FARTHEST = 1e7  # pixels
CSV_HEADS = ("image", "x", "y", "width", "height")
_text_of = partial(str, encoding="utf-8-sig")  # UTF-8 alone shows all that is in a file


class TruthError(UserError):
    """The truth of one image that cannot be used; the others may be fine."""


class Box(NamedTuple):
    """A box in the pixels of its image, from the left and from the top."""

    x: float
    y: float
    width: float
    height: float
    category: str = ""


@dataclass(frozen=True)
class TruthMasks:
    """Masks in memory, one per image, in the order of the images."""

    masks: Tensor  # [N,H,W]: the object is where it is above 0

    def check(self, names: Sequence[str]) -> int:
        """Return the number of images that have a truth; raise unless each image has a mask."""
        if self.masks.ndim != 3 or len(self.masks) != len(names):
            raise UserError(
                f"truth must be [N,H,W] with N = {len(names)} images, got"
                f" {list(self.masks.shape)}: give one mask per image, all zeros where none is known"
            )
        return int((self.masks > 0).flatten(1).any(1).sum())

    def read(self, entry: Entry, view: View | None) -> Tensor:
        """Return the truth of an image: uint8 [H,W]."""
        return with_boxes((self.masks[entry.number] > 0).cpu()[None])[0]

    def digest(self) -> str:
        """Return a digest of the masks."""
        return digest(self.masks)


@dataclass(frozen=True)
class TruthFiles:
    """Masks in a folder, or boxes in files, found by the name of the image."""

    path: Path
    known: str = field(default="", compare=False)  # the digest in the process that sent it here

    def __getstate__(self) -> dict[str, Any]:
        # Each process reads the files once, and must find the same ones.
        return {"path": self.path, "known": self.digest()}

    @cached_property
    def records(self) -> Mapping[str, ImageFile | Sequence[Box]]:
        """The mask or the boxes of each image, by its name there."""
        if not self.path.exists():
            raise UserError(f"no truth at {self.path}")
        records: Mapping[str, Any] | None = boxes_at(self.path)
        if records is None:
            records = {image.name: image for image in images_below(self.path, set())}
        if not records:
            raise UserError(f"{self.path} has no masks and no boxes: give a folder that has some")
        if self.known and _digest(records) != self.known:
            raise changed(self.path)
        return records

    @cached_property
    def _stems(self) -> dict[str, list[str]]:
        """The names of the records by their last part: a million images are not compared to all."""
        stems: dict[str, list[str]] = {}
        for key in self.records:
            stems.setdefault(_path(key).name, []).append(key)
        return stems

    def key(self, name: str) -> str | None:
        """Return the record of an image: of the same path without suffix, or of the end of one.

        Names from a file may begin above the folder of the images, or below it.
        """
        # Masks have other suffixes than images: names are compared without.
        own = _path(name)
        paths = {key: _path(key) for key in self._stems.get(own.name, ())}
        alike = [key for key, path in paths.items() if _ends(own, path)]
        fits = [key for key in alike if paths[key] == own] or alike
        if len(fits) > 1:
            raise UserError(
                f"{self.path} has two or more truths for {name} ({fits[0]}, {fits[1]}): use the"
                " path inside the folder of the images as name"
            )
        return fits[0] if fits else None

    def check(self, names: Sequence[str]) -> int:
        """Return the number of images that have a truth; raise for none, or one that fits two."""
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
        """Return the truth of an image as the model sees it: uint8 [H,W], 0 where none is known."""
        image = entry.image
        key = self.key(entry.image.name)
        try:
            if isinstance(image, ImageTensor):
                size = image.pixels.shape[1], image.pixels.shape[2]
            else:  # before the model's view
                local = not image.inside and image.is_there()
                size = upright_size(image.path if local else BytesIO(image.content()))
            record = () if key is None else self.records[key]
            if isinstance(record, ImageFile):
                return with_boxes(_as_seen(_mask(record, size, view), view)[None])[0]
            # Of boxes alone nobody knows more: all of the box counts as the object.
            return OBJECT * _as_seen(_drawn(record, size, image.folder), view).to(torch.uint8)
        except BadImageError as error:
            raise TruthError(f"its truth in {self.path.name}: {error}") from error

    def digest(self) -> str:
        """Return a digest of the names with their boxes, or with size and time of their masks."""
        return _digest(self.records)


def _digest(records: Mapping[str, ImageFile | Sequence[Box]]) -> str:
    """Return a digest of masks, by size and version, or of boxes."""
    facts = [
        (key, (record.size, record.version) if isinstance(record, ImageFile) else [*record])
        for key, record in sorted(records.items())
    ]
    return sha256(repr(facts).encode()).hexdigest()[:16]


Truth = TruthMasks | TruthFiles


def truth_from(given: "Tensor | Path | str | Truth | None") -> Truth | None:
    """Return the truth that a user gave: masks [N,H,W], a path, or none."""
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
    across = masks.any(1)  # [N,W]
    down = masks.any(2)  # [N,H]

    # From the first True of a line to the last: at or after a True, and at or before one.
    def between(line: Tensor) -> Tensor:
        return line.int().cummax(1).values & line.flip(1).int().cummax(1).values.flip(1)

    boxes = between(down)[:, :, None] * between(across)[:, None]
    return (boxes * BOX).to(torch.uint8).masked_fill(masks, OBJECT)


def _path(name: str) -> PurePosixPath:
    """Return a name without the suffix of an image or of XML."""
    path = PurePosixPath(name)
    return path.with_suffix("") if path.suffix.lower() in (*SUFFIXES, ".xml") else path


def _ends(one: PurePosixPath, other: PurePosixPath) -> bool:
    """Return whether the shorter of two paths is the end of the longer."""
    count = min(len(one.parts), len(other.parts))
    return one.parts[-count:] == other.parts[-count:]


def _mask(file: ImageFile, size: tuple[int, int], view: View | None) -> Image.Image:
    """Return a mask as a grey picture: 255 on the object."""
    try:
        picture = read_mask(BytesIO(file.content()))
    except BadImageError as error:
        raise BadImageError(f"{file.name}: {error}") from error
    values = np.asarray(picture)
    # In a palette every number but 0 is an object, and so it is where the largest number is 1.
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
    """Return boxes as a grey picture of the image's size: 255 inside.

    A pixel is inside if its middle is. Where boxes have the image's own class, those of other
    classes are left out.
    """

    def inside(low: float, length: float, side: int) -> slice:
        start, end = (int(min(max(np.ceil(edge - 0.5), 0), side)) for edge in (low, low + length))
        return slice(start, end)

    own = [box for box in boxes if label and plain_name(box.category) == plain_name(label)]
    picture = np.zeros(size, np.uint8)
    for box in own or boxes:
        rows = inside(box.y, box.height, size[0])
        columns = inside(box.x, box.width, size[1])
        picture[rows, columns] = 255
    return Image.fromarray(picture)


def _as_seen(picture: Image.Image, view: View | None) -> Tensor:
    """Return the part of a grey picture that the model sees, to the nearest pixel: bool [H,W]."""
    # Not bilinear, which would make grey edges that are neither object nor background.
    if view is not None:
        picture = seen(picture, replace(view, interpolation="nearest-exact"))
    return torch.from_numpy(np.asarray(picture) > 0)


def boxes_at(path: Path) -> dict[str, list[Box]] | None:
    """Return the boxes of a file or folder by image name, None for a folder that has none."""
    readers = {".json": _read_coco, ".csv": _read_csv}
    if path.is_dir():
        names = chain(path.glob("*.xml"), path.glob("*/*.xml"))
        if is_remote(path) or next(names, None) is None:
            return None
        rows = _read_voc(path)
    elif path.suffix.lower() not in readers:
        raise UserError(
            f"{path} is no truth: give a folder of masks or of Pascal VOC .xml, COCO's .json, or"
            f" a .csv with the columns {', '.join(CSV_HEADS)}"
        )
    else:
        rows = readers[path.suffix.lower()](path)
    boxes: dict[str, list[Box]] = {}
    for name, box in rows:
        boxes.setdefault(name, []).extend([] if box is None else [box])
    return boxes


_Rows = Iterator[tuple[str, Box | None]]
"""A box and the name of its image; None if the image is known to have none."""


def _read_coco(path: Path) -> _Rows:
    """Return the boxes of COCO's JSON."""
    content = read_json(path, MOST_BYTES)
    try:
        names = {image["id"]: _text(image["file_name"]) for image in content["images"]}
        kinds = {kind["id"]: _text(kind["name"]) for kind in content.get("categories", ())}
        for annotation in content["annotations"]:
            category = kinds.get(annotation.get("category_id"), "")
            yield names[annotation["image_id"]], _box(path, annotation["bbox"], category)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path} is no COCO file of boxes ({error!r}): it needs images with id and file_name,"
            " and annotations with image_id and bbox"
        ) from error


def _read_voc(folder: Path) -> _Rows:
    """Return boxes of one file per image, found by its name."""
    for path in sorted(chain(folder.glob("*.xml"), folder.glob("*/*.xml"))):
        name = path.relative_to(folder).as_posix()
        text = read_limited(path, MOST_XML, _text_of)
        if "<!DOCTYPE" in text or "<!ENTITY" in text:
            raise UserError(f"{path} declares a DOCTYPE or entities, which is refused: remove them")
        try:
            objects = ElementTree.fromstring(text).iter("object")
        except (ElementTree.ParseError, ValueError) as error:
            raise UserError(f"{path} could not be read as XML: {error}") from error
        yield name, None
        for element in objects:
            names = ("xmin", "ymin", "xmax", "ymax")
            sides = [element.findtext(f"bndbox/{side}") for side in names]
            if None in sides:
                raise UserError(f"{path}: an object has no bndbox with xmin, ymin, xmax and ymax")
            left, top, right, bottom = (_number(path, side) for side in sides)
            kind = (element.findtext("name") or "").strip()
            # Pixels are counted from 1, and the last one is inside.
            box = (left - 1, top - 1, right - left + 1, bottom - top + 1)
            yield name, _box(path, box, kind)


def _read_csv(path: Path) -> _Rows:
    """Return the boxes of a table with the columns CSV_HEADS, and perhaps `category`."""
    rows = csv.DictReader(StringIO(read_limited(path, MOST_BYTES, _text_of)))
    try:
        missing = [head for head in CSV_HEADS if head not in (rows.fieldnames or ())]
        if missing:
            raise UserError(f"{path} has no column {missing[0]!r}: give {', '.join(CSV_HEADS)}")
        for row in rows:
            sides = [row[head] for head in CSV_HEADS[1:]]
            yield _text(row["image"]), _box(path, sides, row.get("category") or "")
    except csv.Error as error:
        raise UserError(f"{path} could not be read as CSV: {error}") from error


def _box(path: Path, sides: Sequence[Any], category: str) -> Box:
    """Return a box of (x, y, width, height); raise unless these are numbers of pixels."""
    x, y, width, height = (_number(path, side) for side in sides)
    if width < 0 or height < 0:
        raise UserError(f"{path}: a box must have width and height, got {width:g} x {height:g}")
    return Box(x, y, width, height, category)


def _number(path: Path, value: Any) -> float:
    """Return a number of pixels; raise for anything else, also for one that is far too large."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not abs(number) <= FARTHEST:  # NaN neither
        raise UserError(f"{path}: a box must have numbers of pixels, got {value!r:.80}")
    return number


def _text(value: Any) -> str:
    """Return a text; raise for what JSON has in its place."""
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r:.80}")
    return value
