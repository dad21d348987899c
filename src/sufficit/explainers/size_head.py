"""The size at which an order is cut, predicted for each image from the order itself."""

import torch
from torch import Tensor, nn

LEVELS = 16  # of an order, at which it is described
NUMBERS = 2 * LEVELS  # that describe an order
_SMALL = 1e-6


class SizeHead(nn.Module):
    """Orders [N,h,w] -> the share of each image to mark, one of the sizes that it knows: [N].

    A linear map of 32 numbers gives the MSI at every size, and the highest decides. Its weights are
    found in one step, by `fit`.

    >>> head = SizeHead((0.1, 0.5))
    >>> head.curve.copy_(torch.tensor([0.0, 1.0]))
    tensor([0., 1.])
    >>> head(torch.rand(3, 4, 4))
    tensor([0.5000, 0.5000, 0.5000])
    """

    sizes: Tensor  # [S]
    middle: Tensor  # [32] and
    spread: Tensor  # [32] of the numbers
    weight: Tensor  # [32,S]
    curve: Tensor  # [S] the mean MSI

    def __init__(self, sizes: tuple[float, ...]) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.tensor(sizes))
        self.register_buffer("middle", torch.zeros(NUMBERS))
        self.register_buffer("spread", torch.ones(NUMBERS))
        self.register_buffer("weight", torch.zeros(NUMBERS, len(sizes)))
        self.register_buffer("curve", torch.zeros(len(sizes)))

    def forward(self, orders: Tensor) -> Tensor:
        """The size for each order."""
        found: Tensor = self.sizes[self.curves(described(orders)).argmax(1)]
        return found

    def curves(self, numbers: Tensor) -> Tensor:
        """The MSI at every size, as predicted from what describes orders: [N,32] -> [N,S]."""
        return (numbers - self.middle) / self.spread @ self.weight + self.curve

    @torch.no_grad()
    def fit(self, numbers: Tensor, scores: Tensor, penalty: float) -> "SizeHead":
        """Ridge regression of MSI [N,S] on what describes the orders [N,32]; return itself.

        The penalty counts per image. With a large one every image gets the size of the best mean.
        """
        x, y = numbers.double().cpu(), scores.double().cpu()
        middle, spread = x.mean(0), x.std(0, correction=0).clamp(min=_SMALL)
        x = (x - middle) / spread
        square = x.T @ x + penalty * len(x) * torch.eye(NUMBERS, dtype=torch.float64, device="cpu")
        weight = torch.linalg.solve(square, x.T @ (y - y.mean(0)))
        for name, value in (
            *(("middle", middle), ("spread", spread)),
            *(("weight", weight), ("curve", y.mean(0))),
        ):
            getattr(self, name).copy_(value)
        return self


def described(orders: Tensor) -> Tensor:
    """How the values of each order are spread: [N,h,w] -> [N,32].

    Its values at 16 equal steps of rank, with mean 0 and spread 1, and the shares of its cells
    above 16 levels between its lowest and its highest value.

    >>> described(torch.tensor([[[0.0, 1.0], [2.0, 3.0]]])).shape
    torch.Size([1, 32])
    """
    flat = orders.flatten(1).float()
    cells = flat.shape[1]
    sorted_values = flat.topk(cells, dim=1).values
    steps = ((torch.arange(LEVELS, device=flat.device) + 0.5) / LEVELS * (cells - 1)).round().long()
    spread = flat.std(1, keepdim=True) + _SMALL
    by_rank = (sorted_values[:, steps] - flat.mean(1, keepdim=True)) / spread
    high, low = sorted_values[:, :1], sorted_values[:, -1:]
    levels = (torch.arange(LEVELS, device=flat.device) + 0.5) / LEVELS
    scaled = (flat - low) / (high - low + _SMALL)
    above = (scaled[:, None] > levels[:, None]).float().mean(2)
    return torch.cat([by_rank, above], 1)
