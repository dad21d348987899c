"""Heatmaps that look at no model: what any method must beat."""

import torch
from torch import Tensor

from sufficit.perturbation.heatmaps import normalize


def random(images: Tensor, seed: int = 0) -> Tensor:
    """Uniform noise in each pixel, the same on every device: [N,C,H,W] -> [N,H,W]."""
    n, _, h, w = images.shape
    generator = torch.Generator(device="cpu").manual_seed(seed)
    noise = torch.rand(n, h, w, generator=generator, dtype=torch.float32, device="cpu")
    return noise.to(images.device)


def center(images: Tensor, seed: int = 0) -> Tensor:
    """A round hill in the middle, a quarter of each side wide: [N,C,H,W] -> [N,H,W].

    >>> center(torch.zeros(1, 3, 3, 3))[0]
    tensor([[0.0000, 0.2913, 0.0000],
            [0.2913, 1.0000, 0.2913],
            [0.0000, 0.2913, 0.0000]])
    """
    n, _, h, w = images.shape
    hill = _bell(h, images.device)[:, None] * _bell(w, images.device)
    return normalize(hill[None]).expand(n, h, w).clone()


def _bell(size: int, device: torch.device) -> Tensor:
    """A Gaussian over -1..1 of standard deviation 0.5, at the middles of the pixels."""
    middles = (torch.arange(size, device=device) + 0.5) / size * 2 - 1
    return torch.exp(-2 * middles.square())
