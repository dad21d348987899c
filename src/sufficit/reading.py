"""Read a folder some pictures at a time: labels, bad files, sizes, the next group read ahead."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from sufficit.classifiers import Classifier
from sufficit.data.heatmaps import HeatmapError
from sufficit.data.images import BadPictureError, Picture, labels_of
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
        check_sizes(self.sizes)
        return items

    def ahead(self, groups: Iterable[Sequence[Labelled]]) -> Iterator[list[T]]:
        """The items of each group, the next one read in the background while this one is used."""
        with ThreadPoolExecutor(1) as pool:
            waiting = None
            for group in groups:
                items = None if waiting is None else waiting.result()
                waiting = pool.submit(self.items, group)
                if items is not None:
                    yield items
            if waiting is not None:
                yield waiting.result()

    def dropped(self, group: Sequence[Labelled]) -> dict[str, str]:
        """What of a group could not be read, and why; it is forgotten here."""
        asked = {picture.name for picture, _ in group}
        found = [one for one in self.skipped if one.name in asked]
        for one in found:
            self.skipped.remove(one)
        return {one.name: one.reason for one in found}

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


@dataclass(frozen=True)
class Groups:
    """Pictures with their labels, some at a time."""

    pictures: Sequence[Picture]
    labels: Sequence[int] | None
    size: int

    def __len__(self) -> int:
        return (len(self.pictures) + self.size - 1) // self.size

    def __getitem__(self, number: int) -> list[Labelled]:
        some = slice(number * self.size, (number + 1) * self.size)
        pictures = self.pictures[some]
        labels = [None] * len(pictures) if self.labels is None else self.labels[some]
        return list(zip(pictures, labels, strict=True))


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
            image = picture.read(classifier.view)
        except (BadPictureError, OSError):
            continue
        with torch.no_grad():
            return classifier(image[None]).shape[1]
    raise UserError(f"none of the {len(pictures)} images can be read")


def folder_targets(names: Sequence[str], targets: Tensor) -> dict[str, int]:
    """Which class number each class folder was taken for; a shard is no class folder."""
    pairs = zip(names, targets.tolist(), strict=True)
    return {name.split("/")[0]: k for name, k in pairs if ".tar/" not in name}


def within(tick: Progress | None, done: float, share: float, total: float) -> Progress | bool:
    """The progress of one step, which is a share of the whole, as part of it."""
    if tick is None:
        return False
    return lambda part, whole: tick(done + share * part / whole, total)
