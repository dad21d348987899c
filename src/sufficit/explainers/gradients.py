"""Attributions from gradients at the image: signed maps [N,H,W], summed over the channels.

Images are in 0..1 and gradients are of the target's logit with respect to them, so a model's mean
and std are part of the model. Random numbers depend on the seed alone, not on the batch.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.classifier.checkpoint import View
from sufficit.classifier.classifier import Classifier
from sufficit.data.images import open_images
from sufficit.errors import UserError
from sufficit.explainers.forward_pass import no_gradient, target_logits_with_graph
from sufficit.files import place
from sufficit.perturbation.fills import fill_for
from sufficit.perturbation.predict import halved, usual_batch

Variant = Callable[[slice], tuple[Tensor, Tensor | float]]
"""Some of the samples -> points [S,N,C,H,W], and what their gradients are multiplied by."""


def image_gradients(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
    """Return gradients of the targets' logits at the images: [N,C,H,W], [N] -> [N,C,H,W]."""
    with torch.enable_grad(), classifier.in_eval_mode():
        leaf = images.detach().float().requires_grad_()
        # A copy, because a model may overwrite its input.
        inputs = classifier.normalize(leaf.clone())
        total = target_logits_with_graph(classifier, inputs, targets).sum()
        (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
    if gradient is None:
        raise no_gradient()
    return gradient


def mean_gradient(
    classifier: Classifier, images: Tensor, targets: Tensor, samples: int, variant: Variant
) -> Tensor:
    """Return the mean of factor * gradient over each image's samples: [N,H,W].

    It is summed over the channels. Several samples of all images go through the model together, as
    many as fit; what does not fit is halved.
    """
    n = len(images)
    total = torch.zeros_like(images, dtype=torch.float32)
    start = 0
    # A backward pass keeps what a forward pass frees.
    size = max(1, usual_batch(classifier, images.shape[1:]) // 4 // n)
    while start < samples:
        part = slice(start, min(start + size, samples))
        count = part.stop - start
        gradients = None
        try:
            points, factor = variant(part)
            flat = image_gradients(classifier, points.flatten(0, 1), targets.repeat(count))
            gradients = flat.unflatten(0, (count, n))
            total = total + (factor * gradients).sum(0)
        except torch.OutOfMemoryError:
            if count == 1:
                raise  # fewer images may fit
        if gradients is None:  # out of the handler, where the exception still holds the memory
            size = halved(count)
            continue
        start += count
    return (total / samples).sum(1)


def input_x_gradient(classifier: Classifier, images: Tensor, targets: Tensor, **_: Any) -> Tensor:
    """Return the image times its gradient (Shrikumar et al. 2016): [N,C,H,W] -> [N,H,W]."""
    return (images * image_gradients(classifier, images, targets)).sum(1)


def integrated_gradients(
    classifier: Classifier, images: Tensor, targets: Tensor, *, steps: int, baseline: str, **_: Any
) -> Tensor:
    """Return gradients along the line from a baseline, times image minus baseline: [N,H,W].

    Sundararajan et al. 2017, equation 3, with the middle of each step.
    """
    away = images - fill_for(images, baseline)

    def variant(part: slice) -> tuple[Tensor, Tensor | float]:
        shares = (torch.arange(part.start, part.stop, device=images.device) + 0.5) / steps
        return images - (1 - shares)[:, None, None, None, None] * away, away

    return mean_gradient(classifier, images, targets, steps, variant)


def expected_gradients(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor,
    *,
    seed: int,
    samples: int,
    baselines: str,
    **_: Any,
) -> Tensor:
    """Return integrated gradients from random baselines, one random point each: [N,H,W].

    Erion et al. 2021, equation 4. All images have the same baselines and points.
    """
    # Drawn on the CPU, as everywhere: a GPU draws other numbers from the same seed.
    generator = torch.Generator(device="cpu").manual_seed(seed)
    shares = torch.rand(samples, 1, 1, 1, 1, generator=generator, device="cpu").to(images.device)
    if baselines == "noise":
        drawn = torch.rand(samples, *images.shape[1:], generator=generator, device="cpu")
    else:
        drawn = _read(baselines, classifier.view, samples, tuple(images.shape[1:]), seed)

    def variant(part: slice) -> tuple[Tensor, Tensor | float]:
        away = images - drawn[part, None].to(images)
        return images - (1 - shares[part]) * away, away

    return mean_gradient(classifier, images, targets, samples, variant)


def smoothgrad(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor,
    *,
    seed: int,
    samples: int,
    noise: float,
    **_: Any,
) -> Tensor:
    """Return the mean gradient at noisy copies of the image (Smilkov et al. 2017): [N,H,W].

    The noise has a std of `noise` times the range of the image, and is the same for all images.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    shape = (samples, 1, *images.shape[1:])
    drawn = torch.randn(shape, generator=generator, device="cpu")
    width = noise * (images.amax((1, 2, 3)) - images.amin((1, 2, 3)))[:, None, None, None]

    def variant(part: slice) -> tuple[Tensor, Tensor | float]:
        return images + width * drawn[part].to(images), 1.0

    return mean_gradient(classifier, images, targets, samples, variant)


@lru_cache(maxsize=2)  # every batch asks for the same
def _read(
    folder: str, view: View | None, samples: int, shape: tuple[int, ...], seed: int
) -> Tensor:
    """Return images of a folder, drawn by seed, at the size of the model's input: [S,C,H,W]."""
    if not place(folder).exists():
        raise UserError(f"baselines must be noise or a folder of images, got {folder!r}")
    files = list(open_images(folder))
    generator = torch.Generator(device="cpu").manual_seed(seed)
    chosen = torch.randint(len(files), (samples,), generator=generator).tolist()
    pixels = {i: files[i].read(view)[None] for i in {*chosen}}  # one may be drawn several times
    sized = {i: F.interpolate(image, shape[1:], mode="bilinear") for i, image in pixels.items()}
    return torch.cat([sized[i].expand(1, *shape) for i in chosen])
