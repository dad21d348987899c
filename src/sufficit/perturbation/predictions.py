"""What a model predicts for images seen through bands of their heatmaps.

Letters of shapes, here and everywhere: N images, C classes, K channels, B bands, P points of a
curve, A values of alpha_min, H W image, h w features.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from sufficit.perturbation.bands import EVERYTHING, Band

PIECE = 1024  # images whose predictions are worked on at a time
NO_CLASS = -1  # the model returned NaN
ANOTHER = -2  # some class that is not the target
ROWS = ("named", "confidences", "shares", "targets", "calls")  # tensors with a row per image
HALF = 0.5  # of the whole image's value counts as right, by a score of the user's
Score = Callable[[Tensor, Tensor], Tensor]
"""Logits [N,C] and targets [N] -> one number per image [N]."""
ScoreKind = Literal["accuracy", "confidence"]
Measure = Callable[[Tensor, Tensor | None], Tensor]
"""One number per heatmap, from heatmaps and the truth, if there is one: twice [N,H,W] -> [N]."""


@dataclass(frozen=True)
class Predictions:
    """The prediction for each image and band; NaN where the model returned NaN.

    If each image was asked some of the bands only, `drawn` has their numbers, and `named` and
    `confidences` are theirs: [N,K] instead of [N,B].
    """

    bands: tuple[Band, ...]
    named: Tensor  # [N,B] int32, the predicted class, or NO_CLASS, or ANOTHER
    confidences: Tensor  # [N,B] softmax of the target class
    weighed: tuple[Band, ...]
    shares: Tensor  # [N,len(weighed)] share of the pixels inside the band
    targets: Tensor  # [N]
    calls: Tensor  # [N] model calls spent on each image
    drawn: Tensor | None = None  # [N,K] int32, numbers of the bands each image was asked
    counts: Tensor | None = None  # [B] how often each band is drawn, on average

    def of(self, bands: Sequence[Band], kind: ScoreKind) -> Tensor:
        """Return the score of each image in some of the bands, in their order: [N,len(bands)].

        A band that an image was not asked has NaN.
        """
        if kind == "accuracy":
            return hits(self.classes_of(bands), self.targets[:, None])
        return self._spread(self.confidences, torch.nan)[:, self._places(bands)].double()

    def classes_of(self, bands: Sequence[Band]) -> Tensor:
        """Return the predicted class of each image in some of the bands: [N,len(bands)].

        A band that an image was not asked has NO_CLASS.
        """
        return self._spread(self.named, NO_CLASS)[:, self._places(bands)]

    def total(
        self,
        weights: Mapping[Band, float],
        kind: ScoreKind,
        value: Callable[[Tensor], Tensor] = lambda scores: scores,
    ) -> Tensor:
        """Return the sum of weight x value(score) over bands for each image: [N].

        Where each image was asked some of the bands, it is the estimate of that sum whose mean over
        draws is the sum: each band drawn counts weight / count times. Values are taken from that of
        half the whole image's score, which all bands have in common and no draw can change.
        """
        factors = torch.tensor(list(weights.values()), dtype=torch.float64, device="cpu")
        if self.drawn is None or self.counts is None:
            return (value(self.of(list(weights), kind)) * factors).sum(1)
        # Horvitz and Thompson's estimate; sampling.py says how bands are drawn.
        places = self._places(list(weights))
        shares = torch.zeros_like(self.counts)
        shares[places] = factors / self.counts[places]
        asked = shares[self.drawn.long()]
        scores = self.confidences.double()
        if kind == "accuracy":
            scores = hits(self.named, self.targets[:, None])
        # The estimate of a constant would vary with the draw, so the constant is taken out first.
        middle = value(self.of([EVERYTHING], kind).nan_to_num(0) / 2)
        parts = (asked * (value(scores) - middle)).where(asked != 0, 0)
        return parts.sum(1) + middle[:, 0] * factors.sum()

    def asked(self, bands: Sequence[Band]) -> bool:
        """Return whether all of these bands are among those that were asked."""
        return all(band in self._place for band in bands)

    @cached_property
    def _place(self) -> dict[Band, int]:
        """The column of each band."""
        return {band: i for i, band in enumerate(self.bands)}

    def _places(self, bands: Sequence[Band]) -> list[int]:
        return [self._place[band] for band in bands]

    def _spread(self, values: Tensor, missing: float) -> Tensor:
        """Return the values of the bands drawn at their numbers among all: [N,K] -> [N,B]."""
        if self.drawn is None:
            return values
        # A band that an image drew twice is written twice, with the same value.
        whole = values.new_full((len(values), len(self.bands)), missing)
        return whole.scatter_(1, self.drawn.long(), values)

    def share(self, band: Band) -> Tensor:
        """Return the share of each image's pixels inside a weighed band: [N]."""
        return self.shares[:, self.weighed.index(band)]

    def column(self, band: Band) -> "Predictions":
        """Return the predictions for one band that every image was asked: [N,1]."""
        place = self._place[band]
        return replace(
            self,
            bands=(band,),
            named=self.named[:, place : place + 1],
            confidences=self.confidences[:, place : place + 1],
        )

    def rows(self, some: slice | Sequence[int]) -> "Predictions":
        """Return the predictions for some of the images."""
        return replace(self, **{name: getattr(self, name)[some] for name in self.parts})

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors with a row per image."""
        return ROWS if self.drawn is None else (*ROWS, "drawn")

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
        for piece in self.pieces():
            end = start + len(piece.targets)
            for name, values in make(piece).items():
                if name not in whole:
                    whole[name] = values.new_empty(len(self.targets), *values.shape[1:])
                whole[name][start:end] = values
            start = end
        return whole

    @staticmethod
    def join(parts: Sequence["Predictions"]) -> "Predictions":
        """Return the predictions of several batches as one, in their order."""
        first = parts[0]
        joined: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts]) for name in first.parts
        }
        return replace(first, **joined)


@dataclass(frozen=True)
class ViewPredictions:
    """The prediction for each view: some image through some mask."""

    named: Tensor  # [T] the predicted class, NO_CLASS where the model returned NaN
    confidences: Tensor  # [T] softmax of the view's target; NaN without targets

    def queued_for_cpu(self) -> "ViewPredictions":
        """Return copies on the CPU that hold the answers once the device has come so far."""
        return ViewPredictions(
            self.named.to("cpu", non_blocking=True), self.confidences.to("cpu", non_blocking=True)
        )

    def cpu(self) -> "ViewPredictions":
        """Return the same on the CPU, once the model's device has computed them."""
        return ViewPredictions(self.named.cpu(), self.confidences.cpu())


def hits(named: Tensor, targets: Tensor) -> Tensor:
    """Return 1 where the predicted class is the target, else 0; NaN where either is NO_CLASS.

    >>> hits(torch.tensor([3, 4, NO_CLASS]), torch.tensor(3))
    tensor([1., 0., nan], dtype=torch.float64)
    """
    hit = (named == targets.to(named)).double()
    return hit.masked_fill((named == NO_CLASS) | (targets == NO_CLASS), torch.nan)


def confidence(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the softmax of the target: [N,C], [N] -> [N]."""
    return logits.softmax(1).gather(1, targets[:, None])[:, 0]


def only_logit(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the number that a score of the user's gives: [N,1], [N] -> [N]."""
    return logits[:, 0]


def relative(values: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return the class and the share of the whole image's value, in 0..1: [T], [T] -> [T], [T].

    A share of HALF or more counts as the target, 0. It is NaN where the whole image has the value 0
    or either is not finite.
    """
    shares = (values / whole).clamp(0, 1)
    shares = shares.masked_fill(~(values.isfinite() & whole.isfinite()) | (whole == 0), torch.nan)
    named = torch.where(shares >= HALF, 0, ANOTHER).masked_fill(shares.isnan(), NO_CLASS)
    return named.to(torch.int32), shares


def judge(logits: Tensor, targets: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    """Return the predicted class and the score of the target: [N,C] -> [N], [N]."""
    scores = score(logits, targets)
    return logits.argmax(1).masked_fill(scores.isnan(), NO_CLASS).to(torch.int32), scores
