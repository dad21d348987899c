"""`Fitted`: another source's map, cut for each image at a size that the model agrees with.

A map has two parts: an order of the pixels, and a size at which it is cut. The sizes SIZES of the
order are put to the model, with several fills. A size suffices if the model gives the target with
every fill. Its score is kept - rest / 2 - size, where kept and rest are 0 or 1, averaged over the
fills, the size and its two neighbours. The region is the size with the highest score of those that
suffice, the smaller of two, or the whole image where none does.

Most sizes cannot win, and are not asked: what is not known yet bounds every score.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.data.batch import Batch
from sufficit.errors import UserError
from sufficit.metrics.column import Columns, Heading
from sufficit.perturbation.fills import check_fill_name
from sufficit.sources.asked import (
    ALL,
    NOTHING,
    REGION,
    REST,
    SIZES,
    THOUSANDTHS,
    Asked,
    Coming,
    Parts,
    in_step,
)
from sufficit.sources.kinds import Maps, Method, Role, Source, SourceBase, SourceFacts, drawn_by

# Regions that are enough with black and blur around them fail under noise, which they were not
# asked with; the other way round mean colour is implied (experiments/lax/LOG.md has the rows).
FIT_FILLS = ("black", "blur", "noise")
WHOLE = len(SIZES)  # in place of the number of a size: the whole image
UNDECIDED = -1  # in place of the number of a size: more must be asked
WIDE = 4  # sizes asked at a time; fewer save a tenth of the passes and take twice as many rounds
USUAL = 15  # forward passes per image and fill that a choice usually takes
_LOWEST = -(2**40)  # below any score
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
    fills: tuple[str, ...] = FIT_FILLS
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
        """Return the same around a source, under a name."""
        role: Role = "control" if source.role == "control" else self.role
        return replace(self, source=source, name=name, role=role)

    def maps(self, model: Classifier, batch: Batch) -> Maps:
        """Draw the source's maps, ask the model about their sizes, choose one for each image."""
        (found,) = in_step([self.fitting(model, batch)])
        return found

    def fitting(self, model: Classifier, batch: Batch) -> Generator[Coming, Asked, Maps]:
        """Fit the maps of a batch, for `in_step`: wait for no answer, yield what is to come."""
        inner = drawn_by(self.source, model, batch)
        # The order before ReLU and stretching, where the source has one.
        parts = Parts.of(model, batch, inner.maps, self.batch_size)
        asked, chosen = yield from self._choosing(parts)
        shares = torch.tensor([*SIZES, 1.0], dtype=torch.float64)[chosen]
        columns: Columns = {
            "fit_share": shares,
            "fit_enough": (chosen != WHOLE).double(),
            "calls@fit": asked.passes.double(),
        }
        columns = inner.columns | columns
        return replace(inner, columns=columns, shares=shares, asked=asked)

    def _choosing(self, parts: Parts) -> Generator[Coming, Asked, tuple[Asked, Tensor]]:
        """Ask about parts of all images, round by round, until the size of each is known: [N]."""
        targets = parts.batch.targets.cpu()
        asked = parts.unasked(self.fills)
        # A score of the user's is no class.
        by_class = (asked.named[:, :1, ALL] == targets[:, None]) & (parts.model.score is None)
        while True:
            enough, hopeless = self._judged(asked)
            enough = torch.where(by_class[..., None], asked.named == targets[:, None, None], enough)
            # Where no part can be enough, nothing more need be known.
            known = asked.known | (hopeless & ~by_class)[..., None]
            chosen, wanted = next_parts(enough, known)
            wanted[..., NOTHING] = ~by_class & ~known[..., NOTHING]
            wanted &= (chosen == UNDECIDED)[:, None, None]
            if not wanted.any():
                return asked, chosen
            asked = yield parts.ask(asked, wanted)

    def _judged(self, asked: Asked) -> tuple[Tensor, Tensor]:
        """Return whether each part keeps enough of the whole image's score: bool [N,F,P].

        What counts is the score above that of an empty image. Also return whether no part can keep
        enough, as the whole image scores no more than an empty one: bool [N,F].
        """
        values = asked.confidences.double()
        empty = values[..., NOTHING, None]
        whole = values[..., ALL, None]
        reached = (values >= empty + self.enough * (whole - empty)) & (whole > empty)
        return reached, asked.known[..., NOTHING] & ~(whole > empty)[..., 0]

    def methods(self) -> list[Method]:
        """Return the methods that the source reads."""
        methods: list[Method] = self.source.methods()
        return methods

    def check(self, model: Classifier, names: Sequence[str]) -> None:
        """Raise before a run for what the source cannot do."""
        self.source.check(model, names)

    def digest(self) -> str:
        """Return the source, the fills and what is enough."""
        return f"{self.source.digest()}, fitted with {self.fills} at {self.enough}"

    def facts(self) -> SourceFacts:
        """Return the facts of the source, with the passes of the fit."""
        inner: SourceFacts = self.source.facts()
        own = len(self.fills) * (2 * len(SIZES) + 1)  # at most
        passes = inner.passes + own if isinstance(inner.passes, int) else f"{inner.passes} + {own}"
        return replace(inner, passes=passes, fit_fills=self.fills)

    @property
    def usual_passes(self) -> int:
        """The forward passes that an image usually takes, with those of its certificate."""
        return USUAL * len(self.fills) + 6

    def close(self) -> None:
        """Close the source's files."""
        self.source.close()


def next_parts(enough: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return the size chosen for each image, or UNDECIDED, and the parts to ask for it next.

    By the answers so far: bool [N,F,P] twice -> [N], bool [N,F,P]. Answers that are not known
    count as the best in the highest score that a size can have, and as the worst in the least.
    """
    kept = enough[..., REGION]
    rest = enough[..., REST]
    kept_known = known[..., REGION]
    rest_known = known[..., REST]
    fails = (kept_known & ~kept).any(1)
    suffices = (kept_known & kept).all(1)
    most = scores(kept | ~kept_known, rest & rest_known).masked_fill(fails, _LOWEST)
    least = scores(kept & kept_known, rest | ~rest_known).masked_fill(~suffices, _LOWEST)

    best = most.argmax(1, keepdim=True)  # of equal ones the first, the smaller size
    numbers = torch.arange(len(SIZES), device="cpu")
    is_best = numbers == best
    # Of equal scores the smaller size wins.
    can_win = ~fails & (is_best | (most + (numbers < best).long() > least.gather(1, best)))
    decided = suffices.gather(1, best)[:, 0] & (can_win.sum(1) == 1)
    chosen = torch.where(decided, best[:, 0], UNDECIDED).masked_fill(fails.all(1), WHOLE)

    # Whether the most promising sizes suffice, fill after fill: most fail with one of them.
    front = most.argsort(dim=1, descending=True, stable=True)[:, :WIDE]
    promising = can_win & torch.zeros_like(can_win).scatter(1, front, True)
    unknown = ~kept_known
    next_fill = unknown & (unknown.cumsum(1) == 1)
    # Then what the score of the best still lacks.
    near = torch.cat([best - 1, best, best + 1], dim=1).clamp(0, len(SIZES) - 1)
    lacking = torch.zeros_like(can_win).scatter(1, near, True) & suffices.gather(1, best)
    wanted = torch.zeros_like(known)
    wanted[..., REGION] = (next_fill & promising[:, None]) | (unknown & lacking[:, None])
    wanted[..., REST] = ~rest_known & lacking[:, None]
    return chosen, wanted


def scores(kept: Tensor, rest: Tensor) -> Tensor:
    """Return kept - rest / 2 - size of each size, times 6 F x 1000: bool [N,F,B] twice -> [N,B].

    As integers, so that scores that tie are equal.
    """
    fills = kept.shape[1]
    agreed = 2 * _with_neighbours(kept.long().sum(1)) - _with_neighbours(rest.long().sum(1))
    return 1000 * agreed - 6 * fills * torch.tensor(THOUSANDTHS, device="cpu")


def _with_neighbours(counts: Tensor) -> Tensor:
    """Return the sum of each size and its two neighbours, the ends repeated: [N,B] -> [N,B]."""
    wide = torch.cat([counts[:, :1], counts, counts[:, -1:]], dim=1)
    return wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]
