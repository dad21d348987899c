"""Boxes around objects, by image name: COCO JSON, Pascal VOC XML, CUB-200's lists, CSV.

The files may come from anyone: sizes are limited, and XML with a DOCTYPE is refused, because
entities can be expanded to any size or read other files.
"""

import csv
import math
from collections.abc import Iterator
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from sufficit.errors import GoneError, UserError
from sufficit.files import is_remote, read_json

MOST_BYTES = 2**30  # of a list of boxes; COCO's own have 2**29
MOST_XML = 2**22  # of the XML of one image
FARTHEST = 1e7  # pixels
CSV_HEADS = ("image", "x", "y", "width", "height")
CUB_BOXES, CUB_IMAGES = "bounding_boxes.txt", "images.txt"


class Box(NamedTuple):
    """A box in the pixels of its image, from the left and from the top."""

    x: float
    y: float
    width: float
    height: float
    category: str = ""


Boxes = dict[str, list[Box]]  # image name -> boxes


def boxes_at(path: Path) -> Boxes | None:
    """The boxes of a file or folder, None for a folder that has none."""
    if path.is_dir():
        if (path / CUB_BOXES).is_file():
            return read_cub(path / CUB_BOXES)
        names = chain(path.glob("*.xml"), path.glob("*/*.xml"))
        return None if is_remote(path) or next(names, None) is None else read_voc(path)
    readers = {".json": read_coco, ".csv": read_csv, ".txt": read_cub}
    if path.suffix.lower() not in readers:
        raise UserError(
            f"{path} is no truth: give a folder of masks or of Pascal VOC .xml, COCO's .json,"
            f" CUB-200's {CUB_BOXES}, or a .csv with the columns {', '.join(CSV_HEADS)}"
        )
    return readers[path.suffix.lower()](path)


def read_coco(path: Path) -> Boxes:
    """The boxes of a COCO JSON file."""
    content = read_json(path, MOST_BYTES)
    try:
        names = {image["id"]: _text(image["file_name"]) for image in content["images"]}
        kinds = {kind["id"]: _text(kind["name"]) for kind in content.get("categories", ())}
        found: Boxes = {}
        for one in content["annotations"]:
            x, y, width, height = one["bbox"]
            box = _box(path, x, y, width, height, kinds.get(one.get("category_id"), ""))
            found.setdefault(names[one["image_id"]], []).append(box)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path} is no COCO file of boxes ({error!r}): it needs images with id and file_name,"
            " and annotations with image_id and bbox"
        ) from error
    return found


def read_voc(folder: Path) -> Boxes:
    """The boxes of a folder of Pascal VOC XML files, one per image, found by their file names.

    Its pixels are counted from 1, and the last one is inside.
    """
    found: Boxes = {}
    for path in sorted(chain(folder.glob("*.xml"), folder.glob("*/*.xml"))):
        boxes = found.setdefault(path.relative_to(folder).as_posix(), [])
        for one in _xml(path).iter("object"):
            sides = [one.findtext(f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")]
            if None in sides:
                raise UserError(f"{path}: an object has no bndbox with xmin, ymin, xmax and ymax")
            left, top, right, bottom = (_number(path, side) for side in sides)
            kind = (one.findtext("name") or "").strip()
            boxes.append(_box(path, left - 1, top - 1, right - left + 1, bottom - top + 1, kind))
    return found


def read_cub(path: Path) -> Boxes:
    """The boxes of CUB-200's bounding_boxes.txt, with images.txt beside it."""
    names = dict(cub_lines(path.with_name(CUB_IMAGES), 2))
    found: Boxes = {}
    for number, sides in cub_lines(path, 5):
        if number not in names:
            raise UserError(f"{path}: image {number} is not in {CUB_IMAGES}. Get both again")
        found.setdefault(names[number], []).append(_box(path, *sides.split()))
    return found


def read_csv(path: Path) -> Boxes:
    """The boxes of a CSV file: image, x, y, width, height, and `category` if it is there."""
    rows = csv.DictReader(StringIO(_read_text(path, MOST_BYTES)))
    found: Boxes = {}
    try:
        if missing := [head for head in CSV_HEADS if head not in (rows.fieldnames or ())]:
            raise UserError(f"{path} has no column {missing[0]!r}: give {', '.join(CSV_HEADS)}")
        for row in rows:
            box = _box(path, *(row[head] for head in CSV_HEADS[1:]), row.get("category") or "")
            found.setdefault(_text(row["image"]), []).append(box)
    except csv.Error as error:
        raise UserError(f"{path} could not be read as CSV: {error}") from error
    return found


def cub_lines(path: Path, words: int) -> Iterator[tuple[str, str]]:
    """The first word of each line, and the rest."""
    for line in _read_text(path, MOST_BYTES).splitlines():
        parts = line.split(maxsplit=1 if words == 2 else -1)
        if parts and len(parts) != words:
            raise UserError(f"{path}: expected {words} words, got {line[:80]!r}. Get it again")
        if parts:
            yield parts[0], " ".join(parts[1:]).strip()


def _xml(path: Path) -> ElementTree.Element:
    text = _read_text(path, MOST_XML)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise UserError(f"{path} declares a DOCTYPE or entities, which is refused: remove them")
    try:
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise UserError(f"{path} could not be read as XML: {error}") from error


def _read_text(path: Path, most: int) -> str:
    """The text of a file in UTF-8, which alone shows all that is in it."""
    try:
        if path.stat().st_size > most:
            raise ValueError(f"it has {path.stat().st_size} bytes, the limit is {most}")
        return path.read_bytes().decode("utf-8-sig")
    except GoneError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{path} could not be read: {error}") from error


def _box(path: Path, *given: Any) -> Box:
    x, y, width, height = (_number(path, side) for side in given[:4])
    if width < 0 or height < 0:
        raise UserError(f"{path}: a box must have width and height, got {width:g} x {height:g}")
    return Box(x, y, width, height, str(given[4]) if len(given) > 4 else "")


def _number(path: Path, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if isinstance(value, bool) or not abs(found) <= FARTHEST:  # NaN neither
        raise UserError(f"{path}: a box must have numbers of pixels, got {value!r:.80}: correct it")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r:.80}")
    return value
