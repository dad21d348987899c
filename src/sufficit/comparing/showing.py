"""Which images are shown: best, worst, most disputed, and some drawn by chance."""

from dataclasses import dataclass

from torch import Tensor

from sufficit.report.content import choose

__all__ = ["SHOWN", "Shown", "choose"]

SHOWN = 24


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
