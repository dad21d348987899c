"""A batch of training images, with what the classifier makes of them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sufficit.errors import UserError


class TrainingBatch(NamedTuple):
    """Images in 0..1, the classes to explain, and what the classifier makes of the images."""

    images: Tensor  # [N,C,H,W]
    targets: Tensor  # [N]
    features: tuple[Tensor, ...]  # of each stage, the last one the coarsest: [N,K,h,w]
    first: Tensor  # [N,2] the two classes that the classifier finds most likely
    layers: tuple[str, ...] = ()  # whose features they are, where that is known

    def to(self, device: torch.device | str) -> "TrainingBatch":
        """The same on another device."""
        return self.each(lambda part: part.to(device, non_blocking=True))

    def rows(self, some: Tensor) -> "TrainingBatch":
        """Some of the images."""
        return self.each(lambda part: part[some])

    def each(self, change: Callable[[Tensor], Tensor]) -> "TrainingBatch":
        """Every tensor changed in the same way."""
        tensors = [change(one) for one in (self.images, self.targets, self.first)]
        stages = tuple(map(change, self.features))
        return TrainingBatch(tensors[0], tensors[1], stages, tensors[2], self.layers)

    def reading(self, layers: tuple[str, ...]) -> "TrainingBatch":
        """With the features of these layers alone, the last ones that it has."""
        kept = self.layers[-len(layers) :] if layers else ()
        if not kept:
            return self
        if kept != layers:
            raise UserError(
                f"the cached features are of {', '.join(self.layers)}, but the adapter reads"
                f" {', '.join(layers)}: cache the features of these, cache_features(layers=...)"
            )
        return self._replace(features=self.features[-len(layers) :], layers=layers)

    @classmethod
    def joined(cls, batches: Sequence["TrainingBatch"]) -> "TrainingBatch":
        """All the images of several batches."""
        images, targets, features, first, layers = zip(*batches, strict=True)
        stages = tuple(torch.cat(stage) for stage in zip(*features, strict=True))
        return cls(torch.cat(images), torch.cat(targets), stages, torch.cat(first), layers[0])
