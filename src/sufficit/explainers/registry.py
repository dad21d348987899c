"""Every method by its name on the command line; a new one is a function and a line here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from sufficit.errors import UserError, unknown
from sufficit.explainers import cams
from sufficit.explainers.rollout import rolled
from sufficit.perturbation.heatmaps import normalize


@dataclass(frozen=True)
class Explainer:
    """A method; `needs` says what `draw` gets.

    - gradients: draw(features [N,K,h,w], gradients of `score` [N,K,h,w]) -> maps [N,h,w], where
      score(logits [N,C], targets [N]) -> [N]
    - features: draw(features [N,K,h,w]) -> maps [N,h,w]
    - attention: draw(map so far or None, a block's attention), both [N,T,T] -> map so far [N,T,T]
    - images: draw(images [N,C,H,W], seed) -> heatmaps [N,H,W], final

    Methods with the same `score` share one backward pass.
    """

    description: str
    needs: Literal["gradients", "features", "attention", "images"]
    draw: Callable[..., Tensor]
    score: Callable[[Tensor, Tensor], Tensor] = cams.target_logits
    layer: str | None = None  # the layer it reads, if that is always the same
    final: bool = False  # it draws values in 0..1, which are only resized
    check: Callable[[], None] = lambda: None  # raises if it does not fit the classifier
    class_agnostic: bool = False  # it draws one map for every class


def finer_cam(
    reading: Literal["weighted", "mean"] = "weighted",
    strength: float | None = None,
    nearest: int = 3,
) -> Explainer:
    """Finer-CAM as the grad-cam package computes it or, with "mean", as its paper defines it.

    Both compare the target's logit y with the `nearest` logits y_j, or as many as there are.
    "weighted": the mean of y - 1.0 * y_j, weighted by the softmax of class j, which is
    differentiated too. "mean": y - 0.6 * the plain mean of y_j. `strength` replaces the 1.0 or
    0.6. Use it as `explain(classifier, images, method=finer_cam("mean"))`.
    """
    readings = {"weighted": (cams.weighted_contrast, 1.0), "mean": (cams.mean_contrast, 0.6)}
    if reading not in readings:
        raise unknown("reading of Finer-CAM", reading, readings)
    if nearest < 1:
        raise UserError(f"nearest must be 1 or more classes, got {nearest}")
    contrast, usual = readings[reading]
    score = partial(contrast, strength=usual if strength is None else strength, nearest=nearest)
    line = f"Grad-CAM of the target's logit against those of the {nearest} nearest classes"
    return Explainer(line, "gradients", cams.gradcam, score)


def random(images: Tensor, seed: int = 0) -> Tensor:
    """Uniform noise in each pixel, the same on every device: [N,C,H,W] -> [N,H,W]."""
    n, _, h, w = images.shape
    generator = torch.Generator(device="cpu").manual_seed(seed)
    noise = torch.rand(n, h, w, generator=generator, dtype=torch.float32, device="cpu")
    return noise.to(images.device)


def center(images: Tensor, seed: int = 0) -> Tensor:
    """A Gaussian in the middle, a quarter of each side wide: [N,C,H,W] -> [N,H,W].

    >>> center(torch.zeros(1, 3, 3, 3))[0]
    tensor([[0.0000, 0.2913, 0.0000],
            [0.2913, 1.0000, 0.2913],
            [0.0000, 0.2913, 0.0000]])
    """
    n, _, h, w = images.shape
    middles = [(torch.arange(side, device=images.device) + 0.5) / side * 2 - 1 for side in (h, w)]
    down, right = (torch.exp(-2 * middle.square()) for middle in middles)  # over -1..1
    return normalize((down[:, None] * right)[None]).expand(n, h, w).clone()


_PLUS_PLUS = "channels weighted by their positive gradients, higher orders included"
_LAYER = "each cell weighted by its own positive gradient"
_KPCA = "first kernel principal component of the features, the same for every class"
_ROLLOUT = "product of all blocks' attention, the same for every class; for transformers"
EXPLAINERS: dict[str, Explainer] = {
    "gradcam": Explainer("channels weighted by their mean gradient", "gradients", cams.gradcam),
    "gradcam++": Explainer(_PLUS_PLUS, "gradients", cams.gradcam_plus_plus),
    "layercam": Explainer(_LAYER, "gradients", cams.layercam),
    "kpca-cam": Explainer(_KPCA, "features", cams.kpca_cam, class_agnostic=True),
    "finer-cam": finer_cam(),
    "rollout": Explainer(_ROLLOUT, "attention", rolled, class_agnostic=True),
    "random": Explainer("control: uniform noise", "images", random, class_agnostic=True),
    "center": Explainer("control: a Gaussian in the middle", "images", center, class_agnostic=True),
}

CAMS = ("gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam")
