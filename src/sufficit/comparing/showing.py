"""Which images are shown: best, worst, most disputed, and some drawn by chance."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sufficit.statistics import Floats

SHOWN = 24
REASONS = ("best", "worst", "most disputed", "drawn by seed")


@dataclass(frozen=True)
class Shown:
    """Some images with every method's heatmap, and why they were chosen."""

    numbers: tuple[int, ...]  # their rows among all that were scored
    reasons: tuple[str, ...]  # of REASONS
    names: tuple[str, ...]
    images: Tensor  # [n,C,H,W]
    targets: Tensor  # [n]
    class_names: tuple[str, ...]  # of the targets
    heatmaps: dict[str, Tensor]  # method -> [n,H,W]


def choose(msi: Mapping[str, Floats], *, most: int = SHOWN, seed: int = 0) -> dict[int, str]:
    """Rows to show and why, from each method's MSI an image: {method: [N]}.

    A quarter each has the highest mean over the methods, the lowest, and the widest spread between
    methods; the rest is drawn by the seed. Images without a value can only be drawn.

    >>> choose({"a": [0.9, 0.1, 0.5, -0.8], "b": [0.9, 0.1, -0.5, -0.9]}, most=4)
    {0: 'best', 3: 'worst', 2: 'most disputed', 1: 'drawn by seed'}
    """
    values = np.stack([np.asarray(found, np.float64) for found in msi.values()])
    known = np.flatnonzero(~np.isnan(values).any(axis=0))
    means, spread = values[:, known].mean(0), np.ptp(values[:, known], axis=0)
    orders = [-means, means, *([-spread] if len(values) > 1 else [])]
    chosen: dict[int, str] = {}
    for reason, order in zip(REASONS, orders, strict=False):
        ranked = known[np.argsort(order, kind="stable")].tolist()
        free = [row for row in ranked if row not in chosen]
        chosen |= dict.fromkeys(free[: most // 4], reason)
    drawn = np.random.default_rng(seed).permutation(values.shape[1]).tolist()
    rest = [row for row in drawn if row not in chosen][: most - len(chosen)]
    return chosen | dict.fromkeys(sorted(rest), REASONS[-1])
