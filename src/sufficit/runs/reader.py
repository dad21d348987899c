"""Read the images of a unit, with targets, truth, and what the model says of the whole images.

Images that cannot be read, or that the model gives NaN for, are left out and noted as skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sufficit.classifier.checkpoint import View
from sufficit.classifier.classifier import Classifier
from sufficit.data.batch import Batch
from sufficit.data.loader import Entry, ImageLoader, Item, OnError, Unit
from sufficit.data.truth import Truth, TruthError
from sufficit.errors import UserError
from sufficit.evaluation import batch_of
from sufficit.perturbation.masked_model import finite, whole_images
from sufficit.runs.unit_rows import SKIPPED, Notes
from sufficit.sources import NOT_FINITE

BAD_TRUTH = "bad truth"  # a note


@dataclass
class Reader:
    """Reads the units of a run; the next one is decoded while the model works on this one."""

    classifier: Classifier
    truth: Truth | None = None
    on_error: OnError = "skip"
    one_size: bool = False  # over all units, not within each unit alone
    batch_size: int | None = None
    # Images that are needed more than once, by number; None until they are read.
    kept: dict[int, Item | None] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._loader = ImageLoader(self._item, self.on_error, one_size=self.one_size)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"kept": {}}  # a worker reads its own units only

    def read(self, unit: Unit, following: Unit | None = None) -> tuple[Batch | None, Notes]:
        """Return the images of a unit that can be scored, and the notes on the others."""
        items = self._loader.read_unit(unit, following)
        notes: Notes = {SKIPPED: self._loader.dropped(unit)}
        problems = {item.name: item.problem for item in items if item.problem}
        if problems:
            notes[BAD_TRUTH] = problems
        return self._batch(items, notes), notes

    def entries(self, entries: Sequence[Entry]) -> tuple[Batch | None, Notes]:
        """Return any images that can be scored, and the notes on the others."""
        return self.read(Unit(-1, tuple(entries)))

    def _batch(self, items: Sequence[Item], notes: Notes) -> Batch | None:
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
        is_finite = finite(whole_images(self.classifier, batch))
        good = [row for row, one in enumerate(is_finite) if one]
        broken = [name for name, one in zip(batch.names, is_finite, strict=True) if not one]
        notes[SKIPPED] |= skipped_for_nan(broken, self.on_error)
        return batch.rows(good) if good else None

    def _item(self, entry: Entry) -> Item:
        """Read an image, or remember it; runs in several threads."""
        kept = self.kept.get(entry.number)
        if kept is not None:
            return kept
        item = self._decoded(entry)
        if entry.number in self.kept:
            self.kept[entry.number] = item
        return item

    def _decoded(self, entry: Entry) -> Item:
        """Decode an image and read its truth."""
        view: View | None = self.classifier.view
        pixels = entry.image.read(view)
        if self.truth is None:
            return Item(entry, pixels)
        try:
            truth = self.truth.read(entry, view)
            if truth.shape != pixels.shape[1:]:
                came = f"{list(truth.shape)}, not {list(pixels.shape[1:])} as the image"
                raise TruthError(f"its truth is {came}: give it in the image's size")
        except TruthError as error:
            nothing = torch.zeros_like(pixels[0]).byte()  # the rows of a batch are stacked
            return Item(entry, pixels, nothing, problem=str(error))
        return Item(entry, pixels, truth)


def skipped_for_nan(names: Sequence[str], on_error: OnError) -> dict[str, str]:
    """Images that the model gives NaN for, with the reason to skip them."""
    if names and on_error == "stop":
        remedy = 'Try another --precision, or set on_error = "skip".'
        raise UserError(f"{names[0]}: {NOT_FINITE}. {remedy}")
    return dict.fromkeys(names, NOT_FINITE)
