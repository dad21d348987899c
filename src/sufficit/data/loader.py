"""The one image loader: units of images with labels, decoded by threads ahead of the consumer."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.classifier.classifier import Classifier
from sufficit.data.heatmap_files import HeatmapError
from sufficit.data.image_files import BadImageError, ImageFile, ahead, while_there
from sufficit.data.images import ImageSource, SourceImage, class_forms, class_named
from sufficit.data.parquet import ParquetImage
from sufficit.errors import UserError, setting
from sufficit.files import is_remote

THREADS = min(8, os.cpu_count() or 1)  # that decode images, at most
GAP = 2**16  # bytes between two images of a shard that a request may read in vain
MOST_RUN = 2**24  # bytes of a request for several images

OnError = Literal["skip", "stop"]


@dataclass(frozen=True)
class Entry:
    """An image, its number in the source, and its class number if it is known."""

    number: int
    image: SourceImage
    label: int | None = None


@dataclass(frozen=True)
class Unit:
    """A numbered batch of images: the unit of work of a run."""

    number: int
    entries: tuple[Entry, ...]

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def names(self) -> list[str]:
        """The names of its images."""
        return [entry.image.name for entry in self.entries]


@dataclass(frozen=True)
class Item:
    """An entry, its image as the model sees it, and where its object is, if that is read too."""

    entry: Entry
    pixels: Tensor  # [C,H,W]
    truth: Tensor | None = None  # [H,W]
    problem: str = ""  # why its truth cannot be used

    @property
    def name(self) -> str:
        """The image's name."""
        return self.entry.image.name


def decode_entry(view: View | None, entry: Entry) -> Item:
    """Decode an entry's image; with the view bound by `partial`, the usual `read` of a loader."""
    return Item(entry, entry.image.read(view))


@dataclass
class ImageLoader:
    """Reads images of one size in several threads, and records those it cannot read."""

    read: Callable[[Entry], Item]  # called in several threads
    on_error: OnError = "skip"
    one_size: bool = True  # over all units; False: within each unit
    threads: int = 0  # at most; 0 for one per core, up to THREADS
    skipped: dict[str, str] = field(default_factory=dict)  # name -> why it could not be read
    sizes: dict[tuple[int, ...], str] = field(default_factory=dict)  # one image of each size
    _reading: dict[int, Future[list[Item]]] = field(default_factory=dict)  # by the unit's number
    _in_background: int = 1  # threads

    def items(self, entries: Iterable[Entry], threads: int | None = None) -> list[Item]:
        """The entries that can be read, in order; raise if their sizes differ."""
        known = downloaded(list(entries))
        with ThreadPoolExecutor(threads or self.threads or THREADS) as pool:
            found = list(zip(known, pool.map(self._try, known), strict=True))
        self.skipped |= {entry.image.name: one for entry, one in found if isinstance(one, str)}
        items = [one for _, one in found if not isinstance(one, str)]
        # Of this unit alone, two of which may be read at a time, or of all units.
        sizes = self.sizes if self.one_size else {}
        for item in items:
            sizes.setdefault(tuple(item.pixels.shape), item.name)
        check_sizes(sizes)
        return items

    def read_unit(self, unit: Unit, following: Unit | None = None) -> list[Item]:
        """The items of a unit; the following one is read in the background meanwhile.

        Threads that decode slow down the one that feeds a GPU. So all of them read the first unit,
        for which everything waits, then one does, and twice as many whenever that was too slow.
        """
        reading = self._reading.pop(unit.number, None)
        items = self.items(unit.entries) if reading is None else []
        if reading is not None and not reading.done():
            self._in_background = min(self.threads or THREADS, 2 * self._in_background)
        if following is not None:
            pool = ThreadPoolExecutor(1)
            found = pool.submit(self.items, following.entries, self._in_background)
            self._reading = {following.number: found}
            pool.shutdown(wait=False)  # its thread ends with the unit
        return items if reading is None else reading.result()

    def ahead(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, list[Item]]]:
        """Each unit with its items; the next one is read in the background meanwhile."""
        self._reading = {}  # of an iteration that was not finished
        for unit, following in pairwise(chain(units, [None])):
            assert unit is not None  # None is the last
            yield unit, self.read_unit(unit, following)

    def dropped(self, unit: Unit) -> dict[str, str]:
        """The images of a unit that could not be read, with the reason; clears their record."""
        return {name: self.skipped.pop(name) for name in unit.names if name in self.skipped}

    def _try(self, entry: Entry) -> Item | str:
        try:
            return self.read(entry)
        except (BadImageError, HeatmapError, OSError) as error:
            if self.on_error == "stop":
                name = entry.image.name
                reason = f"Cannot read {name}: {error}. Fix it, or {setting('on_error', 'skip')}"
                raise UserError(reason) from error
            return str(error)


def check_sizes(sizes: Mapping[tuple[int, ...], str]) -> None:
    """Raise if there is more than one image size; `sizes` names one image of each."""
    if len(sizes) > 1:
        listed = ", ".join(f"{name} {list(size)}" for size, name in list(sizes.items())[:3])
        raise UserError(f"images differ in size ({listed}) and the model names none: give --size")


def check_any(scored: int, n_skipped: int, skipped: Mapping[str, str]) -> None:
    """Raise if no image could be scored; `skipped` may be the first ones only."""
    if not scored:
        first = ": ".join(next(iter(skipped.items())))
        remedy = "check the files, the model's weights and --precision"
        raise UserError(f"all {n_skipped} images were skipped; the first, {first}: {remedy}")


def labels_for(
    classifier: Classifier, source: ImageSource, wanted: Literal["auto", "label", "prediction"]
) -> list[int] | None:
    """The class number of each image, from its folder or label; None to take predictions."""
    images = list(source)
    words = sorted({image.folder for image in images if image.folder is not None})
    loose = [image.name for image in images if image.folder is None and not image.problem]
    numbers = numbers_for(classifier, words, (len(loose), *loose[:1]), source, wanted)
    # A file of a shard that is never read may have no label: any number will do.
    return None if numbers is None else [numbers[one.folder or words[0]] for one in images]


def numbers_for(
    classifier: Classifier,
    words: Sequence[str],
    loose: tuple[Any, ...],
    source: ImageSource,
    wanted: Literal["auto", "label", "prediction"],
) -> dict[str, int] | None:
    """The class number of each class word; None where the model's predictions are the targets.

    `loose` counts the images that have none, and names the first.
    """
    if wanted == "label" and not words:
        raise UserError("--targets label needs class folders: DATA/CLASS/image.png")
    if wanted == "prediction" or not words:
        return None
    if loose[0]:
        raise UserError(
            f"{loose[0]} images (first {loose[1]}) are not in a class folder ({words[0]}, ...) and"
            " have no label: move or label them, or score the model's own predictions with"
            " --targets prediction"
        )
    named = classifier.classes or source.classes  # a model without names: as the data set has them
    return class_numbers(words, named, num_classes(classifier, source))


def class_numbers(
    folders: Sequence[str], classes: Sequence[str] | None, num_classes: int
) -> dict[str, int]:
    """Match class folders to the model's class names, to numbers, or in order if as many."""
    forms = class_forms(classes or ())
    numbers = {folder: class_named(folder, forms) for folder in folders}
    found = {folder: number for folder, number in numbers.items() if number is not None}
    if len(found) == len(folders) and len(classes or ()) <= num_classes:
        return found
    digits = [re.fullmatch("[0-9]{1,18}", folder) is not None for folder in folders]
    if all(digits) and all(int(folder) < num_classes for folder in folders):
        return {folder: int(folder) for folder in folders}
    # In order, where it is the order of names, not that of numbers such as 1..10 or -1..1.
    signed = any(re.fullmatch("-[0-9]+", folder) for folder in folders)
    if not forms and len(folders) == num_classes and not all(digits) and not signed:
        return {folder: number for number, folder in enumerate(folders)}
    strange = next((folder for folder in folders if folder not in found), folders[0])
    which = f"{len(folders)} class folders (first {strange!r}) do"
    if len(folders) == 1:
        which = f"the class folder {strange!r} does"
    known = classes and len(classes) <= num_classes
    named = f" ({', '.join(list(classes)[:4])}, ...)" if classes and known else ""
    raise UserError(
        f"{which} not fit the model's {num_classes} classes{named}: name the folders as the model"
        " names its classes, or by class number, or score the model's own predictions with"
        " --targets prediction"
    )


def num_classes(classifier: Classifier, images: Iterable[SourceImage]) -> int:
    """The number of classes: from the model's class names, or from one forward pass."""
    if classifier.classes is not None:
        return len(classifier.classes)
    for image in images:
        try:
            pixels = image.read(classifier.view)
        except (BadImageError, OSError):
            continue
        with torch.no_grad():
            return classifier(pixels[None]).shape[1]
    raise UserError("none of the images can be read: check the files")


# Images on object storage, downloaded a unit at a time with few requests


@dataclass(frozen=True, slots=True)
class Download(ImageFile):
    """An image whose bytes are in memory, or with the problem that kept them away."""

    held: bytes = b""
    inside = True

    def content(self) -> bytes:
        """The bytes of its file."""
        if self.problem:
            raise BadImageError(self.problem)
        return self.held


def downloaded(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, with the bytes of images on object storage in memory."""
    remote = [
        image
        for image in (entry.image for entry in entries)
        if isinstance(image, ImageFile) and not isinstance(image, ParquetImage | Download)
        if is_remote(image.file) and not image.fault
    ]
    # Each thread that makes a path of hf:// connects and lists again, so that it is made here.
    groups = [(run[0].path, run) for run in runs(remote)]
    known: dict[SourceImage, Download] = {}
    for (_, run), found in zip(groups, ahead(_fetch, groups), strict=True):
        known |= zip(run, found, strict=True)
    return [replace(e, image=known[e.image]) if e.image in known else e for e in entries]


def runs(images: Sequence[ImageFile]) -> list[list[ImageFile]]:
    """The images in groups of one request each: a file, or neighbours in a shard."""
    found: list[list[ImageFile]] = []
    for image in sorted(images, key=lambda image: (image.file, image.start)):
        run = found[-1] if found else [image]
        gap = image.start - (run[-1].start + run[-1].size)
        whole = image.start + image.size - run[0].start
        joins = image.inside and image.file == run[0].file and gap <= GAP and whole <= MOST_RUN
        if found and joins:
            run.append(image)
        else:
            found.append([image])
    return found


def _fetch(asked: tuple[Path, Sequence[ImageFile]]) -> list[Download]:
    """The images of one request."""
    path, run = asked
    assert is_remote(path)  # the caller asked
    first = run[0]
    last = run[-1]
    problem = ""
    contents = [b""] * len(run)  # of images whose request fails
    try:
        with while_there(first.root):
            if first.inside:
                whole = path.read_range(first.start, last.start + last.size, first.version)
                places = [one.start - first.start for one in run]
                contents = [whole[at : at + one.size] for at, one in zip(places, run, strict=True)]
            else:
                contents = [path.read_object(first.version)]
    except OSError as error:
        problem = f"can't be opened ({error.strerror})"
    return [
        Download(one.file, one.name, one.folder, problem, one.size, one.version, held=held)
        for one, held in zip(run, contents, strict=True)
    ]
