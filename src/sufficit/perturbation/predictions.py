"""What a model predicts for images seen through bands of their heatmaps.

Letters of shapes, here and everywhere: N images, C classes, K channels, B bands, P points of a
curve, A values of alpha_min, H W image, h w features.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sufficit.perturbation.bands import Band

PIECE = 1024  # images whose predictions are worked on at a time
NO_CLASS, ANOTHER = -1, -2  # the model returned NaN; some class that is not the target
ROWS = ("named", "confidences", "shares", "targets", "calls")  # tensors with a row per image
ScoreKind = Literal["accuracy", "confidence"]


@dataclass(frozen=True)
class Predictions:
    """The prediction for each image and band; NaN where the model returned NaN."""

    bands: tuple[Band, ...]
    named: Tensor  # [N,B] int32, the predicted class, or NO_CLASS, or ANOTHER
    confidences: Tensor  # [N,B] softmax of the target class
    weighed: tuple[Band, ...]
    shares: Tensor  # [N,len(weighed)] share of the pixels inside the band
    targets: Tensor  # [N]
    calls: Tensor  # [N] model calls spent on each image

    def of(self, bands: Sequence[Band], kind: ScoreKind) -> Tensor:
        """Return the score of each image in some of the bands, in their order: [N,len(bands)]."""
        if kind == "accuracy":
            return hits(self.classes_of(bands), self.targets[:, None])
        return self.confidences[:, self._places(bands)].double()

    def classes_of(self, bands: Sequence[Band]) -> Tensor:
        """Return the predicted class of each image in some of the bands: [N,len(bands)]."""
        return self.named[:, self._places(bands)]

    def _places(self, bands: Sequence[Band]) -> list[int]:
        place = {band: i for i, band in enumerate(self.bands)}
        return [place[band] for band in bands]

    def share(self, band: Band) -> Tensor:
        """Return the share of each image's pixels inside a weighed band: [N]."""
        return self.shares[:, self.weighed.index(band)]

    def rows(self, some: slice | Sequence[int]) -> "Predictions":
        """Return the predictions for some of the images."""
        return replace(self, **{name: getattr(self, name)[some] for name in ROWS})

    def pieces(self) -> Iterator["Predictions"]:
        """Yield the predictions for PIECE images at a time."""
        for start in range(0, max(len(self.targets), 1), PIECE):
            yield self.rows(slice(start, start + PIECE))

    def by_piece(self, make: Callable[["Predictions"], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return what `make` returns for each piece, joined: each [N,...].

        The memory for all pieces is allocated once: keeping the pieces would fragment it.
        """
        whole: dict[str, Tensor] = {}
        start = 0
        for some in self.pieces():
            end = start + len(some.targets)
            for name, values in make(some).items():
                if name not in whole:
                    whole[name] = values.new_empty(len(self.targets), *values.shape[1:])
                whole[name][start:end] = values
            start = end
        return whole

    @staticmethod
    def join(parts: Sequence["Predictions"]) -> "Predictions":
        """Return the predictions of several batches as one, in their order."""
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in ROWS}
        return Predictions(parts[0].bands, weighed=parts[0].weighed, **joined)


def hits(named: Tensor, targets: Tensor) -> Tensor:
    """Return 1 where the predicted class is the target, else 0; NaN where either is NO_CLASS.

    >>> hits(torch.tensor([3, 4, NO_CLASS]), torch.tensor(3))
    tensor([1., 0., nan], dtype=torch.float64)
    """
    hit = (named == targets.to(named)).double()
    return hit.masked_fill((named == NO_CLASS) | (targets == NO_CLASS), torch.nan)
