"""The same adapter trained with several seeds: do they draw the same maps?"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.explainers import explain
from sufficit.explainers.lax import Lax
from sufficit.similarity import Agreement, agreement
from sufficit.training.feeding import Loader
from sufficit.training.lax import train_lax


def repeatability(
    classifier: Classifier,
    loader: Loader,
    images: Tensor,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    alpha_min: float = 0.5,
    **options: Any,
) -> tuple[Agreement, list[Lax]]:
    """Train an adapter a seed, and compare what they draw for the images; options as `train_lax`'s.

    Rank correlation, SSIM and overlap at alpha_min, each the mean over pairs of seeds.
    """
    if len(set(seeds)) < 2:
        raise UserError(f"give two different seeds or more, got {list(seeds)}")
    if "out" in options or "seed" in options:
        raise UserError("repeatability trains once a seed of seeds=, and keeps nothing on disk")
    trained = [
        train_lax(classifier, loader, seed=seed, alpha_min=alpha_min, **options) for seed in seeds
    ]
    maps = [explain(classifier, images, method=lax).cpu() for lax in trained]
    return agreement(torch.stack(maps), alpha_min), trained
