"""The small convolutional net of the demo, and where its shipped weights lie."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from torch import Tensor, nn


class SmallNet(nn.Module):
    """Six 3x3 convolutions, an eighth of the image's side at the end: [N,C,H,W] -> [N,classes]."""

    def __init__(self, num_classes: int = 10, channels: int = 3, width: int = 24) -> None:
        super().__init__()
        widths = [channels, width, width, 2 * width, 2 * width, 4 * width, 4 * width]
        blocks = [
            nn.Sequential(
                nn.Conv2d(k, m, 3, stride=1 + i % 2, padding=1, bias=False),
                nn.BatchNorm2d(m),
                nn.ReLU(),
            )
            for i, (k, m) in enumerate(pairwise(widths))
        ]
        self.features = nn.Sequential(*blocks)
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits from the mean of the last map."""
        pooled: Tensor = self.features(images).mean((2, 3))
        logits: Tensor = self.head(pooled)
        return logits


@dataclass(frozen=True)
class Shipped:
    """An architecture and the folder its trained weights ship in."""

    build: Callable[..., nn.Module]
    folder: Path


SMALL_NETS: dict[str, Shipped] = {
    "digits": Shipped(SmallNet, Path(__file__).parents[1] / "assets" / "digits"),
}
