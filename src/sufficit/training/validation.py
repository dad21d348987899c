"""The images that an adapter is validated on after each epoch, and its scores there."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.explainers import Method, explain
from sufficit.metrics.artefacts import ARTEFACTS
from sufficit.metrics.scores import evaluate

HELD_OUT_FILL = "blur"  # of the image itself, which no recipe trains with


@dataclass(frozen=True)
class ValidationScores:
    """Means over the validation images, and what they are means of."""

    means: dict[str, float]  # of MSI, its two parts, leakage, its chance, artefacts if known
    scores: Any = None  # Scores, per image
    heatmaps: Any = None  # Tensor [N,H,W]

    @property
    def worth(self) -> float:
        """What the best epoch has most of: MSI minus the leakage above chance."""
        msi, excess = self.means["msi"], self.means["leak"] - self.means["leak_chance"]
        return msi if math.isnan(excess) else msi - max(0.0, excess)

    @property
    def row(self) -> dict[str, float]:
        """The means and their worth, for the history."""
        return self.means | {"worth": self.worth}


@dataclass
class ValidationSet:
    """Images and the classes to explain them for."""

    images: Tensor  # [N,C,H,W]
    targets: Tensor  # [N]

    @classmethod
    def of(cls, classifier: Classifier, images: Tensor, labels: Tensor | None) -> "ValidationSet":
        """Images with their labels, or else with the classifier's predictions."""
        targets = predictions(classifier, images) if labels is None else labels
        classes = targets.unique()
        if len(classes) < 2:
            raise UserError(
                f"All {len(targets)} validation images have class {int(classes[0])}, but an adapter"
                " learns what separates classes: shuffle the loader, or take another --seed or a"
                " larger --validation-share on the command line"
            )
        return cls(images, targets)

    def score(
        self, classifier: Classifier, method: Method, alpha_min: float, *, last: bool = False
    ) -> ValidationScores:
        """MSI, leakage and artefacts of a method's heatmaps, by coarser steps than a final score.

        The `last` score, of the adapter that is kept, has MSI under a held-out fill too.
        """
        heatmaps = explain(classifier, self.images, self.targets, method, progress=False)
        names = ("base_score", "mask_penalty", "msi")
        steps: dict[str, Any] = {"alpha_min": alpha_min, "value_step": 0.05, "leak_donors": 8}
        given = (classifier, self.images, heatmaps, self.targets)
        steps |= {"held_out_fill": HELD_OUT_FILL} if last else {}
        scores = evaluate(*given, columns=(*names, *ARTEFACTS), progress=False, **steps)
        means = scores.mean()
        chosen = {name: means[name] for name in (*names, "leak", "leak_chance")}
        chosen |= {name: means[name] for name in ARTEFACTS if not math.isnan(means[name])}
        return ValidationScores(chosen, scores, heatmaps.cpu())


def predictions(classifier: Classifier, images: Tensor) -> Tensor:
    """The classifier's own classes: [N,C,H,W] -> [N], on the CPU."""
    with torch.no_grad():
        return torch.cat([classifier(batch).argmax(1).cpu() for batch in images.split(64)])
