"""What a model says of the parts that an order of the pixels cuts off, asked part by part.

An order and a size cut an image in two: the region, which are the first pixels, and the rest. A
fit asks about some of these parts, a certificate about some more.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.data.batch import Batch
from sufficit.perturbation.bands import EVERYTHING, all_but_top, ranks, runs, top
from sufficit.perturbation.heatmaps import resize
from sufficit.perturbation.masked_model import MaskedModel, whole_images
from sufficit.perturbation.predict import queued, whole_values
from sufficit.perturbation.predictions import ViewPredictions

THOUSANDTHS = (
    *(20, 30, 40, 60, 80, 100, 125, 150, 180, 210, 250, 290, 330, 380, 430, 480, 540, 600, 660),
    *(720, 780, 840, 900, 950),
)
SIZES = tuple(size / 1000 for size in THOUSANDTHS)
PARTS = (*map(top, SIZES), *map(all_but_top, SIZES), top(0.0), EVERYTHING)
# The places of PARTS: the regions of all sizes, what they leave, an empty and a whole image.
REGION = slice(0, len(SIZES))
REST = slice(len(SIZES), 2 * len(SIZES))
NOTHING = 2 * len(SIZES)
ALL = 2 * len(SIZES) + 1
Found = TypeVar("Found")
_MASK_ELEMENTS = 2**28  # of masks that are made at a time
UNASKED = -3  # in place of a class; predictions.py has the other such numbers


@dataclass(frozen=True)
class Asked:
    """The answers about every part of some images, with several fills; most are not asked."""

    fills: tuple[str, ...]
    named: Tensor  # int32 [N,F,P] the predicted class, or UNASKED
    confidences: Tensor  # [N,F,P] of the target, NaN where it was not asked
    unseen: str = ""  # the last fill, if it was asked only after a size was chosen

    @property
    def known(self) -> Tensor:
        """Which parts were asked: bool [N,F,P]."""
        return self.named != UNASKED

    @property
    def passes(self) -> Tensor:
        """The forward passes spent on each image, that of the whole image aside: [N]."""
        return self.known[..., :ALL].sum((1, 2))

    def with_unseen(self, fill: str) -> "Asked":
        """Return the same with a further fill, with which only the whole image is known."""
        # Any fill's answers about the whole image: nothing of it is hidden.
        named = self.named[:, :1].clone()
        confidences = self.confidences[:, :1].clone()
        named[..., :ALL] = UNASKED
        confidences[..., :ALL] = torch.nan
        return Asked(
            fills=(*self.fills, fill),
            named=torch.cat([self.named, named], dim=1),
            confidences=torch.cat([self.confidences, confidences], dim=1),
            unseen=fill,
        )

    def rows(self, some: Sequence[int]) -> "Asked":
        """Return the answers about some of the images."""
        places = list(some)
        return replace(self, named=self.named[places], confidences=self.confidences[places])

    @staticmethod
    def joined(parts: "Sequence[Asked]") -> "Asked":
        """Return the answers about several batches, one after the other."""
        return replace(
            parts[0],
            named=torch.cat([part.named for part in parts]),
            confidences=torch.cat([part.confidences for part in parts]),
        )


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of the images of a batch, by the order of their pixels."""

    model: Classifier
    batch: Batch
    places: Tensor  # [N,H,W] the rank of each pixel in the order
    batch_size: int | None = None

    @classmethod
    def of(
        cls, model: Classifier, batch: Batch, order: Tensor, batch_size: int | None = None
    ) -> "Parts":
        """Return the parts by an order at any size: [N,h,w]."""
        return cls(model, batch, ranks(resize(order, batch.size)), batch_size)

    def unasked(self, fills: Sequence[str]) -> Asked:
        """Return the whole images, which are known, and no other part."""
        whole = whole_images(self.model, self.batch)
        shape = (len(self.batch), len(fills), len(PARTS))
        named = torch.full(shape, UNASKED, dtype=torch.int32, device="cpu")
        confidences = torch.full(shape, torch.nan, device="cpu")
        named[..., ALL] = whole.named.to(named)
        confidences[..., ALL] = whole.confidences
        return Asked(tuple(fills), named, confidences)

    @cached_property
    def spans(self) -> Tensor:
        """The run of ranks that each part keeps: [P,2]."""
        return runs(self.places[:1], PARTS)[0].to(self.places)

    @cached_property
    def _values(self) -> Tensor:
        """The whole images' values by a score of the user's: [N]."""
        return whole_values(self.model, self.batch.images, self.batch_size)

    def ask(self, asked: Asked, wanted: Tensor) -> "Coming":
        """Put the parts that are wanted to the model, and wait for nothing: bool [N,F,P].

        All parts of all images go to the model at once, fill by fill.
        """
        targets = self.batch.targets.cpu()
        answers = []
        for number, fill in enumerate(asked.fills):
            masked = MaskedModel(self.model, fill, self.batch_size)
            step = max(1, _MASK_ELEMENTS // self.places[0].numel())
            for chunk in wanted[:, number].nonzero().split(step):
                if not len(chunk):
                    continue
                rows, parts = chunk.unbind(1)
                views = masked.views(
                    self.batch.images,
                    self._masks(rows, parts),
                    (rows, torch.arange(len(rows))),
                    targets=targets[rows],
                    whole=self._values,
                )
                places = (rows, torch.full_like(rows, number), parts)
                answers.append((places, views.queued_for_cpu()))
        return Coming(asked, answers, self.model.device)

    def _masks(self, rows: Tensor, parts: Tensor) -> Tensor:
        """Return the pixels of some parts: [T], [T] -> bool [T,H,W]."""
        places = self.places[queued(rows, self.places.device)]
        spans = self.spans[queued(parts, self.places.device)]
        first, last = spans[:, :, None, None].unbind(1)
        return (places >= first) & (places < last)


class Coming:
    """Answers that the model's device is computing, and those known before."""

    def __init__(
        self,
        asked: Asked,
        found: list[tuple[tuple[Tensor, Tensor, Tensor], ViewPredictions]],
        device: torch.device,
    ) -> None:
        self.asked = asked
        self.found = found
        # Marks the end of what the GPU has been given for these answers.
        self.ready = torch.cuda.Event() if device.type == "cuda" else None
        if self.ready is not None:
            self.ready.record()

    def arrived(self) -> Asked:
        """Wait for the answers, and return all that is known."""
        if self.ready is not None:
            self.ready.synchronize()
        named = self.asked.named.clone()
        confidences = self.asked.confidences.clone()
        for places, views in self.found:
            named[places] = views.named.to(named)
            confidences[places] = views.confidences
        return replace(self.asked, named=named, confidences=confidences)


def in_step(jobs: "Sequence[Generator[Coming, Asked, Found]]") -> list[Found]:
    """Return what jobs return that yield the answers they wait for.

    While a GPU computes the answers to one job, Python works on the next.
    """
    results: dict[int, Found] = {}
    waiting: deque[tuple[int, Coming | None]] = deque((number, None) for number in range(len(jobs)))
    while waiting:
        number, coming = waiting.popleft()
        try:
            if coming is None:
                following = next(jobs[number])
            else:
                following = jobs[number].send(coming.arrived())
        except StopIteration as end:
            results[number] = end.value
        else:
            waiting.append((number, following))
    return [results[number] for number in range(len(jobs))]
