"""`Fitted`: another source's map, cut for each image at a size that the model agrees with.

A map has two parts: an order of the pixels, and a size at which it is cut. The sizes SIZES of the
order are put to the model, with several fills. A size suffices if the model gives the target with
every fill. Its score is kept - rest / 2 - size, where kept and rest are 0 or 1, averaged over the
fills, the size and its two neighbours. The region is the size with the highest score of those that
suffice, the smaller of two, or the whole image where none does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.data.batch import Batch
from sufficit.errors import UserError
from sufficit.metrics.column import Columns, Heading
from sufficit.perturbation.bands import EVERYTHING, Band, all_but_top, top
from sufficit.perturbation.fills import check_fill_name
from sufficit.perturbation.heatmaps import resize
from sufficit.perturbation.masked_model import MaskedModel, whole_images
from sufficit.perturbation.predictions import Predictions
from sufficit.sources.kinds import Maps, Method, Role, Source, SourceBase, SourceFacts, drawn_by

THOUSANDTHS = (
    *(20, 30, 40, 60, 80, 100, 125, 150, 180, 210, 250, 290, 330, 380, 430, 480, 540, 600, 660),
    *(720, 780, 840, 900, 950),
)
SIZES = tuple(size / 1000 for size in THOUSANDTHS)
# Regions that are enough with black and blur around them fail under noise, which they were not
# asked with; the other way round mean colour is implied (experiments/lax/LOG.md has the rows).
FILLS = ("black", "blur", "noise")
EMPTY = top(0.0)
KEPT, REST = ([make(size) for size in SIZES] for make in (top, all_but_top))
GROUP = "Cut where the model agrees"
HEADINGS: Mapping[str, Heading] = {
    "fit_share": Heading(
        "share", "Share of the image in the region", "Share of the pixels.", (0.0, 1.0), None, GROUP
    ),
    "fit_enough": Heading(
        *("enough", "Images with a region", "Whether a part of the image suffices."),
        *((0.0, 1.0), True, GROUP),
    ),
}


@dataclass(frozen=True, eq=False)
class Fitted(SourceBase):
    """Cut the maps of a source, image by image, where the model agrees.

    - `source`: a source, or what `compare` takes as one: a word, a function, an adapter, heatmaps.
    - `fills`: what surrounds the region while the model is asked.
    - `enough`: where the model does not give the target for the whole image, or a score of the
      user's takes the place of classes: the share of the whole image's score above that of an empty
      image that a region must keep.
    """

    is_trusted = True
    source: Any
    fills: tuple[str, ...] = FILLS
    enough: float = 0.9
    name: str = ""
    role: Role = "method"
    batch_size: int | None = None
    headings: Mapping[str, Heading] = field(default_factory=lambda: HEADINGS)

    def __post_init__(self) -> None:
        if not self.fills:
            raise UserError("a fit needs one fill or more, such as black and blur, got none")
        for fill in self.fills:
            check_fill_name(fill)
        if not 0 < self.enough <= 1:
            raise UserError(f"enough must be above 0 and at most 1, got {self.enough}: such as 0.9")

    def around(self, source: Source, name: str) -> "Fitted":
        """The same around a source, under a name."""
        role: Role = "control" if source.role == "control" else self.role
        return replace(self, source=source, name=name, role=role)

    def maps(self, model: Classifier, batch: Batch) -> Maps:
        """Draw the source's maps, ask the model about their sizes, choose one for each image."""
        inner = drawn_by(self.source, model, batch)
        # The order before ReLU and stretching, where the source has one.
        order = resize(inner.maps, batch.size)
        models = [MaskedModel(model, fill, self.batch_size) for fill in self.fills]
        answers = [asked.ask(batch, order, [EMPTY, *KEPT, *REST]) for asked in models]
        kept, rest = (self._enough(model, batch, answers, bands) for bands in (KEPT, REST))
        shares, suffices = choose(kept, rest)
        columns: Columns = {
            "fit_share": shares,
            "fit_enough": suffices.double(),
            "calls@fit": torch.stack([one.calls for one in answers]).sum(0).double(),
        }
        return replace(inner, columns=inner.columns | columns, shares=shares.float())

    def _enough(
        self, model: Classifier, batch: Batch, answers: Sequence[Predictions], bands: list[Band]
    ) -> Tensor:
        """Whether the model gives the target for each band with each fill: bool [fills,N,B].

        Where it does not give it for the whole image, whether enough of its score is kept.
        """
        whole = whole_images(model, batch)
        by_class = whole.of([EVERYTHING], "accuracy") == 1
        if model.score is not None:
            by_class = torch.zeros_like(by_class)
        full = whole.of([EVERYTHING], "confidence")
        found = []
        for one in answers:
            empty = one.of([EMPTY], "confidence")
            needed = empty + self.enough * (full - empty)
            # Where the whole image scores no more than an empty one, nothing is enough.
            reached = (one.of(bands, "confidence") >= needed) & (full > empty)
            found.append(torch.where(by_class, one.of(bands, "accuracy") == 1, reached))
        return torch.stack(found)

    def methods(self) -> list[Method]:
        """Those of the source."""
        found: list[Method] = self.source.methods()
        return found

    def check(self, model: Classifier, names: Sequence[str]) -> None:
        """Raise before a run for what the source cannot do."""
        self.source.check(model, names)

    def digest(self) -> str:
        """The source, the fills and what is enough."""
        return f"{self.source.digest()}, fitted with {self.fills} at {self.enough}"

    def facts(self) -> SourceFacts:
        """Those of the source, with the passes of the fit."""
        inner: SourceFacts = self.source.facts()
        own = len(self.fills) * (2 * len(SIZES) + 1)
        passes = inner.passes + own if isinstance(inner.passes, int) else f"{inner.passes} + {own}"
        return replace(inner, passes=passes)

    def close(self) -> None:
        """Close the source's files."""
        self.source.close()


def choose(kept: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of each image, and whether a part suffices: bool [fills,N,B] twice -> [N].

    Everything is compared as integers: scores that tie are equal.
    """
    fills = len(kept)
    scores = 2 * _with_neighbours(kept.long().sum(0)) - _with_neighbours(rest.long().sum(0))
    sizes = torch.tensor(THOUSANDTHS)
    # kept - rest / 2 - size, times 6 fills and 1000.
    scores = 1000 * scores - 6 * fills * sizes
    suffices = kept.all(0)
    best = scores.masked_fill(~suffices, torch.iinfo(torch.long).min).argmax(1)
    found = suffices.any(1)
    shares = torch.where(found, sizes.double()[best] / 1000, 1.0)
    return shares, found


def _with_neighbours(counts: Tensor) -> Tensor:
    """The sum of each size and its two neighbours, the ends repeated: [N,B] -> [N,B]."""
    wide = torch.cat([counts[:, :1], counts, counts[:, -1:]], dim=1)
    return wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]
