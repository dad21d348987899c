"""The adapter that draws one nested map, and the mask of a given size cut out of it."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from fills import bilinear_matrix, enlarged
from torch import Tensor, nn

from networks import Features, Network

SIDE = 224


def _convolution(width: int, kind: str) -> nn.Module:
    if kind == "separable":  # an eighth of the multiplications
        cells = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        return nn.Sequential(cells, nn.Conv2d(width, width, 1))
    return nn.Conv2d(width, width, 3, padding=1)


def _block(width: int, kind: str) -> nn.Sequential:
    return nn.Sequential(
        nn.GELU(),
        _convolution(width, kind),
        nn.GroupNorm(8, width),
        nn.GELU(),
        _convolution(width, kind),
        nn.GroupNorm(8, width),
    )


class Attention(nn.Module):
    """Cells read each other: self-attention over [N,C,h,w], added to what is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.joined = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the cells with what they read of others."""
        cells = self.norm(x).flatten(2).mT
        q, k, v = self.joined(cells).unflatten(2, (12, -1)).transpose(1, 2).chunk(3, 1)
        read = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(read).mT.reshape(x.shape)


@lru_cache
def _cells_matrix(small: int, large: int, device: str) -> Tensor:
    """Return the matrix that resizes all cells of a map bilinearly: [large**2,small**2]."""
    line = bilinear_matrix(small, large, device)
    return torch.kron(line, line)


def _resized(x: Tensor, side: int) -> Tensor:
    """Resize [N,C,h,h] by one matrix product: interpolation is slow backward on a GPU."""
    if x.shape[2] == side:
        return x
    matrix = _cells_matrix(x.shape[2], side, str(x.device)).to(x.dtype)
    cells = x.permute(0, 2, 3, 1).flatten(1, 2)
    return (matrix @ cells).unflatten(1, (side, side)).permute(0, 3, 1, 2)


class OrderMap(nn.Module):
    """Top-down over frozen features, plus a learned multiple of the class's evidence.

    The last convolution starts at zero, so the untrained map is the evidence's own order.

    Args:
        network: Whose features are read.
        width: Channels of the top-down path.
        cells: Cells per side of the map: 28, or 56 with features of stride 4 (a ViT's third block).
        query: Whether the class's row of the head, projected, is compared with every cell.
        extra: Channels of further evidence at 14 cells.
        kind: Of the convolutions: full or separable.
        attention: Whether cells of the two coarsest levels read each other.
        lean: Whether the evidence is the class's own alone, without the other classes'.
        last: Channels of the finest level, where not `width`.
    """

    def __init__(
        self,
        network: Network,
        width: int = 128,
        cells: int = 28,
        query: bool = False,
        extra: int = 0,
        kind: str = "full",
        attention: bool = False,
        lean: bool = False,
        last: int | None = None,
    ) -> None:
        super().__init__()
        self.lean = lean
        self.sides = [side for side in (None, 14, 28, 56) if side is None or side <= cells]
        self.used = [3, 2, 1, 0][: len(self.sides)]  # from the last stage up
        widths = [width] * (len(self.used) - 1) + [last or width]
        self.lateral = nn.ModuleList(
            [nn.Conv2d(network.channels[i], w, 1) for i, w in zip(self.used, widths, strict=True)]
        )
        self.norms = nn.ModuleList([nn.GroupNorm(8, w) for w in widths])
        self.narrow = nn.Conv2d(width, last, 1) if last else nn.Identity()
        self.attention = nn.ModuleList([Attention(width) for _ in range(2)] if attention else [])
        self.evidence = nn.Conv2d(3, width, 1)
        self.extra = nn.Conv2d(extra, width, 1) if extra else None
        self.blocks = nn.ModuleList([_block(w, kind) for w in widths])
        self.out = nn.Conv2d(widths[-1], 1, 1)
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
        shown = torch.cat([evidence[:, :1], 0 * evidence[:, 1:]], 1) if self.lean else evidence
        x = self._read(0, features[3]) + self.evidence(shown)
        x = x + self.blocks[0](x)
        if self.attention:
            x = self.attention[0](x)
        for number in range(1, len(self.used)):
            side = self.sides[number]
            if number == len(self.used) - 1:
                x = self.narrow(x)
            x = _resized(x, side) + _resized(self._read(number, features[self.used[number]]), side)
            if side == 14 and self.extra is not None:
                x = x + self.extra(_resized(extra, side))
            x = x + self.blocks[number](x)
            if self.attention and number == 1:
                x = self.attention[1](x)
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
    the soft mask stays where it is. With `hard` the mask is 0 or 1, with the soft mask's gradient.
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
