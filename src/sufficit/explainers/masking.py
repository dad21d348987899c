"""Maps from what the model says of masked images: occlusion, RISE, Kernel SHAP, Score-CAM.

The masks of the first three depend on the image's size and the seed, so all images share them.
Every masked image goes through `predict_views`. A method's own parameters are its options, as
`registry.py` lists them.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.explainers.cams import target_logits
from sufficit.perturbation.heatmaps import resize
from sufficit.perturbation.predict import predict_views, whole_values
from sufficit.perturbation.predictions import Score, confidence

_CHUNK_ELEMENTS = 2**26  # of masks at a time


def occlusion(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor,
    *,
    grid: int,
    window: int,
    fill: str,
    **_: Any,
) -> Tensor:
    """Return how much the confidence falls when a square is hidden: [N,H,W].

    Zeiler and Fergus 2014. The image has grid x grid cells, the square is `window` cells wide and
    moves by one cell. A pixel gets the mean over the squares that cover it.
    """
    h, w = images.shape[2:]
    if grid > min(h, w) or window > grid:
        raise UserError(
            f"occlusion needs window <= grid <= the image's side, got {window}, {grid} and"
            f" {min(h, w)} pixels: lower the first two"
        )
    starts = torch.arange(grid - window + 1)[:, None]
    lines = (_cell_of(side, grid) for side in (h, w))
    down, across = ((line >= starts) & (line < starts + window) for line in lines)  # [starts,side]
    hidden = (down[:, None, :, None] & across[None, :, None]).flatten(0, 1).to(images.device)
    # The whole image is one more mask, so that it needs no pass of its own.
    whole = torch.ones(1, h, w, dtype=torch.bool, device=images.device)
    seen = _scores(classifier, images, targets, torch.cat([whole, ~hidden]), fill, confidence)
    falls = seen[:, :1] - seen[:, 1:]
    weights = hidden.flatten(1).to(falls)  # [S,HW]
    return (falls @ weights / weights.sum(0)).view(-1, h, w)


# Its parameters are the options of the method.
def rise(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor,
    *,
    seed: int,
    masks: int,
    cells: int,
    share: float,
    fill: str,
    **_: Any,
) -> Tensor:
    """Return the mean of random masks, weighted by the confidence they leave: [N,H,W].

    Petsiuk et al. 2018, equation 6: cells are shown with probability `share`, enlarged bilinearly
    and shifted by a random part of a cell.
    """
    h, w = images.shape[2:]
    total = torch.zeros(len(images), h, w, device=images.device)
    whole = whole_values(classifier, images)
    for chunk in rise_masks((h, w), masks, cells, share, seed):
        here = chunk.to(images.device)
        seen = _scores(classifier, images, targets, here, fill, confidence, whole)
        total += (seen @ here.flatten(1)).view(-1, h, w)
    # Equation 6 divides by the expected number of masks that show a pixel.
    return total / (masks * share)


def rise_masks(
    size: tuple[int, int], masks: int, cells: int, share: float, seed: int
) -> Iterator[Tensor]:
    """Return RISE's masks for images of a size, in chunks: each [M,H,W] in 0..1."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    grids = (torch.rand(masks, cells, cells, generator=generator, device="cpu") < share).float()
    sides = [math.ceil(side / cells) for side in size]  # of a cell
    shifts = [torch.randint(side, (masks,), generator=generator).tolist() for side in sides]
    larger = [(cells + 1) * side for side in sides]
    step = max(1, _CHUNK_ELEMENTS // math.prod(larger))
    for start in range(0, masks, step):
        part = F.interpolate(grids[start : start + step, None], larger, mode="bilinear")[:, 0]
        downs, acrosses = (shift[start : start + step] for shift in shifts)
        yield torch.stack(
            [
                mask[down : down + size[0], across : across + size[1]]
                for mask, down, across in zip(part, downs, acrosses, strict=True)
            ]
        )


# Its parameters are the options of the method.
def kernel_shap(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor,
    *,
    seed: int,
    grid: int,
    samples: int,
    fill: str,
    **_: Any,
) -> Tensor:
    """Return Shapley values of the target's logit for grid x grid cells: [N,grid,grid].

    Lundberg and Lee 2017, theorem 2: least squares over coalitions, weighted by the Shapley kernel,
    with values that sum to the logit of the image minus that of the fill. Where `samples` allow it,
    every coalition is asked, and the values are exact.
    """
    h, w = images.shape[2:]
    if grid > min(h, w):
        raise UserError(f"grid of kernel-shap must be {min(h, w)} or less, got {grid}")
    shown, weights = coalitions(grid * grid, samples, seed)
    every = torch.cat([torch.zeros(1, grid * grid), torch.ones(1, grid * grid), shown])
    rows, columns = (_cell_of(side, grid) for side in (h, w))
    players = (rows[:, None] * grid + columns).to(images.device)  # [H,W]
    whole = whole_values(classifier, images)
    seen = torch.cat(
        [
            _scores(classifier, images, targets, part[:, players], fill, target_logits, whole)
            for part in every.to(images.device).split(max(1, _CHUNK_ELEMENTS // (h * w)))
        ],
        dim=1,
    )
    # Over the fill alone. The equations are small and may be nearly singular: double, on the CPU.
    gains = (seen[:, 1:] - seen[:, :1]).double().cpu()
    values = constrained_values(shown.double(), weights.double(), gains[:, 1:], gains[:, 0])
    return values.float().view(-1, grid, grid).to(images.device)


def coalitions(players: int, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return coalitions neither empty nor whole, and their weights: [S,P] of 0 and 1, [S].

    All of them by the Shapley kernel if there are no more than `samples`, else drawn in pairs of a
    coalition and its complement, with sizes by the kernel's mass and equal weights.

    >>> shown, weights = coalitions(2, 10, 0)
    >>> shown.tolist(), weights.tolist()
    ([[1.0, 0.0], [0.0, 1.0]], [0.5, 0.5])
    """
    if players == 1:  # its value is all there is
        return torch.zeros(1, 1), torch.ones(1)
    if players < 32 and 2**players - 2 <= samples:
        numbers = torch.arange(1, 2**players - 1, device="cpu")[:, None]
        shown = (numbers >> torch.arange(players, device="cpu")) & 1  # a bit for each player
        kernel = [
            (players - 1) / (math.comb(players, size) * size * (players - size))
            for size in shown.sum(1).tolist()
        ]
        return shown.float(), torch.tensor(kernel, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    sizes = torch.arange(1, players, dtype=torch.float64, device="cpu")
    pairs = -(-samples // 2)
    drawn = 1 + torch.multinomial(
        1 / (sizes * (players - sizes)), pairs, replacement=True, generator=generator
    )
    # Ranks of random numbers are a permutation: the first ones are a coalition of the size drawn.
    ranks = torch.rand(pairs, players, generator=generator, device="cpu").argsort(1).argsort(1)
    half = (ranks < drawn[:, None]).float()
    return torch.cat([half, 1 - half]), torch.ones(2 * pairs, device="cpu")


def constrained_values(shown: Tensor, weights: Tensor, values: Tensor, total: Tensor) -> Tensor:
    """Fit values to coalitions by weighted least squares: [S,P], [S], [N,S] -> [N,P].

    The values of an image sum to its `total` [N]: a Lagrange multiplier moves the free solution
    along the direction in which a sum is cheapest.
    """
    players = shown.shape[1]
    moment = (shown * weights[:, None]).T @ shown / weights.sum()
    # Else it is singular where no coalition tells two players apart.
    moment = moment + 1e-10 * torch.eye(players, dtype=moment.dtype)
    right = (values * weights) @ shown / weights.sum()  # [N,P]
    ones = torch.ones(players, 1, dtype=moment.dtype)
    free = torch.linalg.solve(moment, right.T)  # [P,N]
    slope = torch.linalg.solve(moment, ones)
    solved: Tensor = free - slope * (free.sum(0) - total) / slope.sum()
    return solved.T


def scorecam(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor,
    *,
    layer: str | None,
    channels: int = 0,
    **_: Any,
) -> Tensor:
    """Return channels weighted by the softmax of the logits that they leave as masks: [N,h,w].

    Wang et al. 2020, algorithm 1: each channel is enlarged to the image and stretched to 0..1. Only
    the `channels` with the highest mean in an image are asked, or all with 0.
    """
    n = len(images)
    h, w = images.shape[2:]
    with torch.no_grad():
        read, _logits = classifier.stages(images, (layer or classifier.feature_layer(images),))
    features = read[0].float()
    if 0 < channels < features.shape[1]:
        strongest = features.mean((2, 3)).topk(channels).indices
        features = features.take_along_dim(strongest[:, :, None, None], 1)
    step = max(1, _CHUNK_ELEMENTS // (n * h * w))
    logits = []
    whole = whole_values(classifier, images)
    for chunk in features.split(step, dim=1):
        masks = resize(chunk.flatten(0, 1), (h, w))  # [N*k,H,W], image after image
        low, high = (edge[:, None, None] for edge in masks.flatten(1).aminmax(dim=1))
        masks = (masks - low) / (high - low + 1e-8)  # grad-cam's epsilon
        through = torch.arange(len(masks))
        seen = through // chunk.shape[1]
        answers = predict_views(
            classifier,
            images,
            masks,
            (seen, through),
            targets=targets.cpu()[seen],
            score=target_logits,
            whole=whole,
        )
        logits.append(answers.confidences.cpu().view(n, -1))
    weights = torch.cat(logits, 1).softmax(1).to(features)
    return (features * weights[:, :, None, None]).sum(1)


# Its parameters are those of `predict_views`, whose views it makes.
def _scores(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor,
    masks: Tensor,
    fill: str,
    score: Score,
    whole: Tensor | None = None,
) -> Tensor:
    """Return the score of every image through every mask: [N,C,H,W], [M,H,W] -> [N,M].

    `whole` are the `whole_values` of the images, for callers that ask in chunks.
    """
    n = len(images)
    m = len(masks)
    # A score of the user's own takes the place of confidence; it is read as a logit is.
    score = score if classifier.score is None else target_logits
    seen = torch.arange(n).repeat_interleave(m)
    through = torch.arange(m).repeat(n)
    answers = predict_views(
        classifier,
        images,
        masks,
        (seen, through),
        targets=targets.cpu()[seen],
        fill=fill,
        score=score,
        whole=whole,
    )
    return answers.confidences.view(n, m).to(images.device)


def _cell_of(side: int, grid: int) -> Tensor:
    """Return the cell of each pixel of a line: [side].

    >>> _cell_of(10, 4)
    tensor([0, 0, 1, 1, 1, 2, 2, 2, 3, 3])
    """
    starts = torch.tensor([round(side * k / grid) for k in range(1, grid)], dtype=torch.long)
    return torch.bucketize(torch.arange(side), starts, right=True)
