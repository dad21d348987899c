"""The eleven columns once more: one image, one mask, one model call at a time, and loops.

Written from the definitions alone, to be compared with what the package computes in batches.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor, nn

from sufficit import Leak, normalize
from sufficit.metrics.leakage import TENSORS
from sufficit.sums import LEVEL, Floats, moments, sums_of

COLUMNS = (
    "insertion_pixel",
    "deletion_pixel",
    "insertion_percent",
    "deletion_percent",
    "fid_minus_pixel",
    "fid_plus_pixel",
    "fid_minus_percent",
    "fid_plus_percent",
    "base_score",
    "mask_penalty",
    "msi",
)


def reference_columns(
    logits_of: Callable[[Tensor], Tensor],
    image: Tensor,
    heatmap: Tensor,
    target: int | None = None,
    *,
    alpha_min: float = 0.5,
    score: str = "accuracy",
    fill: Tensor | float = 0.0,
    value_step: float = 0.01,
    percent_step: float = 0.02,
) -> dict[str, float]:
    """Every column of one image: [C,H,W], [H,W] -> name to number.

    `logits_of` takes one image in 0..1, [C,H,W], and gives its logits, [classes]. `fill` is
    anything that broadcasts to the image.
    """
    if target is None:
        target = int(logits_of(image).argmax())
    fills = torch.as_tensor(fill, dtype=image.dtype)

    def softmax_and_hit(kept: np.ndarray) -> tuple[float, float]:
        masked = torch.where(torch.from_numpy(kept), image, fills)
        logits = logits_of(masked).detach().float()
        if logits.isnan().any():
            return math.nan, math.nan
        return float(logits.softmax(0)[target]), float(int(logits.argmax()) == target)

    def ask(kept: np.ndarray) -> float:
        confidence, hit = softmax_and_hit(kept)
        return hit if score == "accuracy" else confidence

    everything = np.ones(heatmap.shape, dtype=bool)
    clean = softmax_and_hit(everything)[0]

    def drop(kept: np.ndarray) -> float:
        return abs(clean - softmax_and_hit(kept)[0])

    values = heatmap.numpy().astype(np.float32)
    alphas = grid(value_step)
    above = [values > np.float32(a) for a in alphas]
    below = [values <= np.float32(a) for a in alphas]

    pixels = values.size
    ranks = rank_of_each_pixel(values)
    shares = grid(percent_step)
    counts = [whole_pixels(i, percent_step, pixels) for i in range(len(shares))]
    first = [ranks < count for count in counts]
    rest = [ranks >= count for count in counts]

    columns = {}
    for kind, kept, removed, axis in (
        ("pixel", above, below, alphas),
        ("percent", first, rest, shares),
    ):
        columns[f"insertion_{kind}"] = area(axis, [ask(mask) for mask in kept])
        columns[f"deletion_{kind}"] = area(axis, [ask(mask) for mask in removed])
        columns[f"fid_minus_{kind}"] = area(axis, [drop(mask) for mask in kept])
        columns[f"fid_plus_{kind}"] = area(axis, [drop(mask) for mask in removed])

    low = np.float32(alpha_min)
    points = [alpha_min] + [a for a in alphas if a > alpha_min]
    show = [ask(values > np.float32(a)) for a in points]
    hide = [ask((values > low) & (values <= np.float32(a))) for a in points]
    difference = ask(values > low) - ask(values <= low)
    base = 0.5 * (difference + mean_over(points, show) - mean_over(points, hide))
    penalty = float((values >= low).sum()) / pixels
    columns |= {"base_score": base, "mask_penalty": penalty, "msi": base - penalty}
    return {name: columns[name] for name in COLUMNS}


def grid(step: float) -> list[float]:
    """0, step, 2 step, ... and 1, whether or not the step divides it."""
    exact = Fraction(str(step))
    points = []
    i = 0
    while i * exact < 1:
        points.append(float(i * exact))
        i += 1
    return [*points, 1.0]


def whole_pixels(i: int, step: float, pixels: int) -> int:
    """Pixels in the i-th share, to the nearest whole one, halves up; in exact arithmetic."""
    share = min(i * Fraction(str(step)), Fraction(1))
    return math.floor(share * pixels + Fraction(1, 2))


def rank_of_each_pixel(values: np.ndarray) -> np.ndarray:
    """0 for the largest value; of two that are equal the first in reading order leads."""
    flat = values.ravel().tolist()
    order = sorted(range(len(flat)), key=lambda pixel: (-flat[pixel], pixel))
    ranks = np.empty(len(flat), dtype=int)
    for rank, pixel in enumerate(order):
        ranks[pixel] = rank
    return ranks.reshape(values.shape)


def area(axis: list[float], heights: list[float]) -> float:
    """Sum of trapezoids."""
    total = 0.0
    for i in range(1, len(axis)):
        total += (axis[i] - axis[i - 1]) * (heights[i] + heights[i - 1]) / 2
    return total


def mean_over(axis: list[float], heights: list[float]) -> float:
    """Area over length; over a single point the value there."""
    if len(axis) == 1:
        return heights[0]
    return area(axis, heights) / (axis[-1] - axis[0])


def one_at_a_time(
    model: nn.Module, mean: tuple[float, ...] | None = None, std: tuple[float, ...] | None = None
) -> Callable[[Tensor], Tensor]:
    """A model as a function of one image in 0..1."""

    def logits_of(image: Tensor) -> Tensor:
        seen = image
        if mean is not None and std is not None:
            seen = (image - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
        with torch.no_grad():
            return model(seen[None])[0]

    return logits_of


def small_net(channels: int = 3, size: tuple[int, int] = (8, 6), classes: int = 3, seed: int = 0):
    """A net of random weights, strong and centred so that what is hidden changes the answer."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(channels, 6, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * math.ceil(size[0] / 2) * math.ceil(size[1] / 2), classes),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        model[3].weight.mul_(0.3)
    return model.eval()


HEATMAPS = {
    "random": lambda values, _: values,
    "saturated": lambda values, _: (3 * values - 1).clamp(0, 1),
    "zeros": lambda values, _: torch.zeros_like(values),
    "ones": lambda values, _: torch.ones_like(values),
    "half": lambda values, _: torch.full_like(values, 0.5),
    "tied": lambda values, _: (values * 10).round() / 10,
    "two_valued": lambda values, _: torch.where(values > 0.6, 0.8, 0.3),
    "on_the_grid": lambda values, _: (values * 100).round() / 100,
    # The float32 next to a hundredth, above or below it.
    "a_hair_off": lambda values, coins: ((values * 100).round() / 100).nextafter(coins.round()),
}


def heatmaps_like(kind: str, n: int, size: tuple[int, int], seed: int = 0) -> Tensor:
    """Heatmaps of one kind: [n,*size]."""
    generator = torch.Generator().manual_seed(seed + 1)
    values, coins = (torch.rand(n, *size, generator=generator) for _ in range(2))
    return HEATMAPS[kind](values, coins)


def three_methods(n: int = 40) -> dict[str, np.ndarray]:
    """b is a little worse than a, and c much worse, image by image."""
    random = np.random.default_rng(0)
    images = random.normal(0, 3, n)
    return {
        "c": images - 1 + random.normal(0, 0.1, n),
        "a": images + random.normal(0, 0.1, n),
        "b": images - 0.01 + random.normal(0, 0.1, n),
    }


def gradient_case(n: int = 7, seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Images, gradient times input as heatmaps, and predictions with the last one changed."""
    model = small_net(seed=2)
    images = torch.rand(n, 3, 8, 6, generator=torch.Generator().manual_seed(seed))
    inputs = images.clone().requires_grad_()
    logits = model(inputs)
    targets = logits.argmax(1)
    margins = 1.5 * logits.gather(1, targets[:, None]).sum() - 0.5 * logits.sum()
    (gradients,) = torch.autograd.grad(margins, inputs)
    heatmaps = normalize((gradients * images).sum(1).clamp(min=0)).sqrt()
    targets[-1] = (targets[-1] + 1) % 3
    return images, heatmaps, targets


def leak_case(n: int = 10, seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Images, random heatmaps, and random targets of three classes."""
    images = torch.rand(n, 3, 8, 6, generator=torch.Generator().manual_seed(seed))
    targets = torch.randint(3, (n,), generator=torch.Generator().manual_seed(seed))
    return images, heatmaps_like("random", n, (8, 6), seed), targets


def join_leaks(parts: Sequence[Leak]) -> Leak:
    """The leak of several batches as one, in their order."""
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in TENSORS}
    return Leak(**joined, alpha_min=parts[0].alpha_min)


def intervals(values: Floats, level: float = LEVEL) -> tuple[Floats, Floats]:
    """The interval of each column's mean, NaN left out: [N,columns] -> low, high."""
    return moments(*sums_of(dict(enumerate(values.T))).groups()).interval(level)
