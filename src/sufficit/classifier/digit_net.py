"""The small convolutional net for digits, and the folders of all networks that ship."""

from itertools import pairwise
from pathlib import Path

from torch import Tensor, nn

ASSETS = Path(__file__).parents[1] / "assets"
SMALL_NETS = {name: ASSETS / name for name in ("digits", "pets")}
"""The folders of the networks that ship with the package."""


class SmallNet(nn.Module):
    """Six 3x3 convolutions down to an eighth of the image's side: [N,C,H,W] -> [N,classes]."""

    def __init__(self, num_classes: int = 10, channels: int = 3, width: int = 24) -> None:
        super().__init__()
        blocks = []
        widths = [channels, width, width, 2 * width, 2 * width, 4 * width, 4 * width]
        for i, (k, m) in enumerate(pairwise(widths)):
            conv = nn.Conv2d(k, m, 3, stride=1 + i % 2, padding=1, bias=False)
            blocks.append(nn.Sequential(conv, nn.BatchNorm2d(m), nn.ReLU()))
        self.features = nn.Sequential(*blocks)
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits from the mean of the last map."""
        logits: Tensor = self.head(self.features(images).mean((2, 3)))
        return logits
