"""Read a folder some pictures at a time: labels, bad files, sizes, the next group read ahead."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.data.finding import ImageSource
from sufficit.data.heatmap_files import HeatmapError
from sufficit.data.images import BadImageError, ImageFile, class_numbers
from sufficit.errors import UserError
from sufficit.progress import Progress

GROUP = 32  # images read, and scored, at a time
THREADS = min(8, os.cpu_count() or 1)  # that decode pictures, at most
PATIENCE = 1.0  # seconds in which images are counted before any is scored


@dataclass(frozen=True)
class Skipped:
    """An image that was not scored, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Entry:
    """Which of all pictures one is, the picture, and the number of its class where it is known."""

    number: int
    picture: ImageFile
    label: int | None = None


@dataclass(frozen=True)
class Group:
    """Pictures that are scored together, and which of all groups they are."""

    number: int
    entries: tuple[Entry, ...]

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def names(self) -> list[str]:
        """What its pictures are called."""
        return [entry.picture.name for entry in self.entries]


@dataclass(frozen=True)
class Item:
    """An entry, and what the model sees of its picture."""

    entry: Entry
    image: Tensor  # [C,H,W]

    @property
    def name(self) -> str:
        """What the picture is called."""
        return self.entry.picture.name


T = TypeVar("T", bound=Item)


@dataclass
class ImageLoader(Generic[T]):
    """Reads pictures of one size, some at once, and keeps note of those it could not read."""

    read: Callable[[Entry], T]  # called in several threads
    on_error: Literal["skip", "stop"] = "skip"
    one_size: bool = True  # in all groups, or in each
    skipped: list[Skipped] = field(default_factory=list)
    sizes: dict[tuple[int, ...], str] = field(default_factory=dict)  # an image of each size

    def items(self, entries: Iterable[Entry], threads: int | None = None) -> list[T]:
        """Those that can be read; raise where sizes differ."""
        with ThreadPoolExecutor(threads or THREADS) as pool:
            found = list(pool.map(self._tried, entries))
        self.skipped += [one for one in found if isinstance(one, Skipped)]
        items = [one for one in found if not isinstance(one, Skipped)]
        if not self.one_size:
            self.sizes.clear()
        for item in items:
            self.sizes.setdefault(tuple(item.image.shape), item.name)
        check_sizes(self.sizes)
        return items

    def ahead(self, groups: Iterable[Group]) -> Iterator[tuple[Group, list[T]]]:
        """Each group with its items, the next one read in the background while this one is used.

        Threads that read hold up the one that keeps a GPU busy. So all of them read the first
        group, for which everybody waits, then one does, and twice as many where that was too slow.
        """
        with ThreadPoolExecutor(1) as pool:
            before: tuple[Group, Future[list[T]]] | None = None
            threads = THREADS
            for number, group in enumerate(groups):
                read = None
                if before is not None:
                    late = not before[1].done()
                    read = before[0], before[1].result()
                    threads = 1 if number == 1 else min(THREADS, threads * (1 + late))
                before = group, pool.submit(self.items, group.entries, threads)
                if read is not None:
                    yield read
            if before is not None:
                yield before[0], before[1].result()

    def dropped(self, group: Group) -> dict[str, str]:
        """What of a group could not be read, and why; it is forgotten here."""
        asked = {*group.names}
        found = [one for one in self.skipped if one.name in asked]
        for one in found:
            self.skipped.remove(one)
        return {one.name: one.reason for one in found}

    def _tried(self, entry: Entry) -> T | Skipped:
        picture = entry.picture
        try:
            return self.read(entry)
        except (BadImageError, HeatmapError, OSError) as error:
            if self.on_error == "stop":
                raise UserError(
                    f"{picture.name}: {error}. Mend it, or go on without such images with"
                    " --on-error skip"
                ) from error
            return Skipped(picture.name, str(error))


def check_sizes(sizes: Mapping[tuple[int, ...], str]) -> None:
    """Raise where there are images of several sizes, of which one each is named."""
    if len(sizes) > 1:
        listed = ", ".join(f"{name} {list(size)}" for size, name in list(sizes.items())[:3])
        raise UserError(f"images differ in size ({listed}) and the model names none: give --size")


def check_any(scored: int, skipped: Sequence[Skipped]) -> None:
    """Raise where none of the images could be scored."""
    if not scored:
        first = skipped[0]
        raise UserError(
            f"all {len(skipped)} images were skipped; the first, {first.name}: {first.reason}"
        )


@dataclass(frozen=True)
class Labels:
    """Where targets come from, and the number of a picture's class."""

    kind: Literal["label", "prediction"]
    number: Callable[[ImageFile], int | None]
    known: tuple[int, ...] = ()  # the numbers of all classes, where they are known beforehand


PREDICTIONS = Labels("prediction", lambda _: None)


def labels_for(
    classifier: Classifier, stream: ImageSource, wanted: Literal["auto", "label", "prediction"]
) -> Labels:
    """Class numbers from folder names, unless the model's own predictions are wanted.

    A folder's classes are known before its pictures are. In shards only each picture tells its own:
    the first decides whether there are labels, and a later one that does not fit is refused.
    """
    if wanted == "prediction":
        return PREDICTIONS
    labels = _told_labels(classifier, stream) if stream.classes is None else None
    if stream.classes is not None and (classes := stream.classes()).folders:
        numbers = classes.numbers(classifier.classes, _num_classes(classifier, stream))
        labels = Labels("label", partial(_number, numbers), tuple(numbers.values()))
    if labels is None and wanted == "label":
        raise UserError("--targets label needs class folders: DATA/CLASS/image.png")
    return labels or Labels("prediction", _no_number)


def _number(numbers: Mapping[str, int], picture: ImageFile) -> int:
    if picture.folder is None or picture.folder not in numbers:
        raise UserError(f"{picture.name} has come since the run was begun: begin it anew")
    return numbers[picture.folder]


def _no_number(picture: ImageFile) -> None:
    """None; raise where a label comes after pictures without."""
    if picture.folder is not None:
        raise UserError(
            f"{picture.name} has a label ({picture.folder!r}), and images before it have none: give"
            " all of them one, or score the model's own predictions with --targets prediction"
        )


def _told_labels(classifier: Classifier, stream: ImageSource) -> Labels | None:
    """Class numbers from the words that pictures bring along; None where the first has none.

    Words that are numbered in order, for want of names and numbers, must all be known first.
    """
    first = next(iter(stream)).folder
    if first is None:
        return None
    words = {first}
    if classifier.classes is None and not first.isdecimal():
        words = {picture.folder for picture in stream if picture.folder is not None}
    count = _num_classes(classifier, stream)
    numbers = class_numbers(sorted(words), classifier.classes, count)

    def number(picture: ImageFile) -> int:
        word = picture.folder
        if word is None:
            raise UserError(
                f"{picture.name} has no label, and images before it have: give it one, or score"
                " the model's own predictions with --targets prediction"
            )
        if word not in numbers:
            more = class_numbers(sorted([*numbers, word]), classifier.classes, count)
            if any(more[known] != numbers[known] for known in numbers):
                raise UserError(
                    f"{picture.name} has the label {word!r}, and images before it have"
                    f" {first!r}: use the model's names of classes alone, or numbers alone"
                )
            numbers.update(more)
        return numbers[word]

    return Labels("label", number)


def _num_classes(classifier: Classifier, pictures: Iterable[ImageFile]) -> int:
    """How many classes the model has: from its names, or by asking it once."""
    if classifier.classes is not None:
        return len(classifier.classes)
    for picture in pictures:
        try:
            image = picture.read(classifier.view)
        except (BadImageError, OSError):
            continue
        with torch.no_grad():
            return classifier(image[None]).shape[1]
    raise UserError("none of the images can be read")


def grouped(stream: ImageSource, labels: Labels, size: int) -> Iterator[Group]:
    """Pictures with their labels, so many at a time, as they are found."""
    entries = (Entry(k, picture, labels.number(picture)) for k, picture in enumerate(stream))
    for number in count():
        some = tuple(islice(entries, size))
        if not some:
            return
        yield Group(number, some)


def named(stream: ImageSource, names: Iterable[str]) -> dict[str, Entry]:
    """The pictures of these names, as far as there are such; none behind the last is looked at."""
    wanted, found = {*names}, dict[str, Entry]()
    for number, picture in enumerate(stream):
        if picture.name in wanted:
            found[picture.name] = Entry(number, picture)
        if len(found) == len(wanted):
            break
    return found


def count_soon(stream: ImageSource, patience: float = PATIENCE) -> float:
    """How many pictures there are, if that is known within seconds; infinity if not."""
    begun, counted = time.monotonic(), 0
    for _ in stream:
        counted += 1
        if time.monotonic() - begun > patience:
            return math.inf
    return counted


def folder_targets(names: Sequence[str], targets: Tensor) -> dict[str, int]:
    """Which class number each class folder was taken for; a shard is no class folder."""
    pairs = zip(names, targets.tolist(), strict=True)
    return {name.split("/")[0]: k for name, k in pairs if ".tar/" not in name}


def within(tick: Progress, done: float, share: float, total: float) -> Progress:
    """The progress of one step, which is a share of the whole, as part of it."""
    return lambda part, whole: tick(done + share * part / whole, total)
