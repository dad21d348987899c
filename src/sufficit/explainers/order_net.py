"""The net that orders the cells of an image, from a classifier's features and evidence."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sufficit.classifier.layers import kept
from sufficit.explainers.adapter_nets import MATRIX
from sufficit.explainers.evidence import CHANNELS

CELLS, WIDTH = 28, 128
FEWEST = 14  # cells along the map of a small image
PIXELS = 4  # of a small image, along a cell
BLOCKS = ("full", "separable")
_GROUPS = 8  # of channels that are normalised together, at most


class OrderNet(nn.Module):
    """Features of stages, the coarsest last, and evidence [N,3,h,w] -> an order [N,1,rows,columns].

    Every stage is divided by its root mean square per image and mixed to `width` channels; the
    evidence is added at the coarsest. From level to level the cells are enlarged, the next stage is
    added and a residual block of 3x3 convolutions follows, up to `cells` along the longer side. The
    last layer starts at zero and its output is added to a multiple of the class's own evidence: so
    the untrained order is that of the evidence. `block` is "separable", a 3x3 convolution of each
    channel and a 1x1, or "full".

    >>> net = OrderNet([8, 16], width=8, cells=4)
    >>> features = [torch.rand(1, 8, 4, 4), torch.rand(1, 16, 2, 2)]
    >>> evidence = torch.rand(1, 3, 2, 2)
    >>> bool(torch.equal(net(features, evidence), resized(evidence[:, :1], (4, 4), "bicubic")))
    True
    """

    def __init__(
        self,
        channels: Sequence[int],
        *,
        width: int = WIDTH,
        cells: int = CELLS,
        block: str = "separable",
    ) -> None:
        super().__init__()
        self.cells = cells
        groups = math.gcd(_GROUPS, width)
        # One stage alone has a second level, in which its cells are enlarged.
        self.levels = max(2, len(channels))
        self.laterals = nn.ModuleList(nn.Conv2d(k, width, 1) for k in reversed(channels))
        self.norms = nn.ModuleList(nn.GroupNorm(groups, width) for _ in channels)
        self.evidence = nn.Conv2d(CHANNELS, width, 1)
        self.blocks = nn.ModuleList(residual(width, groups, block) for _ in range(self.levels))
        self.out = nn.Conv2d(width, 1, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.bias)
        self.multiple = nn.Parameter(torch.ones(()))

    def forward(self, features: Sequence[Tensor], evidence: Tensor) -> Tensor:
        """The order, in which larger values come first: -> [N,1,rows,columns], float32."""
        coarse_first = features[::-1]
        sizes = self.sizes(coarse_first[0].shape[2:])
        found = self._read(0, coarse_first[0])
        found = found + self.evidence(resized(evidence, sizes[0]).to(found.dtype))
        found = found + self.blocks[0](found)
        for level in range(1, self.levels):
            found = resized(found, sizes[level])
            if level < len(coarse_first):
                found = found + resized(self._read(level, coarse_first[level]), sizes[level])
            found = found + self.blocks[level](found)
        # In float32: in bfloat16 cells far from zero would be equal.
        with torch.autocast(found.device.type, enabled=False):
            weight, bias = self.out.weight.float(), self.bias.float()
            learned = F.conv2d(found.float(), weight, bias)
            own = resized(evidence[:, :1].float(), sizes[-1], "bicubic")
            return learned + self.multiple * own

    def sizes(self, coarsest: Sequence[int]) -> list[tuple[int, int]]:
        """Rows and columns of each level, the coarsest first, which has the size of its stage."""
        longer = max(coarsest)
        found = [(coarsest[0], coarsest[1])]
        for level in range(1, self.levels):
            side = max(self.cells / 2 ** (self.levels - 1 - level), longer)
            rows, columns = (max(1, round(side * length / longer)) for length in coarsest)
            found.append((rows, columns))
        return found

    @property
    def bias(self) -> Tensor:
        """That of the last layer, which has one."""
        assert self.out.bias is not None
        return self.out.bias

    def _read(self, number: int, features: Tensor) -> Tensor:
        lateral = self.laterals[number]
        assert isinstance(lateral, nn.Conv2d)
        assert lateral.bias is not None
        norms = torch.linalg.vector_norm(features, dim=(1, 2, 3), keepdim=True, dtype=torch.float32)
        scale = norms / math.sqrt(features[0].numel()) + 1e-4
        # Divided after the convolution, of which the features have the most channels before.
        mixed = F.conv2d(features, lateral.weight) / scale + lateral.bias[:, None, None]
        found: Tensor = self.norms[number](mixed)
        return found


def residual(width: int, groups: int, block: str) -> nn.Sequential:
    """Two 3x3 convolutions, each after a GELU and before a group norm."""
    made: list[nn.Module] = []
    for _ in range(2):
        made.append(nn.GELU())
        if block == "separable":
            made.append(nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False))
            made.append(nn.Conv2d(width, width, 1))
        else:
            made.append(nn.Conv2d(width, width, 3, padding=1))
        made.append(nn.GroupNorm(groups, width))
    return nn.Sequential(*made)


def cells_for(images: Sequence[int], coarsest: Sequence[int], most: int = CELLS) -> int:
    """Cells along the longer side of a map: fewer for small images, never fewer than the features.

    >>> cells_for((224, 224), (7, 7)), cells_for((64, 64), (2, 2)), cells_for((28, 28), (3, 3))
    (28, 16, 14)
    """
    return max(*coarsest, min(most, max(FEWEST, max(images) // PIXELS)))


def resized(x: Tensor, size: Sequence[int], mode: str = "bilinear") -> Tensor:
    """Maps at another size, by matrix products: [N,C,h,w] -> [N,C,H,W].

    The values are those of `F.interpolate`, antialiased where maps shrink. Its gradient takes a GPU
    ten times as long and has no fixed order.
    """
    (h, w), (rows, columns) = x.shape[2:], size
    if (h, w) == (rows, columns):
        return x
    down, right = (
        line_weights(small, large, mode, x.device, x.dtype)
        for small, large in ((h, rows), (w, columns))
    )
    if x.shape[1] == 1 or h * w * rows * columns > MATRIX:
        return down @ (x @ right.T)
    # One product for all channels of a cell, which stay the last axis in memory.
    cells = x.permute(0, 2, 3, 1).flatten(1, 2)
    products = torch.kron(down, right) @ cells
    found: Tensor = products.unflatten(1, (rows, columns)).permute(0, 3, 1, 2)
    return found


@kept
def line_weights(
    small: int, large: int, mode: str, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The weights of the cells of a line on those of another: [large,small]."""
    line = torch.eye(small, device="cpu")[None, None]
    found = F.interpolate(line, (small, large), mode=mode, antialias=large < small)[0, 0]
    return found.T.contiguous().to(device, dtype)
