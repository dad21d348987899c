"""From a loader of images to batches with targets and features, the same on every run."""

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from sufficit.classifier.classifier import Classifier, check_images, check_range, check_targets
from sufficit.errors import UserError
from sufficit.seeds import unmoved
from sufficit.training.steps import Batch

if TYPE_CHECKING:
    from lightning.fabric import Fabric

Target = Literal["label", "prediction"]
Loader = Iterable[Any]


@dataclass(frozen=True)
class Feed:
    """A loader, and what its batches need to be trained on."""

    classifier: Classifier
    loader: Loader
    target: Target
    seed: int
    rank: int = 0

    def __len__(self) -> int:
        """Batches an epoch, or 0 where that is not known beforehand."""
        try:
            return len(self.loader)  # type: ignore[arg-type]  # told by the error
        except TypeError:
            return 0

    def batches(self, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch, in an order that seed and epoch alone decide."""
        self.sow(epoch)
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        seen = 0
        for given in self.loader:
            first = not seen and epoch == 0
            batch = self.batch(given, look=first)
            if first:
                check_images(batch.images)  # not of every batch: a GPU would wait
            seen += 1
            yield batch
        if not seen:
            raise UserError("the loader gave no batches: it must give them anew at each epoch")

    def sow(self, epoch: int) -> None:
        """Seed whatever the loader may draw from, generators of its own too."""
        seed_all(self.seed, epoch, self.rank)
        for generator in _generators(self.loader):
            generator.manual_seed(mixed_seed(self.seed, epoch, self.rank))

    def batch(self, given: object, *, look: bool = True) -> Batch:
        """What a loader gave, with its targets and features, on the classifier's device.

        Labels that lie on a GPU are read only to `look` whether there are such classes.
        """
        device = self.classifier.device
        if isinstance(given, Batch):
            moved = (part.to(device, non_blocking=True) for part in _tensors(given))
            return Batch(*moved)
        images, labels = self.parts(given, look=look)
        dtype = torch.float32 if images.is_floating_point() else images.dtype
        images = images.to(device, dtype, non_blocking=True)
        with torch.no_grad():
            features, logits = self.classifier.features(images)
        if labels is None:
            return Batch(images, logits.argmax(1), features.float())
        if look or not labels.is_cuda:
            check_range(labels, logits.shape[1])
        return Batch(images, labels.to(device, non_blocking=True), features.float())

    def parts(self, given: object, *, look: bool = True) -> tuple[Tensor, Tensor | None]:
        """Images and, where they are the targets, labels of what a loader gave."""
        if isinstance(given, Batch):
            return given.images, given.targets
        several: list[Any] = (
            [*given, None] if isinstance(given, tuple | list) and given else [given, None]
        )
        images, labels = several[:2]
        if not isinstance(images, Tensor):
            raise UserError(
                "a loader must give (images, labels), or images alone, as tensors; got"
                f" {type(given).__name__} of {type(images).__name__}"
            )
        if self.target == "prediction":
            return images, None
        if labels is None:
            raise UserError(
                'target="label" needs a loader of (images, labels), this one gives images alone:'
                ' use target="prediction" to explain what the classifier says'
            )
        if isinstance(labels, Tensor) and labels.is_cuda and not look:
            return images, labels.long()
        return images, check_targets(labels, len(images))


def feed_of(
    classifier: Classifier, loader: Loader, target: Target, seed: int, fabric: "Fabric"
) -> Feed:
    """A feed over this process's share of the loader."""
    if target not in ("label", "prediction"):
        raise UserError(f'target must be "label" or "prediction", got {target!r}')
    if isinstance(loader, Tensor | str | bytes) or not isinstance(loader, Iterable):
        raise UserError(
            f"loader must give batches of (images, labels), got {type(loader).__name__}: a"
            " torch.utils.data.DataLoader does"
        )
    if iter(loader) is loader:  # a generator is spent after one epoch
        raise UserError(
            "loader must give its batches anew at each epoch: give a list or DataLoader"
        )
    return Feed(classifier, _share(loader, fabric, seed), target, seed, fabric.global_rank)


def _share(loader: Loader, fabric: "Fabric", seed: int) -> Loader:
    """The images of a loader that fall to this process."""
    if fabric.world_size == 1 or isinstance(getattr(loader, "sampler", None), DistributedSampler):
        return loader
    if not isinstance(loader, DataLoader):
        raise UserError(
            f"over {fabric.world_size} processes the loader must be a torch DataLoader, so that"
            f" each gets its share, got {type(loader).__name__}"
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        fabric.world_size,
        fabric.global_rank,
        shuffle=isinstance(loader.sampler, RandomSampler),
        seed=seed,
        drop_last=loader.drop_last,
    )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
    )


class CachedLoader:
    """Batches whose features are known already, in a new order each epoch."""

    def __init__(self, whole: Batch, batch_size: int) -> None:
        self.whole, self.batch_size = whole, batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.whole.targets) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.whole.targets)).to(self.whole.targets.device)
        for rows in order.split(self.batch_size):
            yield Batch(*(part[rows] for part in _tensors(self.whole)))


def cache_features(
    classifier: Classifier,
    loader: Loader,
    target: Target = "label",
    *,
    device: torch.device | str = "cpu",
) -> CachedLoader:
    """A loader for `train_lax` that computes the features once, for images that never change.

    Everything is kept in the memory of `device`. What augments images must not be cached.
    """
    feed = Feed(classifier, loader, target, seed=0)
    with keeping_randomness(), torch.no_grad():
        found = [Batch(*(part.to(device) for part in _tensors(batch))) for batch in feed.batches(0)]
    joined = (torch.cat(parts) for parts in zip(*map(_tensors, found), strict=True))
    return CachedLoader(Batch(*joined), len(found[0].targets))


def first_images(feed: Feed, n: int) -> tuple[Tensor, Tensor | None]:
    """The first n images of a feed and their labels, checked, on the CPU."""
    feed.sow(-1)
    images: list[Tensor] = []
    labels: list[Tensor] = []
    for given in chain(feed.loader):
        some, known = feed.parts(given)
        check_images(some)
        images.append(some.cpu())
        labels += [] if known is None else [known.cpu()]
        if sum(map(len, images)) >= n:
            break
    if not images:
        raise UserError("the loader gave no images")
    return torch.cat(images)[:n], torch.cat(labels)[:n] if labels else None


def seed_all(seed: int, epoch: int, rank: int) -> None:
    """Seed every generator a loader may draw from."""
    value = mixed_seed(seed, epoch, rank)
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002  # what people's augmentations draw from
    torch.manual_seed(value)


@contextmanager
def keeping_randomness() -> Iterator[None]:
    """The caller's generators are after the block where they were before it."""
    plain, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with unmoved():
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(numbers)  # noqa: NPY002


def mixed_seed(seed: int, epoch: int, rank: int) -> int:
    """One seed out of three numbers."""
    return int(np.random.SeedSequence([seed, epoch + 1, rank]).generate_state(1, np.uint64)[0] >> 1)


def _generators(loader: Loader) -> list[torch.Generator]:
    """Generators of the loader's own."""
    sampler, batches = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    places = (loader, sampler, batches, getattr(batches, "sampler", None))
    found = [getattr(place, "generator", None) for place in places]
    return [one for one in found if isinstance(one, torch.Generator)]


def _tensors(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.images, batch.targets, batch.features
