"""Random draws of the leak: donors of other classes, and canvases of grey and noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
GREY = 0.5


@dataclass(frozen=True)
class Donors:
    """The donors of all images, image after image."""

    owners: Tensor  # [T] whose mask it is
    donors: Tensor  # [T] the image of the pool under the mask
    others: Tensor  # [T] the image of the pool whose mask gives the chance level
    counts: Tensor  # [N] donors of each image

    def of_methods(self, m: int, pool: int) -> "Donors":
        """Return the same donors for m methods, whose heatmaps come method after method."""
        method, n = torch.arange(m, device="cpu")[:, None], len(self.counts)
        return Donors(
            (self.owners + n * method).flatten(),
            self.donors.repeat(m),
            (self.others + pool * method).flatten(),
            self.counts.repeat(m),
        )


def draw_donors(
    targets: Tensor, pool_targets: Tensor, donors: int, seed: int, numbers: Sequence[int]
) -> Donors:
    """Draw donors for images with these numbers among all images: [N], [P]."""
    known = pool_targets.numpy()
    drawn = [
        draw(target, known, donors, seed, number)
        for target, number in zip(targets.tolist(), numbers, strict=True)
    ]
    counts = torch.tensor([len(first) for first, _ in drawn], device="cpu")
    first, second = (np.concatenate(both) for both in zip(*drawn, strict=True))
    owners = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    return Donors(owners, torch.from_numpy(first), torch.from_numpy(second), counts)


def draw(target: int, pool_targets: Ints, donors: int, seed: int, number: int) -> tuple[Ints, Ints]:
    """Return the donors of image `number`, and the images whose masks give the chance level.

    Both are of another class than the target, each image at most once.
    """
    others = np.flatnonzero((pool_targets != target) & (pool_targets >= 0))
    random = np.random.default_rng([seed, number])
    count = min(donors, len(others))
    first, second = (random.choice(others, count, replace=False) for _ in range(2))
    return first, second


def draw_pool(targets: Tensor, size: int, seed: int) -> list[int]:
    """Return the sorted numbers of up to `size` images, of two classes where there are two.

    >>> draw_pool(torch.tensor([1, 1, 1, 1, 1, 0]), 2, seed=0)
    [3, 5]
    """
    known, order = targets.numpy(), np.random.default_rng(seed).permutation(len(targets))
    chosen, left = order[:size].copy(), order[size:]
    others = left[known[left] != known[chosen[0]]]
    if (known[chosen] == known[chosen[0]]).all() and len(others):
        chosen[-1] = others[0]
    return sorted(chosen.tolist())


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def canvases(shape: tuple[int, ...], seed: int, noises: int) -> Tensor:
    """Return an image of plain grey, and images of uniform noise by the seed: [1+noises,C,H,W]."""
    random = np.random.default_rng(seed)
    images = torch.from_numpy(random.random((noises, *shape), dtype=np.float32))
    return torch.cat([torch.full_like(images[:1], GREY), images])
