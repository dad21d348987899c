"""Read a folder some pictures at a time: labels, bad files, sizes, the next group read ahead."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from sufficit.classifiers import Classifier
from sufficit.data.heatmaps import HeatmapError
from sufficit.data.images import BadPictureError, Picture, labels_of, read_picture
from sufficit.errors import UserError
from sufficit.types import Progress

GROUP = 32  # images read, and scored, at a time


@dataclass(frozen=True)
class Skipped:
    """An image that was not scored, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Item:
    """A picture, the number of its class where it is known, and what the model sees of it."""

    picture: Picture
    label: int | None
    image: Tensor  # [C,H,W]


T = TypeVar("T", bound=Item)
Labelled = tuple[Picture, int | None]


@dataclass
class Reader(Generic[T]):
    """Reads pictures of one size, and keeps note of those it could not read."""

    read: Callable[[Picture, int | None], T]
    on_error: Literal["skip", "stop"] = "skip"
    one_size: bool = True  # in all groups, or in each
    skipped: list[Skipped] = field(default_factory=list)
    sizes: dict[tuple[int, ...], str] = field(default_factory=dict)  # an image of each size

    def items(self, pictures: Iterable[Labelled]) -> list[T]:
        """Those that can be read; raise where sizes differ."""
        items = [item for picture, label in pictures if (item := self._item(picture, label))]
        if not self.one_size:
            self.sizes.clear()
        for item in items:
            self.sizes.setdefault(tuple(item.image.shape), item.picture.name)
        if len(self.sizes) > 1:
            listed = ", ".join(
                f"{name} {list(size)}" for size, name in list(self.sizes.items())[:3]
            )
            raise UserError(
                f"images differ in size ({listed}) and the model names none: give --size"
            )
        return items

    def ahead(self, groups: Sequence[Sequence[Labelled]]) -> Iterator[list[T]]:
        """The items of each group, the next one read in the background while this one is used."""
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self.items, groups[0]) if groups else None
            for following in [*groups[1:], None]:
                if waiting is None:
                    return
                items = waiting.result()
                waiting = None if following is None else pool.submit(self.items, following)
                yield items

    def check_any(self, read: int, asked: int) -> None:
        """Raise where none of the images asked for could be read."""
        if not read:
            first = self.skipped[0]
            raise UserError(
                f"all {asked} images were skipped; the first, {first.name}: {first.reason}"
            )

    def _item(self, picture: Picture, label: int | None) -> T | None:
        try:
            return self.read(picture, label)
        except (BadPictureError, HeatmapError, OSError) as error:
            if self.on_error == "stop":
                raise UserError(
                    f"{picture.name}: {error}. Mend it, or go on without such images with"
                    " --on-error skip"
                ) from error
            self.skipped.append(Skipped(picture.name, str(error)))
            return None


def in_groups(
    pictures: Sequence[Picture], labels: Sequence[int] | None, size: int
) -> list[list[Labelled]]:
    """Pictures with their labels, some at a time."""
    known: Sequence[int | None] = labels or [None] * len(pictures)
    pairs = list(zip(pictures, known, strict=True))
    return [pairs[i : i + size] for i in range(0, len(pairs), size)]


def labels_for(
    classifier: Classifier,
    pictures: Sequence[Picture],
    wanted: Literal["auto", "label", "prediction"],
) -> list[int] | None:
    """Class numbers from folder names, unless the model's own predictions are wanted."""
    if wanted == "prediction":
        return None
    labels = None
    if any(picture.folder for picture in pictures):
        labels = labels_of(pictures, classifier.classes, _num_classes(classifier, pictures))
    if labels is None and wanted == "label":
        raise UserError("--targets label needs class folders: DATA/CLASS/image.png")
    return labels


def _num_classes(classifier: Classifier, pictures: Sequence[Picture]) -> int:
    """How many classes the model has: from its names, or by asking it once."""
    if classifier.classes is not None:
        return len(classifier.classes)
    for picture in pictures:
        try:
            image = read_picture(picture.path, classifier.view)
        except (BadPictureError, OSError):
            continue
        with torch.no_grad():
            return classifier(image[None]).shape[1]
    raise UserError(f"none of the {len(pictures)} images can be read")


def folder_targets(names: Sequence[str], targets: Tensor) -> dict[str, int]:
    """Which class number each class folder was taken for."""
    return {name.split("/")[0]: k for name, k in zip(names, targets.tolist(), strict=True)}


def within(tick: Progress | None, done: float, share: float, total: float) -> Progress | bool:
    """The progress of one step, which is a share of the whole, as part of it."""
    if tick is None:
        return False
    return lambda part, whole: tick(done + share * part / whole, total)
