"""Pictures as a loader: read a batch at a time, and what can't be read is left out and named."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from sufficit.classifier.checkpoint import View
from sufficit.data.images import BadImageError, ImageFile
from sufficit.errors import GoneError, UserError

OnError = Literal["skip", "stop"]


@dataclass(frozen=True)
class Part:
    """Some pictures of a folder, with their class numbers where these are wanted."""

    pictures: tuple[ImageFile, ...]
    labels: tuple[int, ...] | None

    def __len__(self) -> int:
        return len(self.pictures)


@dataclass(frozen=True)
class Item:
    """A picture as it was read, or what is wrong with it."""

    name: str
    label: int | None
    image: Tensor | None = None  # [C,H,W]
    problem: str = ""
    gone: str = ""  # that nothing can be read any more


@dataclass(frozen=True)
class Read:
    """The pictures of a batch that could be read, and what is wrong with the others."""

    images: Tensor | None  # [N,C,H,W], None where there are none, or of several sizes
    labels: Tensor | None  # [N]
    problems: dict[str, str]  # name -> why
    sizes: dict[tuple[int, ...], str]  # and the name of a picture that has it
    gone: str = ""  # that nothing can be read any more


class Pictures(Dataset[Item]):
    """A part of a folder as the classifier sees it, picture by picture."""

    def __init__(self, part: Part, view: View | None) -> None:
        self.part, self.view = part, view

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, number: int) -> Item:
        picture = self.part.pictures[number]
        label = self.part.labels[number] if self.part.labels is not None else None
        try:
            return Item(picture.name, label, picture.read(self.view))
        except (BadImageError, OSError) as error:
            return Item(picture.name, label, problem=str(error))
        except GoneError as error:
            return Item(picture.name, label, gone=str(error))


def collated(items: Sequence[Item]) -> Read:
    """A batch of items. What is wrong is told as a value: errors of workers carry their traceback.

    >>> collated([Item("a.png", 3, torch.zeros(1, 2, 2)), Item("b.png", 4, problem="empty")]).labels
    tensor([3])
    """
    good = [(item, item.image) for item in items if item.image is not None]
    sizes = {tuple(image.shape): item.name for item, image in good}
    images = torch.stack([image for _, image in good]) if len(sizes) == 1 else None
    known = [item.label for item, _ in good if item.label is not None]
    labels = torch.tensor(known) if known else None
    problems = {item.name: item.problem for item in items if item.image is None}
    gone = next((item.gone for item in items if item.gone), "")
    return Read(images, labels, problems, sizes, gone)


class PictureLoader:
    """Batches of (images [N,C,H,W], labels [N]), or of images alone where there are no labels.

    After each pass `skipped` says which pictures could not be read, and why. A batch with nothing
    but such pictures is left out; where processes work in step, the one before it stands in.
    """

    def __init__(
        self,
        part: Part,
        view: View | None,
        batch_size: int,
        *,
        sampler: Sampler[int] | Literal["shuffled", "in order"] = "shuffled",
        workers: int = 0,
        on_error: OnError = "skip",
    ) -> None:
        given = None if isinstance(sampler, str) else sampler
        self.batches = DataLoader(
            Pictures(part, view),
            batch_size,
            shuffle=sampler == "shuffled" if given is None else None,
            sampler=given,
            num_workers=workers,
            collate_fn=collated,
            persistent_workers=workers > 0,
        )
        self.sampler = self.batches.sampler
        self.in_step = isinstance(given, DistributedSampler)
        self.on_error = on_error
        self.skipped: dict[str, str] = {}
        self._sizes: dict[tuple[int, ...], str] = {}
        self._begun = False
        self.passes = 0  # how often all pictures were read

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        found = map(self._batch, self._started())
        yield from standing_in(found) if self.in_step else (one for one in found if one is not None)
        self.passes += 1

    def _started(self) -> Iterator[Read]:
        if self._begun and self.batches.persistent_workers:
            # A new iterator draws a number before the order; one that is kept must as well, or a
            # run that goes on would see another order.
            torch.empty((), dtype=torch.int64).random_()
        self._begun = True
        with warnings.catch_warnings():
            # Python 3.12 warns of any fork beside threads; torch's are idle when a pass begins.
            warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
            return iter(self.batches)

    def _batch(self, read: Read) -> Any:
        """What of a batch can be trained on; None where nothing can."""
        if read.gone:
            raise GoneError(read.gone)
        for name, problem in read.problems.items():
            if self.on_error == "stop":
                raise UserError(
                    f"{name}: {problem}. Mend it, or go on without it with --on-error skip"
                )
        self.skipped |= read.problems
        self._sizes |= read.sizes
        if len(self._sizes) > 1:
            listed = [f"{name} {list(size)}" for size, name in self._sizes.items()]
            raise UserError(
                f"images differ in size ({', '.join(listed[:3])}) and the model names none: give"
                " --size"
            )
        return read.images if read.labels is None else (read.images, read.labels)


def standing_in(batches: Iterable[Any]) -> Iterator[Any]:
    """As many batches as there are, a neighbour in the place of each that is None.

    >>> list(standing_in([None, "a", None, "b"]))
    ['a', 'a', 'a', 'b']
    """
    last, waiting = None, 0
    for one in batches:
        last = last if one is None else one
        waiting += 1
        if last is not None:
            yield from [last] * waiting
            waiting = 0
    if waiting:
        raise UserError(f"none of the pictures in {waiting} batches can be read")
