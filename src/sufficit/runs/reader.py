"""Read the images of a unit, with targets, truth, and what the model says of the whole images."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.classifier.classifier import Classifier
from sufficit.data.batch import Batch
from sufficit.data.loader import THREADS, Entry, ImageLoader, Item, OnError, Unit
from sufficit.data.truth import Truth, TruthError
from sufficit.errors import UserError
from sufficit.evaluation import batch_of
from sufficit.perturbation.masked_model import finite, whole_images
from sufficit.runs.unit_rows import SKIPPED, Notes
from sufficit.sources import NOT_FINITE

BAD_TRUTH = "bad truth"  # a note


@dataclass(frozen=True)
class Sample(Item):
    """An image as the model sees it, and where its object is."""

    truth: Tensor | None  # [H,W]
    problem: str  # why its truth cannot be used


@dataclass
class Reader:
    """Reads units of one run; the next one is decoded while the model is busy with this one."""

    classifier: Classifier
    truth: Truth | None = None
    on_error: OnError = "skip"
    one_size: bool = False  # over all units, not within each unit alone
    batch_size: int | None = None
    _loader: ImageLoader[Sample] = field(init=False)
    _pool: ThreadPoolExecutor = field(init=False)
    _ahead: dict[int, "Future[list[Sample]]"] = field(default_factory=dict)
    _threads: int = THREADS
    _first: bool = True

    def __post_init__(self) -> None:
        self._loader = ImageLoader(self._sample, self.on_error, one_size=self.one_size)
        self._pool = ThreadPoolExecutor(1)

    def read(self, unit: Unit, following: Unit | None = None) -> tuple[Batch | None, Notes]:
        """Return the images of a unit that can be scored, and what is to be said of the others."""
        before = self._ahead.pop(unit.number, None)
        items = self._items(unit) if before is None else self._waited(before)
        if following is not None:
            self._ahead = {following.number: self._pool.submit(self._items, following)}
        notes: Notes = {SKIPPED: self._loader.dropped(unit)}
        problems = {item.name: item.problem for item in items if item.problem}
        if problems:
            notes[BAD_TRUTH] = problems
        return self._batch(items, notes), notes

    def entries(self, entries: Sequence[Entry]) -> tuple[Batch | None, Notes]:
        """The same of any images."""
        return self.read(Unit(-1, tuple(entries)))

    def _items(self, unit: Unit) -> list[Sample]:
        return self._loader.items(unit.entries, self._threads)

    def _waited(self, reading: "Future[list[Sample]]") -> list[Sample]:
        """What was read ahead. Threads that decode slow down the one that feeds a GPU.

        So all of them read the first unit, for which everything waits, then one does, and twice as
        many whenever that was too slow.
        """
        late = not reading.done()
        items = reading.result()
        self._threads = 1 if self._first else min(THREADS, self._threads * (1 + late))
        self._first = False
        return items

    def _batch(self, items: Sequence[Sample], notes: Notes) -> Batch | None:
        """Images as a batch, without those for which the model gives NaN; None if none is left."""
        if not items:
            return None
        labels = [item.entry.label for item in items]
        targets = None if None in labels else torch.tensor(labels)
        truths = [item.truth for item in items if item.truth is not None]  # all of them, or none
        batch = batch_of(
            self.classifier,
            torch.stack([item.pixels for item in items]).to(self.classifier.device),
            targets,
            names=[item.name for item in items],
            numbers=[item.entry.number for item in items],
            truth=torch.stack(truths) if truths else None,
            batch_size=self.batch_size,
        )
        good = finite(whole_images(self.classifier, batch))
        broken = [name for name, one in zip(batch.names, good, strict=True) if not one]
        notes[SKIPPED] |= skipped_for_nan(broken, self.on_error)
        return batch.rows([row for row, one in enumerate(good) if one]) if any(good) else None

    def _sample(self, entry: Entry) -> Sample:
        """Decode an image and read its truth; runs in several threads."""
        view: View | None = self.classifier.view
        pixels = entry.image.read(view)
        if self.truth is None:
            return Sample(entry, pixels, None, "")
        try:
            truth = self.truth.read(entry, view)
            if truth.shape != pixels.shape[1:]:
                came = f"{list(truth.shape)}, not {list(pixels.shape[1:])} as the image"
                raise TruthError(f"its truth is {came}: give it in the image's size")
        except TruthError as error:
            return Sample(entry, pixels, torch.zeros_like(pixels[0]).byte(), str(error))
        return Sample(entry, pixels, truth, "")

    def __getstate__(self) -> dict[str, Any]:
        kept = ("classifier", "truth", "on_error", "one_size")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # new threads here


def skipped_for_nan(names: Sequence[str], on_error: OnError) -> dict[str, str]:
    """Images that the model gives NaN for, with the reason to skip them."""
    if names and on_error == "stop":
        remedy = 'Try another --precision, or set on_error = "skip".'
        raise UserError(f"{names[0]}: {NOT_FINITE}. {remedy}")
    return dict.fromkeys(names, NOT_FINITE)
