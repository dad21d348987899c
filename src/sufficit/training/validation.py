"""How good an adapter is on a few fixed images: MSI, and whether its masks leak."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.explainers import explain
from sufficit.explainers.lax import Lax
from sufficit.metrics.leakage import leak
from sufficit.metrics.scores import evaluate

VALUE_STEP = 0.05  # coarser than a final score: this is asked after every epoch
DONORS = 8


@dataclass(frozen=True)
class Report:
    """Means over the validation images."""

    msi: float
    base_score: float
    mask_penalty: float
    leak: float
    leak_chance: float

    @property
    def worth(self) -> float:
        """What adapters are chosen by: MSI, less what leaks above chance."""
        excess = max(0.0, self.leak - self.leak_chance)
        return self.msi if math.isnan(excess) else self.msi - excess

    def plain(self) -> dict[str, Any]:
        """As JSON knows it."""
        return asdict(self)


@dataclass(frozen=True)
class Examination:
    """The images an adapter is judged on after every epoch, and the classes they are for."""

    images: Tensor  # [N,C,H,W]
    targets: Tensor  # [N]

    def report(self, classifier: Classifier, lax: Lax, alpha_min: float) -> Report:
        """MSI and leak of the adapter's heatmaps."""
        heatmaps = explain(classifier, self.images, self.targets, lax, progress=False)
        scores = evaluate(
            classifier,
            self.images,
            heatmaps,
            self.targets,
            alpha_min=alpha_min,
            value_step=VALUE_STEP,
            columns=("base_score", "mask_penalty", "msi"),
            progress=False,
        ).mean()
        found = leak(
            classifier, self.images, heatmaps, self.targets, alpha_min=alpha_min, donors=DONORS
        ).mean()
        return Report(**scores, leak=found["leak"], leak_chance=found["leak_chance"])


def examination_of(classifier: Classifier, images: Tensor, labels: Tensor | None) -> Examination:
    """Images to judge an adapter on, for their labels or for what the classifier says."""
    targets = labels
    if targets is None:
        with torch.no_grad():
            batches = [classifier(part).argmax(1).cpu() for part in images.split(64)]
        targets = torch.cat(batches)
    classes = targets.unique()
    if len(classes) < 2:
        raise UserError(
            f"all of the {len(targets)} images that judge the adapter have class"
            f" {int(classes[0])}: an explanation says what tells classes apart, so there must be"
            " two or more (shuffle the loader; on the command line take another --seed or a larger"
            " --validation-share)"
        )
    return Examination(images, targets)
