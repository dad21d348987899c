"""The adapter that draws one nested map, and the mask of a given size cut out of it."""

import torch
import torch.nn.functional as F
from fills import enlarged
from torch import Tensor, nn

from networks import Features, Network

SIDE = 224


def _block(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.GELU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.GroupNorm(8, width),
        nn.GELU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.GroupNorm(8, width),
    )


def _resized(x: Tensor, side: int) -> Tensor:
    return x if x.shape[2] == side else F.interpolate(x, size=side, mode="bilinear")


class OrderMap(nn.Module):
    """Top-down over frozen features, plus a learned multiple of the class's evidence.

    The last convolution starts at zero, so the untrained map is the evidence's own order.

    Args:
        network: Whose features are read.
        width: Channels of the top-down path.
        cells: Cells per side of the map: 28, or 56 with features of stride 4 (of a ViT's third block).
        query: Whether the class's row of the head, projected, is compared with every cell.
        extra: Channels of further evidence at 14 cells.
    """

    def __init__(
        self,
        network: Network,
        width: int = 128,
        cells: int = 28,
        query: bool = False,
        extra: int = 0,
    ) -> None:
        super().__init__()
        self.sides = [side for side in (None, 14, 28, 56) if side is None or side <= cells]
        self.used = [3, 2, 1, 0][: len(self.sides)]  # from the last stage up
        self.lateral = nn.ModuleList([nn.Conv2d(network.channels[i], width, 1) for i in self.used])
        self.norms = nn.ModuleList([nn.GroupNorm(8, width) for _ in self.used])
        self.evidence = nn.Conv2d(3, width, 1)
        self.extra = nn.Conv2d(extra, width, 1) if extra else None
        self.blocks = nn.ModuleList([_block(width) for _ in self.used])
        self.out = nn.Conv2d(width, 1, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.multiple = nn.Parameter(torch.tensor(1.0))
        self.query = nn.Linear(network.weight.shape[1], width, bias=False) if query else None
        if query:
            nn.init.zeros_(self.query.weight)
            rows = network.weight.float()
            self.register_buffer("rows", (rows - rows.mean(0)) / rows.std(), persistent=False)

    def _read(self, number: int, features: Tensor) -> Tensor:
        values = features.float()
        scale = values.pow(2).mean((1, 2, 3), keepdim=True).sqrt() + 1e-4
        return self.norms[number](self.lateral[number](values / scale))

    def forward(
        self, features: Features, evidence: Tensor, targets: Tensor, extra: Tensor | None = None
    ) -> Tensor:
        """Return the map: four features, evidence [N,3,h,w], targets [N] -> [N,1,cells,cells]."""
        x = self._read(0, features[3]) + self.evidence(evidence)
        x = x + self.blocks[0](x)
        for number in range(1, len(self.used)):
            side = self.sides[number]
            x = _resized(x, side) + _resized(self._read(number, features[self.used[number]]), side)
            if side == 14 and self.extra is not None:
                x = x + self.extra(_resized(extra, side))
            x = x + self.blocks[number](x)
        z = self.out(x)
        if self.query is not None:
            asked = self.query(self.rows[targets])
            z = (
                z
                + torch.einsum("nchw,nc->nhw", x.to(asked.dtype), asked)[:, None]
                / x.shape[1] ** 0.5
            )
        return z + self.multiple * F.interpolate(evidence[:, :1], size=z.shape[2:], mode="bicubic")


def at_image_size(z: Tensor) -> Tensor:
    """Resize maps [N,1,h,w] to the image and divide each by its spread: [N,224,224]."""
    z = enlarged(z, SIDE)[:, 0]
    return z / (z.std((1, 2), keepdim=True) + 1e-4)


def mask_of_size(z: Tensor, size: Tensor, tau: float, hard: bool = False) -> Tensor:
    """Cut out each map's top share: z [N,H,W], size [N] -> mask [N,H,W] whose mean is the size.

    The threshold is found by bisection; its gradient is the implicit one, under which the mean of
    the soft mask stays where it is. With `hard` the mask is 0 or 1 and has the soft mask's gradient.
    """
    flat = z.flatten(1)
    with torch.no_grad():
        low, high = flat.amin(1) - 8 * tau, flat.amax(1) + 8 * tau
        for _ in range(18):
            middle = (low + high) / 2
            above = (
                flat > middle[:, None] if hard else torch.sigmoid((flat - middle[:, None]) / tau)
            )
            larger = above.float().mean(1) > size
            low, high = torch.where(larger, middle, low), torch.where(larger, high, middle)
        soft = torch.sigmoid((flat - middle[:, None]) / tau)
        weight = soft * (1 - soft)
        weight = weight / weight.sum(1, keepdim=True).clamp(min=1e-6)
    threshold = middle + (weight * (flat - flat.detach())).sum(1)
    mask = torch.sigmoid((z - threshold.view(-1, 1, 1)) / tau)
    if hard:
        mask = mask + ((z > threshold.view(-1, 1, 1)).to(mask) - mask).detach()
    return mask
