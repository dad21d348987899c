"""What comes out of a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.comparing.settings import Settings
from sufficit.comparing.showing import Shown
from sufficit.data.loader import Skipped, folder_targets
from sufficit.metrics.alpha_search import AlphaCurves
from sufficit.metrics.leakage import leak_warning
from sufficit.metrics.scores import Scores
from sufficit.statistics import Estimate, Standing

OWN_BEST = "msi_own_best"  # MSI of a method at the alpha_min that is best for it alone


@dataclass(frozen=True)
class Comparison:
    """Every method's scores on the same images, how the methods stand, and images to look at."""

    settings: Settings
    names: tuple[str, ...]
    scores: dict[str, Scores]
    summaries: dict[str, dict[str, Estimate]]
    standing: Standing  # of the methods in the contest; the controls are not
    shown: Shown
    skipped: tuple[Skipped, ...]
    target_kind: str  # label or prediction
    alpha_min: float
    empty: dict[str, int]  # method -> heatmaps that are all zeros
    classifier: Classifier
    fill: str | Tensor = "black"
    alpha_curves: AlphaCurves | None = None  # where alpha_min was not searched for

    @property
    def outside(self) -> tuple[str, ...]:
        """The methods that are scored but not in the contest."""
        return tuple(method for method in self.scores if method not in self.standing.ranking)

    def order(self) -> list[str]:
        """All methods, those in the contest best first, then the others."""
        return [*self.standing.ranking, *self.outside]

    def own_alphas(self) -> dict[str, float]:
        """The alpha_min that is best for each method alone, where it was searched for."""
        searched = {method: found.search for method, found in self.scores.items()}
        return {method: search.best for method, search in searched.items() if search is not None}

    def class_names(self) -> Sequence[str] | None:
        """Names of the classes: the model's own, or those of the class folders."""
        if self.classifier.classes is not None or self.target_kind != "label":
            return self.classifier.classes
        folders = folder_targets(self.names, next(iter(self.scores.values())).targets)
        known, last = {k: folder for folder, k in folders.items()}, max(folders.values(), default=0)
        return [known.get(number, f"class {number}") for number in range(last + 1)]

    def leak_warnings(self) -> dict[str, str]:
        """What must be known of the masks of some methods, in plain words."""
        found = {
            method: leak_warning(summary)
            for method, summary in self.summaries.items()
            if "leak_ratio" in summary
        }
        return {method: remark for method, remark in found.items() if remark}

    def facts(self) -> dict[str, Any]:
        """What a reader of the means must know beside them."""
        first = self.scores[self.standing.best]
        facts: dict[str, Any] = {
            "n": len(self.names),
            "n_skipped": len(self.skipped),
            "targets": self.target_kind,
            "clean_accuracy": float(first.clean.nanmean()),
            "alpha_min": self.alpha_min,
            "methods": self.order(),
            "outside_the_contest": list(self.outside),
            "model_calls": sum(int(found.calls.sum()) for found in self.scores.values()),
            "empty_heatmaps": self.empty,
            "leak_warnings": self.leak_warnings(),
        }
        if own := self.own_alphas():
            facts["own_alpha_min"] = own
        return facts
