"""One step of training an order: views -> evidence and order -> regions of random sizes -> loss.

It is that of an `OrderRecipe`, as the default recipe `robust` is.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from sufficit.classifier.classifier import Classifier
from sufficit.explainers.lax import Lax
from sufficit.explainers.order_net import resized
from sufficit.training.recipes import OrderRecipe, mixed_fills

SMALLEST = 0.6  # side of a crop
HALVINGS, NEWTON_STEPS = 8, 3  # towards a threshold


# A step is a pure function, tested against a slow one, so that all it depends on comes in here.
def order_step(
    classifier: Classifier,
    lax: Lax,
    order_of: Callable[..., Tensor],
    images: Tensor,
    labels: Tensor | None,
    recipe: OrderRecipe,
    generator: Generator,
    *,
    done: float,
    flips: bool,
) -> dict[str, Tensor]:
    """The loss of a batch, and numbers to report; the classifier must be frozen, in eval mode.

    `order_of` is the adapter as the trainer wraps it. `done` is the finished share of the training.
    """
    assert lax.head is not None
    views, whole = random_views(images, recipe.crops, recipe.flips if flips else 0.0, generator)
    with precision_of(classifier):
        seen = lax.look(classifier, views)
        # A crop may show another class, and so may a mirrored digit.
        said = seen.logits.argmax(1)
        targets = said if labels is None else torch.where(whole, labels, said)
        features, evidence = lax.head.read(seen, lax.layers, targets)
    cells = order_of(features, evidence)
    # Thresholds and fills in float32: of a mask's gradient little is left in bfloat16.
    with torch.autocast(views.device.type, enabled=False):
        sizes = random_sizes(len(views), recipe.sizes, generator)
        softness = recipe.softness_after(done)
        masks = mask_of_size(at_image_size(cells, views), sizes, softness)[:, None]
        regions = torch.lerp(mixed_fills(views, recipe.fills, generator), views, masks)
        rests = torch.lerp(views, mixed_fills(views, recipe.fills, generator), masks)
        inputs = classifier.normalize(torch.cat([regions, rests]))
    with precision_of(classifier):
        kept, rest = classifier.logits_of(inputs).float().chunk(2)
    return {
        "loss": order_loss(kept, rest, targets, recipe.power, recipe.rest),
        "accuracy": (kept.argmax(1) == targets).float().mean(),
        "accuracy_of_rest": (rest.argmax(1) == targets).float().mean(),
    }


def precision_of(classifier: Classifier) -> AbstractContextManager[object]:
    """Inside, autocast is as it was for a classifier in float32, and off for one in bfloat16."""
    if classifier.dtype == torch.float32:
        return nullcontext()
    return torch.autocast(classifier.device.type, enabled=False)


def random_views(
    images: Tensor, crops: float, flips: float, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Some images cropped, some mirrored, and which are left as they are: [N,C,H,W], bool [N]."""
    n, device = len(images), images.device
    if not crops and not flips:
        return images, torch.ones(n, dtype=torch.bool, device=device)
    drawn = torch.rand(5, n, generator=generator, device=device)
    cropped, mirrored = drawn[0] < crops, drawn[1] < flips
    side = torch.where(cropped, SMALLEST + (1 - SMALLEST) * drawn[2], 1.0)
    theta = torch.zeros(n, 2, 3, device=device)
    theta[:, 0, 0] = torch.where(mirrored, -side, side)
    theta[:, 1, 1] = side
    theta[:, :, 2] = (2 * drawn[3:].T - 1) * (1 - side)[:, None]
    with torch.autocast(device.type, enabled=False):
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        views = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    whole = ~(cropped | mirrored)
    return torch.where(whole.view(-1, 1, 1, 1), images, views), whole


def at_image_size(order: Tensor, images: Tensor) -> Tensor:
    """Orders at the size of the images, divided by their spread: [N,h,w] -> [N,H,W]."""
    with torch.autocast(order.device.type, enabled=False):  # the product of matrices too
        large = resized(order[:, None].float(), images.shape[2:])[:, 0]
        return large / (large.std((1, 2), keepdim=True) + 1e-4)


def random_sizes(n: int, ends: tuple[float, float], generator: Generator) -> Tensor:
    """Shares of an image between the ends, log-uniform: [n]."""
    least, most = ends
    drawn = torch.rand(n, generator=generator, device=generator.device)
    return least * torch.exp(drawn * math.log(most / least))


def mask_of_size(order: Tensor, sizes: Tensor, softness: float) -> Tensor:
    """Masks of the first pixels whose mean is the size: [N,H,W], [N] -> [N,H,W] in 0..1.

    M = sigmoid((z - t) / softness), with the threshold t that makes the mean of M the size. Its
    gradient is the implicit one, that of a mean which stays: dt/dz is M (1 - M) over its sum.

    >>> order = torch.tensor([[[4.0, 3.0], [2.0, 1.0]]])
    >>> mask_of_size(order, torch.tensor([0.5]), 0.01).round(decimals=3)
    tensor([[[1., 1.],
             [0., 0.]]])
    """
    found: Tensor = _MaskOfSize.apply(order.flatten(1) / softness, sizes)
    return found.view_as(order)


class _MaskOfSize(torch.autograd.Function):
    """sigmoid(z - t) with mean `sizes`: [N,P], [N] -> [N,P]. One function, for speed on a GPU."""

    @staticmethod
    def forward(ctx: Any, order: Tensor, sizes: Tensor) -> Tensor:
        """Halve the interval of the threshold, then take Newton's steps within it."""
        low, high = order.aminmax(dim=1)
        # Below the lowest value minus 8 a mask would be all ones.
        low, high = low - 8, high + 8
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            larger = (order - middle[:, None]).sigmoid().mean(1) > sizes
            low, high = torch.where(larger, middle, low), torch.where(larger, high, middle)
        threshold = (low + high) / 2
        for _ in range(NEWTON_STEPS):
            masks = (order - threshold[:, None]).sigmoid()
            mean = masks.mean(1)
            slope = (mean - masks.square().mean(1)).clamp(min=1e-9)
            threshold = (threshold + (mean - sizes) / slope).clamp(low, high)
        masks = (order - threshold[:, None]).sigmoid()
        ctx.save_for_backward(masks)
        return masks

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient through the masks, and through the threshold that all pixels share."""
        (masks,) = ctx.saved_tensors
        slopes = masks * (1 - masks)
        own = gradients[0] * slopes
        shared = own.sum(1, keepdim=True) / slopes.sum(1, keepdim=True).clamp(min=1e-6)
        return torch.addcmul(own, slopes, shared, value=-1), None


def order_loss(kept: Tensor, rest: Tensor, targets: Tensor, power: float, weight: float) -> Tensor:
    """(1 - p^power) / power of regions, plus a weight times p of the rests: [N,C] twice, [N].

    >>> even = torch.zeros(1, 4)  # p = 1/4, so 2 (1 - 1/2) + 1/8
    >>> order_loss(even, even, torch.tensor([0]), 0.5, 0.5)
    tensor(1.1250)
    """
    index = targets[:, None]
    in_region = kept.softmax(1).gather(1, index).clamp(1e-6, 1)
    in_rest = rest.softmax(1).gather(1, index)
    return ((1 - in_region**power) / power).mean() + weight * in_rest.mean()
