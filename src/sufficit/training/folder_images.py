"""The images of a folder to train on, in batches; those held out; and what can't be read."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, RandomSampler, Sampler

from sufficit.classifier.checkpoint import View
from sufficit.classifier.classifier import Classifier
from sufficit.data.image_files import in_0_1
from sufficit.data.loader import Entry, ImageLoader, Item, OnError, Unit, decode_entry
from sufficit.data.splits import Folder, Part, read_folder
from sufficit.declared import ReadingOptions
from sufficit.errors import UserError
from sufficit.files import read_json
from sufficit.training.processes import launch

if TYPE_CHECKING:
    from lightning.fabric import Fabric


REMEMBERED = 2**31  # bytes of decoded images that a training keeps, at most


class TrainingImages:
    """Batches of (images [B,C,H,W], labels [B]), or of images alone if there are no labels.

    Each iteration is an epoch, shuffled by torch's global generator or ordered by the sampler. A
    batch without any readable image is left out; across processes, which must take equally many
    steps, a neighbouring batch replaces it.
    """

    # They are settings that one place passes on, from `ReadingOptions` and the processes.
    def __init__(
        self,
        part: Part,
        view: View | None,
        batch_size: int,
        *,
        sampler: Sampler[int] | None = None,
        workers: int = 0,
        on_error: OnError = "skip",
        device: torch.device | str = "cpu",
    ) -> None:
        self.part, self.batch_size, self.device = part, batch_size, device
        self.sampler: Sampler[int] = sampler or RandomSampler(range(len(part)))
        self.loader = ImageLoader(Remembering(view), on_error, threads=workers)
        self.skipped: dict[str, str] = {}  # name -> why it could not be read
        self.passes = 0  # complete epochs

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)  # type: ignore[arg-type]  # all three have one

    def __iter__(self) -> Iterator[Any]:
        # A torch DataLoader draws one number before the sampler draws the order. The same draw
        # here keeps the order of a seed, and so every trained adapter, as it was with one.
        torch.empty((), dtype=torch.int64).random_()
        found = (self._batch(unit, items) for unit, items in self.loader.ahead(self._units()))
        even = isinstance(self.sampler, DistributedSampler)
        yield from replace_missing(found) if even else (b for b in found if b is not None)
        self.passes += 1

    def _units(self) -> Iterator[Unit]:
        rows = iter(self.sampler)
        for number in range(len(self)):
            yield Unit(number, tuple(self.part[k] for k in islice(rows, self.batch_size)))

    def _batch(self, unit: Unit, items: Sequence[Item]) -> Any:
        """The batch of a unit; None if none of its images can be read."""
        self.skipped |= self.loader.dropped(unit)
        if not items:
            return None
        images, labels = stacked(items, self.device)
        return images if labels is None else (images, labels)


def stacked(
    items: Sequence[Item], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor | None]:
    """Images in 0..1 [N,C,H,W] on a device and, where labels are the targets, labels [N].

    Bytes travel as bytes: floats would take a GPU's bus four times as long.
    """
    pixels, labels = [i.pixels for i in items], [i.entry.label for i in items]
    if all(one.dtype == torch.uint8 for one in pixels):
        images = in_0_1(torch.stack(pixels).to(device, non_blocking=True))
    else:
        images = torch.stack([in_0_1(p) if p.dtype == torch.uint8 else p for p in pixels])
        images = images.to(device, non_blocking=True)
    return images, None if labels[0] is None else torch.tensor(labels)


def replace_missing(batches: Iterable[Any]) -> Iterator[Any]:
    """As many batches as there are, with a neighbour in place of each that is None.

    >>> list(replace_missing([None, "a", None, "b"]))
    ['a', 'a', 'a', 'b']
    """
    last, waiting = None, 0
    for batch in batches:
        last = last if batch is None else batch
        waiting += 1
        if last is not None:
            yield from [last] * waiting
            waiting = 0
    if waiting:
        raise UserError(f"none of the images in {waiting} batches can be read: check the files")


@dataclass
class Remembering:
    """Decodes an entry's image once and keeps it as bytes, where that loses nothing and fits.

    The image comes as bytes then, which `stacked` brings to 0..1. Of a few thousand photographs,
    which every epoch shows again, decoding takes longer than the training.
    """

    view: View | None
    left: int = REMEMBERED  # bytes that may still be kept
    known: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, entry: Entry) -> Item:
        """The entry with its image."""
        kept = self.known.get(entry.number)
        if kept is not None:
            return Item(entry, kept)
        item = decode_entry(self.view, entry)
        small = (item.pixels * 255).round().to(torch.uint8)
        if small.numel() <= self.left and torch.equal(in_0_1(small), item.pixels):
            self.left -= small.numel()
            self.known[entry.number] = small
            return Item(entry, small)
        return item


@dataclass(frozen=True)
class FolderImages:
    """What a training on a folder reads."""

    folder: Folder
    names: tuple[str, ...]  # of the images held out for validation that can be read
    held_out: Tensor  # [N,C,H,W]
    labels: Tensor | None  # [N], where labels are the targets
    unreadable: dict[str, str]  # those held out that can't be read: name -> why
    images: TrainingImages  # this process's share
    about: dict[str, Any]  # what must be the same to resume

    def record(self, out: Path, fabric: "Fabric") -> dict[str, Any]:
        """What run.json holds of the images, after training; every process calls this."""
        skipped = self.unreadable | self._skipped(out, fabric)
        names = [entry.image.name for entry in self.folder.training]
        return {
            "n_trained_on": sum(name not in skipped for name in names),
            "n_validated_on": len(self.names),
            "n_skipped": len(skipped),
            "validation_images": list(self.names),
            "skipped": skipped,
        }

    def _skipped(self, out: Path, fabric: "Fabric") -> dict[str, str]:
        """Unreadable images of all processes; of a run finished before, those in run.json."""
        if not self.images.passes:
            earlier = None
            if fabric.is_global_zero:
                with suppress(UserError, KeyError, TypeError, ValueError):
                    earlier = dict(read_json(out / "run.json")["skipped"])
            earlier = fabric.broadcast(earlier)
            if earlier is not None:
                return dict(earlier)
            for _ in self.images:
                pass
        found: dict[str, str] = {}
        for rank in range(fabric.world_size):
            found |= fabric.broadcast(self.images.skipped, src=rank)
        return found


def open_folder(
    classifier: Classifier,
    data: str | Path,
    target: Literal["auto", "label", "prediction"],
    options: ReadingOptions,
    fabric: "Fabric",
) -> FolderImages:
    """Find and split the images below a folder, start the processes, read what is held out."""
    view = classifier.view
    folder = read_folder(
        classifier,
        data,
        target,
        options.validation_share,
        options.seed,
        image_column=options.image_column,
        label_column=options.label_column,
    )
    launch(fabric)
    classifier.to(fabric.device)
    loader = ImageLoader(partial(decode_entry, view), options.on_error)
    held, unreadable = loader.items(folder.validation), loader.skipped
    if len(held) < 2:
        name, why = next(iter(unreadable.items()))
        raise UserError(
            f"Only {len(held)} of {len(folder.validation)} validation images can be read, 2 or"
            f" more are needed; of the others the first, {name}: {why}. Check the files."
        )
    sampler: Any = None
    if fabric.world_size > 1:  # this process's share
        numbers: Any = range(len(folder.training))
        ranks = (fabric.world_size, fabric.global_rank)
        sampler = DistributedSampler(numbers, *ranks, seed=options.seed)
    images = TrainingImages(
        folder.training,
        view,
        options.batch_size,
        sampler=sampler,
        workers=options.workers,
        on_error=options.on_error,
        device=classifier.device,
    )
    return FolderImages(
        folder,
        tuple(item.name for item in held),
        *stacked(held),
        unreadable,
        images,
        {
            "images": len(folder.training),
            "pictures": folder.digest(),
            "batch_size": options.batch_size,
            "precision": str(fabric.strategy.precision.precision),
        },
    )
