"""The small frozen values that cross module borders.

Letters used for shapes everywhere: N images, C classes, K channels, B bands, P points of a curve,
A values of alpha_min, H W image, h w features.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

PIECE = 1024  # images whose answers are worked on at a time
NO_CLASS, ANOTHER = -1, -2  # the model said NaN; a class that is not the target, which is not known
ScoreKind = Literal["accuracy", "confidence"]
Progress = Callable[[float, float], None]
"""Called as (done, total) while a long job runs."""


@dataclass(frozen=True, slots=True)
class Band:
    """The pixels a mask keeps: low < value <= high, or low <= rank / HW < high."""

    axis: Literal["value", "rank"]
    low: float
    high: float


@dataclass(frozen=True)
class Views:
    """Which image is seen through which heatmap's mask."""

    images: Tensor  # [T]
    heatmaps: Tensor  # [T]


@dataclass(frozen=True)
class Predictions:
    """What the model said of each image seen through each band; NaN where it said NaN."""

    bands: tuple[Band, ...]
    named: Tensor  # [N,B] int32, the class that came first, or NO_CLASS, or ANOTHER
    confidences: Tensor  # [N,B] softmax of the target class
    weighed: tuple[Band, ...]
    shares: Tensor  # [N,len(weighed)] share of the pixels that lie in the band
    targets: Tensor  # [N]
    calls: Tensor  # [N] model calls spent on each image

    def of(self, bands: Sequence[Band], kind: ScoreKind) -> Tensor:
        """The answers to some of the bands, in their order: [N,len(bands)]."""
        places = self._places(bands)
        if kind == "accuracy":
            return hits_of(self.named[:, places], self.targets)
        return self.confidences[:, places].double()

    def classes_of(self, bands: Sequence[Band]) -> Tensor:
        """The class that came first, through some of the bands: [N,len(bands)]."""
        return self.named[:, self._places(bands)]

    def _places(self, bands: Sequence[Band]) -> list[int]:
        place = {band: i for i, band in enumerate(self.bands)}
        return [place[band] for band in bands]

    def share(self, band: Band) -> Tensor:
        """Share of each image's pixels inside a weighed band: [N]."""
        return self.shares[:, self.weighed.index(band)]

    def rows(self, some: slice | Sequence[int]) -> "Predictions":
        """The answers of some of the images."""
        names = ("named", "confidences", "shares", "targets", "calls")
        return replace(self, **{name: getattr(self, name)[some] for name in names})

    def pieces(self) -> Iterator["Predictions"]:
        """Some images at a time, so that what is made of each takes little memory."""
        for start in range(0, max(len(self.targets), 1), PIECE):
            yield self.rows(slice(start, start + PIECE))

    def by_piece(self, make: Callable[["Predictions"], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What is made of each piece, laid one after the other: each [N,...].

        Room for all of it is made once: pieces kept one by one would leave memory in tatters.
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
        """The answers of several batches as one, in their order."""
        first = parts[0]
        return Predictions(
            first.bands,
            torch.cat([part.named for part in parts]),
            torch.cat([part.confidences for part in parts]),
            first.weighed,
            torch.cat([part.shares for part in parts]),
            torch.cat([part.targets for part in parts]),
            torch.cat([part.calls for part in parts]),
        )


def hits_of(named: Tensor, targets: Tensor) -> Tensor:
    """1 where the class that came first is the target, else 0; NaN where there is none: [N,B]."""
    hit = (named == targets.to(named)[:, None]).double()
    return hit.masked_fill(named == NO_CLASS, torch.nan)
