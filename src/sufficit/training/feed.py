"""From anyone's loader of images to batches with targets and features, the same on every run.

And loaders of what stays in memory: images as bytes on a device, with or without their features.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import length_hint
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from sufficit.classifier.classifier import (
    Classifier,
    check_form,
    check_images,
    check_range,
    check_targets,
)
from sufficit.errors import UserError
from sufficit.seeds import unmoved
from sufficit.training.training_batch import TrainingBatch

if TYPE_CHECKING:
    from lightning.fabric import Fabric

Target = Literal["label", "prediction", "model"]
"""Labels; the classifier's own predictions; its probabilities (labels may be missing)."""
Loader = Iterable[Any]
keeping_randomness = unmoved


@dataclass(frozen=True)
class Feed:
    """A loader, the classifier that gives the features, and the seed of the order."""

    classifier: Classifier
    loader: Loader
    target: Target
    seed: int
    rank: int = 0
    layers: tuple[str, ...] = ()  # whose features batches get; empty: the classifier's stages

    def __len__(self) -> int:
        """Batches per epoch, or 0 if the loader has no length."""
        return length_hint(self.loader)

    def batches(self, epoch: int) -> Iterator[TrainingBatch]:
        """The batches of an epoch with features, in an order that seed and epoch alone decide."""
        device = self.classifier.device
        for first, given in self._given(epoch):
            images, labels = self._split(given, look=first)
            if isinstance(given, TrainingBatch):
                yield given.reading(self.layers).to(device)
                continue
            images = images.to(device, torch.float32, non_blocking=True)
            with torch.no_grad():
                layers = self.layers or self.classifier.stage_layers(images)
                stages, logits = self.classifier.stages(images, layers)
            likely = logits.topk(2, dim=1).indices
            if labels is None:
                labels = likely[:, 0]
            elif first or not labels.is_cuda:  # the check makes a GPU wait
                check_range(labels, logits.shape[1])
            features = tuple(stage.float() for stage in stages)
            yield TrainingBatch(
                images, labels.to(device, non_blocking=True), features, likely, layers
            )

    def pairs(self, epoch: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The same without features: images and, where there are any, labels, on the device."""
        device = self.classifier.device
        for first, given in self._given(epoch):
            images, labels = self._split(given, look=first)
            images = images.to(device, torch.float32, non_blocking=True)
            yield images, None if labels is None else labels.to(device, non_blocking=True)

    def _given(self, epoch: int) -> Iterator[tuple[bool, Any]]:
        """What the loader gives in an epoch, and whether it is the first of the training."""
        self._reseed(epoch)
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        number = -1
        for number, given in enumerate(self.loader):
            yield number == epoch == 0, given
        if number < 0:
            raise UserError(
                "The loader gave no batches: it must start again at each epoch, as a DataLoader"
                " does"
            )

    def first_images(self, n: int) -> tuple[Tensor, Tensor | None]:
        """The first n images and their labels, checked, on the CPU."""
        self._reseed(-1)
        images: list[Tensor] = []
        labels: list[Tensor] = []
        for given in self.loader:
            some, known = self._split(given, look=True)
            images.append(some.cpu())
            labels += [] if known is None else [known.cpu()]
            if sum(map(len, images)) >= n:
                break
        if not images:
            raise UserError("The loader gave no images: check what it reads")
        return torch.cat(images)[:n], torch.cat(labels)[:n] if labels else None

    def _reseed(self, epoch: int) -> None:
        """Seed every generator the loader may draw from, its own included."""
        value = mixed_seed(self.seed, epoch, self.rank)
        random.seed(value)
        np.random.seed(value % 2**32)  # noqa: NPY002  # augmentations draw from it
        torch.manual_seed(value)
        sampler, batches = (getattr(self.loader, key, None) for key in ("sampler", "batch_sampler"))
        for owner in (self.loader, sampler, batches, getattr(batches, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(value)

    def _split(self, given: object, *, look: bool) -> tuple[Tensor, Tensor | None]:
        """The images and, if labels are the targets, the labels of what a loader gave.

        Values, and labels on a GPU, are checked only with `look`: the checks make a GPU wait.
        """
        if isinstance(given, TrainingBatch):
            given = (given.images, given.targets)
        several = isinstance(given, tuple | list) and len(given) > 0
        images, labels, *_ = (*given, None) if several else (given, None)  # type: ignore[misc]  # a list
        if not isinstance(images, Tensor):
            raise UserError(
                f"The loader gave {type(given).__name__} of {type(images).__name__}: give tensors,"
                " (images, labels) or images alone"
            )
        (check_images if look else check_form)(images)
        if self.target == "prediction" or (labels is None and self.target == "model"):
            return images, None
        if labels is None:
            raise UserError(
                'target="label" needs a loader of (images, labels), but it gave images alone: use'
                ' target="prediction" to explain the classifier\'s own predictions'
            )
        if isinstance(labels, Tensor) and labels.is_cuda and not look:
            return images, labels.long()
        return images, check_targets(labels, len(images))


def feed_of(
    classifier: Classifier, loader: Loader, target: Target, seed: int, fabric: "Fabric"
) -> Feed:
    """A feed over this process's share of the loader.

    Fabric.setup_dataloaders would take the seed of the order from the environment.
    """
    kind, world, rank = type(loader).__name__, fabric.world_size, fabric.global_rank
    some = isinstance(loader, Iterable) and not isinstance(loader, Tensor | str | bytes)
    if not some or iter(loader) is loader:  # a generator has no second epoch
        raise UserError(
            f"loader must give batches of (images, labels) and start again at each epoch, got"
            f" {kind}: use a torch.utils.data.DataLoader or a list of batches"
        )
    if world > 1 and not isinstance(getattr(loader, "sampler", None), DistributedSampler):
        if not isinstance(loader, DataLoader):
            raise UserError(
                f"With {world} processes the loader must be a torch DataLoader, got {kind}: only"
                " that can be split among them"
            )
        sampler: Any = DistributedSampler(
            loader.dataset,
            world,
            rank,
            shuffle=isinstance(loader.sampler, RandomSampler),
            seed=seed,
            drop_last=loader.drop_last,
        )
        loader = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last,
            worker_init_fn=loader.worker_init_fn,
            sampler=sampler,
        )
    return Feed(classifier, loader, target, seed, rank)


@dataclass
class Shuffled:
    """A loader: `take(rows)`, the batch of some rows, in a new order each time.

    The order comes from torch's own generator. With a limit it gives that many rows, others each
    time.
    """

    take: Callable[[Tensor], Any]
    rows: int
    device: torch.device  # of the rows
    batch_size: int
    limit: int | None = None

    def __len__(self) -> int:
        return math.ceil(min(self.limit or self.rows, self.rows) / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.rows)[: self.limit or None]
        yield from map(self.take, order.to(self.device).split(self.batch_size))


def cache_features(
    classifier: Classifier,
    loader: Loader,
    target: Target = "label",
    *,
    device: torch.device | str = "cpu",
    layers: Sequence[str] = (),
) -> Shuffled:
    """A loader for `train_lax` with features that are computed once, for images that never change.

    It keeps the features of all stages, or of `layers`, in the memory of `device`. Do not cache a
    loader that augments images.
    """
    feed = Feed(classifier, loader, target, seed=0, layers=tuple(layers))
    with keeping_randomness(), torch.no_grad():
        found = [batch.to(device) for batch in feed.batches(0)]
    whole = TrainingBatch.joined(found)
    return Shuffled(whole.rows, len(whole.targets), whole.targets.device, len(found[0].targets))


def mixed_seed(seed: int, epoch: int, rank: int) -> int:
    """One seed from three numbers."""
    return int(np.random.SeedSequence([seed, epoch + 1, rank]).generate_state(1, np.uint64)[0] >> 1)
