"""The rows of one unit, which a run stores: what probes and sources found of its images."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sufficit.data.batch import Batch
from sufficit.metrics.column import Columns
from sufficit.probes.band import ANSWERS
from sufficit.probes.probe import SourceRows
from sufficit.sources import Maps

RIGHT = "clean_accuracy"  # a column: is the model right on the whole image?
EMPTY = "empty@"  # a column: is the heatmap zero everywhere?
Notes = dict[str, dict[str, str]]  # kind -> image -> the note
SKIPPED = "skipped"  # a kind of note: by `reader` and `drawing`; `table` writes skipped.csv


@dataclass
class Rows:
    """A row per image and source; NaN where a probe did not look."""

    unit: int = -1  # its number; -1 for images of several units
    names: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    targets: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    shape: tuple[int, ...] = ()  # of the images: C, H, W
    notes: Notes = field(default_factory=dict)
    remark: str = ""  # what is wrong with what the model gives
    values: dict[str, Columns] = field(default_factory=dict)  # source -> column -> [n]
    curves: dict[str, Columns] = field(default_factory=dict)  # source -> curve -> sum, count [2,P]
    answers: dict[str, Columns] = field(default_factory=dict)  # source -> part -> [n,...]
    maps: dict[str, Maps] = field(default_factory=dict)  # as they were drawn

    @classmethod
    def of(cls, unit: int, batch: Batch, notes: Notes) -> "Rows":
        """Return the rows of a batch before any probe has looked."""
        return cls(
            unit=unit,
            names=batch.names,
            numbers=batch.numbers,
            targets=batch.targets.cpu(),
            shape=tuple(batch.images.shape[1:]) if len(batch) else (),
            notes=notes,
        )

    def __len__(self) -> int:
        return len(self.names)

    def add(self, found: SourceRows, places: Sequence[int]) -> None:
        """Add what a probe found of the images in some rows."""
        rows = torch.tensor(list(places), dtype=torch.long)
        is_whole = len(places) == len(self)  # places rise
        for source, columns in found.items():
            for name, values in columns.items():
                if name.startswith(ANSWERS):
                    part = name.removeprefix(ANSWERS)
                    self.answers.setdefault(source, {})[part] = values.cpu()
                elif values.ndim == 2:  # a curve: its mean over images is wanted
                    drawn = values.double().cpu()
                    # Sums can be added over units; a value that was not asked is NaN.
                    total = drawn.nansum(0)
                    count = (~drawn.isnan()).sum(0).double()
                    self.curves.setdefault(source, {})[name] = torch.stack([total, count])
                else:
                    column = values.double().cpu()
                    if not is_whole:
                        blank = torch.full((len(self),), torch.nan, dtype=torch.float64)
                        column = blank.index_copy(0, rows, column)
                    self.values.setdefault(source, {})[name] = column
