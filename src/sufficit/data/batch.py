"""A batch: images with names, targets and truth, and a cache of what is known of them."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

Sample = frozenset[int] | None
"""The numbers of some images of a run; None means all of them."""


class HasRows(Protocol):
    """A result with a row per image, which a batch can keep and cut."""

    def rows(self, some: Sequence[int]) -> Any:
        """Return the rows of some of the images."""


Known = TypeVar("Known", bound=HasRows)


@dataclass(frozen=True)
class Batch:
    """Images with targets, names, numbers and truth."""

    images: Tensor  # [N,C,H,W]
    targets: Tensor  # [N]
    names: tuple[str, ...]
    numbers: tuple[int, ...]  # among all images of the run: seeds and samples go by them
    truth: Tensor | None = None  # [N,H,W]; all zeros where none is known
    # What models said of the whole images, what sources drew: whoever asks first computes it.
    known: dict[Hashable, HasRows] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return self.images.shape[2], self.images.shape[3]

    def remember(self, key: Hashable, compute: Callable[[], Known]) -> Known:
        """Return what is known under a key; compute it at the first call."""
        if key not in self.known:
            self.known[key] = compute()
        value: Any = self.known[key]
        return value  # type: ignore[no-any-return]  # the key says what it is

    def for_another_model(self) -> "Batch":
        """Return the same images without the cache, which holds what one model said of them."""
        return replace(self, known={})

    def places(self, sample: Sample) -> list[int]:
        """Return the rows of the images that belong to a sample."""
        return [
            row for row, number in enumerate(self.numbers) if sample is None or number in sample
        ]

    def rows(self, some: Sequence[int]) -> "Batch":
        """Return some of the images, with all that is known of them."""
        # The same batch, so that what is found out later is known to both.
        if list(some) == list(range(len(self))):
            return self
        places = list(some)
        return Batch(
            images=self.images[places],
            targets=self.targets[places],
            names=tuple(self.names[row] for row in places),
            numbers=tuple(self.numbers[row] for row in places),
            truth=None if self.truth is None else self.truth[places],
            known={key: value.rows(places) for key, value in self.known.items()},
        )
