"""Batches of images to train on, in an order that the seed alone decides."""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from sufficit.classifier.checkpoint import View
from sufficit.data.loader import Entry, ImageLoader, Item, OnError, Unit, decode_entry
from sufficit.data.splits import Part
from sufficit.errors import UserError


class TrainingImages:
    """Batches of (images [B,C,H,W], labels [B]), or of images alone if there are no labels.

    Each iteration is an epoch, shuffled by torch's global generator or ordered by the sampler. A
    batch without any readable image is left out; across processes, which must take equally many
    steps, a neighbouring batch replaces it.
    """

    def __init__(
        self,
        part: Part,
        view: View | None,
        batch_size: int,
        *,
        sampler: Sampler[int] | Literal["shuffled", "in order"] = "shuffled",
        workers: int = 0,
        on_error: OnError = "skip",
    ) -> None:
        self.part, self.batch_size = part, batch_size
        if isinstance(sampler, str):
            rows = range(len(part))
            sampler = RandomSampler(rows) if sampler == "shuffled" else SequentialSampler(rows)
        self.sampler: Sampler[int] = sampler
        self.loader = ImageLoader(partial(decode_entry, view), on_error, threads=workers)
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
        labels, rows = self.part.labels, iter(self.sampler)
        for number in range(len(self)):
            some = islice(rows, self.batch_size)
            entries = (Entry(k, self.part.images[k], labels[k] if labels else None) for k in some)
            yield Unit(number, tuple(entries))

    def _batch(self, unit: Unit, items: Sequence[Item]) -> Any:
        """The batch of a unit; None if none of its images can be read."""
        self.skipped |= self.loader.dropped(unit)
        if not items:
            return None
        images = torch.stack([item.pixels for item in items])
        if self.part.labels is None:
            return images
        return images, torch.tensor([item.entry.label for item in items])


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
