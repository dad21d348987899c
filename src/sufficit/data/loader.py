"""The one image loader: units of images with labels, decoded by threads ahead of the consumer."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.classifier.classifier import Classifier
from sufficit.data.heatmap_files import HeatmapError
from sufficit.data.images import BadImageError, ImageSource, SourceImage, class_numbers
from sufficit.errors import UserError

THREADS = min(8, os.cpu_count() or 1)  # that decode images, at most

OnError = Literal["skip", "stop"]


@dataclass(frozen=True)
class Skipped:
    """An image that was not scored, and why."""

    name: str
    reason: str


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
    """An entry, and its image as the model sees it."""

    entry: Entry
    pixels: Tensor  # [C,H,W]

    @property
    def name(self) -> str:
        """The image's name."""
        return self.entry.image.name


T = TypeVar("T", bound=Item)


def decode_entry(view: View | None, entry: Entry) -> Item:
    """Decode an entry's image; with the view bound by `partial`, the usual `read` of a loader."""
    return Item(entry, entry.image.read(view))


@dataclass
class ImageLoader(Generic[T]):
    """Reads images of one size in several threads, and records those it cannot read."""

    read: Callable[[Entry], T]  # called in several threads
    on_error: OnError = "skip"
    one_size: bool = True  # over all units; False: within each unit
    threads: int = 0  # at most; 0 for one per core, up to THREADS
    skipped: list[Skipped] = field(default_factory=list)
    sizes: dict[tuple[int, ...], str] = field(default_factory=dict)  # one image of each size

    def items(self, entries: Iterable[Entry], threads: int | None = None) -> list[T]:
        """The entries that can be read, in order; raise if their sizes differ."""
        with ThreadPoolExecutor(threads or self.threads or THREADS) as pool:
            found = list(pool.map(self._try, entries))
        self.skipped += [one for one in found if isinstance(one, Skipped)]
        items = [one for one in found if not isinstance(one, Skipped)]
        if not self.one_size:
            self.sizes.clear()
        for item in items:
            self.sizes.setdefault(tuple(item.pixels.shape), item.name)
        check_sizes(self.sizes)
        return items

    def ahead(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, list[T]]]:
        """Each unit with its items; the next one is read in the background meanwhile.

        Threads that decode slow down the one that feeds a GPU. So all of them read the first unit,
        for which everything waits, then one does, and twice as many whenever that was too slow.
        """
        most = self.threads or THREADS
        with ThreadPoolExecutor(1) as pool:
            before: tuple[Unit, Future[list[T]]] | None = None
            threads = most
            for number, unit in enumerate(units):
                read = None
                if before is not None:
                    late = not before[1].done()
                    read = before[0], before[1].result()
                    threads = 1 if number == 1 else min(most, threads * (1 + late))
                before = unit, pool.submit(self.items, unit.entries, threads)
                if read is not None:
                    yield read
            if before is not None:
                yield before[0], before[1].result()

    def dropped(self, unit: Unit) -> dict[str, str]:
        """The images of a unit that could not be read, with the reason; clears their record."""
        asked = {*unit.names}
        found = [one for one in self.skipped if one.name in asked]
        for one in found:
            self.skipped.remove(one)
        return {one.name: one.reason for one in found}

    def _try(self, entry: Entry) -> T | Skipped:
        name = entry.image.name
        try:
            return self.read(entry)
        except (BadImageError, HeatmapError, OSError) as error:
            if self.on_error == "stop":
                raise UserError(
                    f"Cannot read {name}: {error}. Fix it, or pass --on-error skip."
                ) from error
            return Skipped(name, str(error))


def check_sizes(sizes: Mapping[tuple[int, ...], str]) -> None:
    """Raise if there is more than one image size; `sizes` names one image of each."""
    if len(sizes) > 1:
        listed = ", ".join(f"{name} {list(size)}" for size, name in list(sizes.items())[:3])
        raise UserError(f"images differ in size ({listed}) and the model names none: give --size")


def check_any(scored: int, skipped: Sequence[Skipped]) -> None:
    """Raise if no image could be scored."""
    if not scored:
        first = skipped[0]
        raise UserError(
            f"all {len(skipped)} images were skipped; the first, {first.name}: {first.reason}"
        )


# Labels


@dataclass(frozen=True)
class Labels:
    """Where targets come from, and the class number of an image."""

    kind: Literal["label", "prediction"]
    number: Callable[[SourceImage], int | None]
    known: tuple[int, ...] = ()  # the numbers of all classes, if they are known in advance


PREDICTIONS = Labels("prediction", lambda _: None)


def labels_for(
    classifier: Classifier, source: ImageSource, wanted: Literal["auto", "label", "prediction"]
) -> Labels:
    """Class numbers from folder names, unless the model's own predictions are wanted.

    The classes of a folder are known in advance. In shards each image brings its own label: the
    first image decides whether there are labels, and a later one that does not fit is an error.
    """
    if wanted == "prediction":
        return PREDICTIONS
    labels = _labels_of_shards(classifier, source) if source.classes is None else None
    if source.classes is not None and (classes := source.classes()).folders:
        numbers = classes.numbers(classifier.classes, _num_classes(classifier, source))
        labels = Labels("label", partial(_number, numbers), tuple(numbers.values()))
    if labels is None and wanted == "label":
        raise UserError("--targets label needs class folders: DATA/CLASS/image.png")
    return labels or Labels("prediction", _no_number)


def _number(numbers: Mapping[str, int], image: SourceImage) -> int:
    if image.folder is None or image.folder not in numbers:
        raise UserError(
            f"{image.name} was added after this run started: start again with --overwrite or"
            " another --out"
        )
    return numbers[image.folder]


def _no_number(image: SourceImage) -> None:
    """None; raise if an image has a label and the ones before it have none."""
    if image.folder is not None:
        raise UserError(
            f"{image.name} has a label ({image.folder!r}), and images before it have none: label"
            " all of them, or score the model's own predictions with --targets prediction"
        )


def _labels_of_shards(classifier: Classifier, source: ImageSource) -> Labels | None:
    """Class numbers from the label of each image; None if the first image has none.

    Labels that can only be numbered in sorted order (no names, no numbers) are all read first.
    """
    first = next(iter(source)).folder
    if first is None:
        return None
    words = {first}
    if classifier.classes is None and not first.isdecimal():
        words = {image.folder for image in source if image.folder is not None}
    num_classes = _num_classes(classifier, source)
    numbers = class_numbers(sorted(words), classifier.classes, num_classes)

    def number(image: SourceImage) -> int:
        word = image.folder
        if word is None:
            raise UserError(
                f"{image.name} has no label, and images before it have one: label it, or score the"
                " model's own predictions with --targets prediction"
            )
        if word not in numbers:
            more = class_numbers(sorted([*numbers, word]), classifier.classes, num_classes)
            if any(more[known] != numbers[known] for known in numbers):
                raise UserError(
                    f"{image.name} has the label {word!r}, and images before it have {first!r}:"
                    " use only the model's class names, or only class numbers"
                )
            numbers.update(more)
        return numbers[word]

    return Labels("label", number)


def _num_classes(classifier: Classifier, images: Iterable[SourceImage]) -> int:
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


def folder_targets(names: Sequence[str], targets: Tensor) -> dict[str, int]:
    """The class number of each class folder; a shard is not a class folder."""
    pairs = zip(names, targets.tolist(), strict=True)
    return {name.split("/")[0]: k for name, k in pairs if ".tar/" not in name}


# Units of a source


def units_of(source: ImageSource, labels: Labels, size: int) -> Iterator[Unit]:
    """Units of up to `size` labelled images, as the images are found."""
    entries = (Entry(k, image, labels.number(image)) for k, image in enumerate(source))
    for number in count():
        some = tuple(islice(entries, size))
        if not some:
            return
        yield Unit(number, some)


def within(
    tick: Callable[[float, float], None], done: float, share: float, total: float
) -> Callable[[float, float], None]:
    """The progress function of one step that is a `share` of the `total`."""
    return lambda part, whole: tick(done + share * part / whole, total)
