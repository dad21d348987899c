"""Extremal perturbation: the smooth mask of a given area that keeps the target's logit highest."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.classifier.classifier import Classifier
from sufficit.explainers.forward_pass import target_logits_with_graph
from sufficit.perturbation.fills import blur_matrix

CELLS = 32  # per side of the mask: 7 pixels at 224
PULL = 300.0  # weight of the area's loss at the start
GROWTH = 1.0035  # of that weight per step
RATE = 0.01  # of the gradient descent
MOMENTUM = 0.9
SHARPNESS = 20.0  # of the smooth maximum
LEVELS = 8  # of blur between the image and its most blurred copy


def extremal_perturbation(
    classifier: Classifier, images: Tensor, targets: Tensor, *, area: float, steps: int, **__: Any
) -> Tensor:
    """Return the mask of each image after gradient steps, smoothed: [N,H,W] in 0..1.

    Fong et al. 2019, equations 4 to 7: what the mask hides is blurred; a mask is a smooth maximum
    of Gaussians around its cells; its sorted values are drawn to a step that has the area.
    """
    n, _, h, w = images.shape
    cell = max(1, round(min(h, w) / CELLS))
    shape = (math.ceil(h / cell), math.ceil(w / cell))
    with torch.enable_grad(), classifier.in_eval_mode():
        pyramid = blurred(images)
        cells = torch.full((n, *shape), 0.5, device=images.device, requires_grad=True)
        speed = torch.zeros_like(cells)
        pull = PULL
        # Plain descent with momentum, by hand: cells are clamped after each step.
        for _ in range(steps):
            masks = smooth_masks(cells, (h, w), cell)
            inputs = classifier.normalize(perturbed(pyramid, masks))
            kept = target_logits_with_graph(classifier, inputs, targets)
            loss = pull * area_loss(masks, area).sum() - kept.sum()
            (gradient,) = torch.autograd.grad(loss, cells)
            with torch.no_grad():
                speed = MOMENTUM * speed + gradient
                cells = (cells - RATE * speed).clamp(0, 1).requires_grad_()
            pull *= GROWTH
        masks = smooth_masks(cells, (h, w), cell).detach()
    return masks.clamp(0, 1)


def blurred(images: Tensor) -> Tensor:
    """Return the images from their most blurred copy to themselves: [L,N,C,H,W]."""
    h, w = images.shape[2:]
    most = min(h, w) / 10  # as wide as the fill `blur`
    copies = []
    for level in range(LEVELS, 0, -1):
        sigma = most * level / LEVELS
        down, across = (blur_matrix(s, sigma, images.device, images.dtype) for s in (h, w))
        copies.append(down @ images @ across.mT)
    return torch.stack([*copies, images])


def perturbed(pyramid: Tensor, masks: Tensor) -> Tensor:
    """Return each pixel from the level its mask says: 0 most blurred, 1 the image: [N,C,H,W]."""
    place = masks * (len(pyramid) - 1)
    mixed = torch.zeros_like(pyramid[0])
    for level, copy in enumerate(pyramid):  # linear between two levels
        mixed = mixed + (1 - (place - level).abs()).clamp(min=0)[:, None] * copy
    return mixed


def smooth_masks(cells: Tensor, size: tuple[int, int], cell: int) -> Tensor:
    """Return smooth maximum of Gaussians around the cells: [N,a,b] -> [N,H,W].

    Equation 7: each pixel is the mean of the cells around it, weighted by a Gaussian of their
    distance, where the exponential of a value adds to its weight.
    """
    n, a, b = cells.shape
    reach = 3  # cells on each side
    padded = F.pad(cells[:, None], (reach,) * 4, mode="replicate")
    around = F.unfold(padded, 2 * reach + 1).view(n, -1, a, b)
    # Pixels between the cells: their neighbours' values, resized.
    values = F.interpolate(around, (a * cell, b * cell), mode="nearest")[..., : size[0], : size[1]]
    weights = _gaussians(size, cell, reach).to(cells)
    peaks = weights * values
    shares = (SHARPNESS * peaks).softmax(1)
    return (shares * peaks).sum(1)


def _gaussians(size: tuple[int, int], cell: int, reach: int) -> Tensor:
    """Return the kernel from each pixel to the cells around its own: [K,H,W].

    It is 1 at a cell's middle.
    """
    steps = torch.arange(-reach, reach + 1, device="cpu")

    def line(side: int) -> Tensor:
        pixels = torch.arange(side, device="cpu")
        middles = (pixels // cell)[None] + steps[:, None] + 0.5  # of the cells around, in cells
        return ((pixels + 0.5) / cell - middles).square()  # [2*reach+1,side]

    down = line(size[0])
    across = line(size[1])
    distances = down[:, None, :, None] + across[None, :, None, :]
    return torch.exp(-distances / 2).flatten(0, 1)


def area_loss(masks: Tensor, area: float) -> Tensor:
    """Return how far the sorted mask is from a step of the area: [N,H,W] -> [N].

    >>> area_loss(torch.tensor([[[0.0, 1.0], [0.0, 0.5]]]), 0.25)  # 0, 0, 0.5, 1 against 0, 0, 0, 1
    tensor([0.0625])
    """
    ordered = masks.flatten(1).sort(dim=1).values
    wanted = torch.zeros_like(ordered[0])
    wanted[round((1 - area) * len(wanted)) :] = 1
    return (ordered - wanted).square().mean(1)
