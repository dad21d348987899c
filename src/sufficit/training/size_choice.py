"""One size for all images, or one predicted for each? Held-out images decide."""

import math

import torch
from torch import Tensor

from sufficit.explainers.size_head import SizeHead, described
from sufficit.sources.asked import SIZES

FOLDS = 5
PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0)  # of the ridge regression, per image
SURE = 1.96  # standard errors by which a predicted size must be better
FEWEST = 50  # images of which it can be told


def choose_size(orders: Tensor, scores: Tensor) -> tuple[SizeHead | None, dict[str, float]]:
    """Return a head if predicted sizes are significantly better, and the MSI of both ways.

    `scores` are MSI of each order [N,h,w] at every size [N,24]. Both ways are scored on images that
    they have not seen, a fifth of all at a time.
    """
    numbers = described(orders).cpu()
    one, best, penalty = at_one_size(scores), None, PENALTIES[0]
    if len(scores) >= FEWEST:
        for each in PENALTIES:
            found = at_predicted_sizes(numbers, scores, each)
            if best is None or found.mean() > best.mean():
                best, penalty = found, each
    row = {"msi_one_size": float(one.mean())}
    if best is None:
        return None, row
    gain = best - one
    error = float(gain.std()) / math.sqrt(len(gain))
    row |= {"msi_predicted_sizes": float(best.mean()), "gain_error": error}
    if float(gain.mean()) <= SURE * error:
        return None, row
    return SizeHead(SIZES).fit(numbers, scores, penalty), row


def at_one_size(scores: Tensor) -> Tensor:
    """MSI of each image at the size that is best on the other folds: [N,24] -> [N]."""
    found = torch.zeros(len(scores), dtype=torch.float64, device="cpu")
    for seen, unseen in folds(len(scores)):
        found[unseen] = scores[unseen, scores[seen].mean(0).argmax()].double()
    return found


def at_predicted_sizes(numbers: Tensor, scores: Tensor, penalty: float) -> Tensor:
    """MSI of each image at the size that a head predicts which the other folds fit: [N]."""
    found = torch.zeros(len(scores), dtype=torch.float64, device="cpu")
    for seen, unseen in folds(len(scores)):
        head = SizeHead(SIZES).fit(numbers[seen], scores[seen], penalty)
        places = head.curves(numbers[unseen]).argmax(1)
        found[unseen] = scores[unseen].gather(1, places[:, None])[:, 0].double()
    return found


def folds(n: int) -> list[tuple[Tensor, Tensor]]:
    """The rows that each fold fits and those that it scores, the same ones on every call."""
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(0), device="cpu")
    parts = rows.tensor_split(min(FOLDS, n))
    return [(torch.cat([*parts[:k], *parts[k + 1 :]]), part) for k, part in enumerate(parts)]
