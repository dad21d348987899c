"""The result of sanity checks: rows, sentences, a figure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from sufficit.plots import sanity_figure
from sufficit.sanity.randomization import LabelTraining
from sufficit.similarity import estimate
from sufficit.statistics import Estimate

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

THRESHOLD = 0.5  # at this rank correlation a quarter of the ranks' variance is shared
Verdict = Literal["passes", "insensitive", "undecided"]


@dataclass(frozen=True)
class Likeness:
    """Per image, the similarity of a method's heatmaps for the original and for a changed model."""

    method: str
    step: int | None  # randomised blocks; None for random labels
    layer: str  # the block randomised last
    rank_correlation: Tensor  # [N], NaN for constant heatmaps
    ssim: Tensor  # [N]


@dataclass(frozen=True)
class SanityReport:
    """The similarities of every method after each step of the cascade and after random labels."""

    cascade: tuple[Likeness, ...]
    random_labels: tuple[Likeness, ...]
    training: LabelTraining | None  # of the copy that learned random labels
    targets: Tensor  # [N] the explained classes
    threshold: float
    seed: int

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods in the order given."""
        return tuple(dict.fromkeys(found.method for found in self.cascade))

    def frame(self) -> "pandas.DataFrame":
        """A row per method and step: means over images with 95 % intervals; NaN is counted."""
        import pandas

        rows = []
        for found in (*self.cascade, *self.random_labels):
            check = "random labels" if found.step is None else "cascade"
            row: dict[str, Any] = {"check": check, "method": found.method}
            row |= {"step": found.step, "layer": found.layer}
            for name in ("rank_correlation", "ssim"):
                value = estimate(getattr(found, name), seed=self.seed)
                row |= {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}
            missing = int(found.rank_correlation.isnan().sum())  # a constant heatmap has none
            rows.append(row | {"n": len(found.rank_correlation), "n_nan": missing})
        return pandas.DataFrame(rows).astype({"step": "Int64"})

    def cascade_of(self, method: str) -> list[Likeness]:
        """The similarities of one method, step by step."""
        return [found for found in self.cascade if found.method == method]

    def verdicts(self) -> dict[str, Verdict]:
        """The verdict of each method: its rank correlation at the end against the threshold."""
        return {name: _verdict(self._end(name), self.threshold) for name in self.methods}

    def sentences(self) -> dict[str, str]:
        """The finding for each method, in words."""
        return {name: self._sentence(name) for name in self.methods}

    def remark(self) -> str | None:
        """Whether the copy learned the random labels."""
        if self.training is None:
            return None
        found = self.training
        words = (
            f"The copy learned {found.accuracy:.0%} of {found.images} random labels in"
            f" {found.epochs} epochs (chance {found.chance:.0%})"
        )
        end = "" if found.learned else ": too little for a meaningful check. Train for more epochs"
        return f"{words}{end}."

    def figure(self) -> "Figure":
        """Rank correlation and SSIM over the cascade, a line per method."""
        return sanity_figure(self.frame(), self.threshold, len(self.targets))

    def _end(self, method: str) -> Estimate:
        return estimate(self.cascade_of(method)[-1].rank_correlation, seed=self.seed)

    def _sentence(self, method: str) -> str:
        end = self._end(method)
        verdict = _verdict(end, self.threshold)
        if _too_few(end):
            words = f"undecided: {_missing(end)}"
        else:
            words = {
                "insensitive": "insensitive to the weights: rank correlation is still",
                "passes": "passes: rank correlation falls to",
                "undecided": "undecided, use more images: rank correlation is",
            }[verdict]
            words += f" {_value(end)} with all layers random"
            words += f" ({_missing(end)})" if end.n_nan else ""
        if verdict == "passes":
            steps = self.cascade_of(method)
            means = [float(found.rank_correlation.nanmean()) for found in steps]
            high = [number for number, mean in enumerate(means, 1) if mean >= self.threshold]
            layer = steps[high[-1] if high else 0].layer
            words += f", and stays below {self.threshold:g} once {layer} is random"
        for likeness in (found for found in self.random_labels if found.method == method):
            found = estimate(likeness.rank_correlation, seed=self.seed)
            insensitive = _verdict(found, self.threshold) == "insensitive"
            if _too_few(found):
                words += f"; after training on random labels, {_missing(found)}"
            else:
                words += "; insensitive to the labels: " if insensitive else "; "
                words += f"{_value(found)} after training on random labels"
        return f"{words}."


def _verdict(found: Estimate, threshold: float) -> Verdict:
    """By the whole interval; a single image has none."""
    if _too_few(found) or np.isnan(found.low):
        return "undecided"
    if found.low >= threshold:
        return "insensitive"
    return "passes" if found.high < threshold else "undecided"


def _too_few(found: Estimate) -> bool:
    """Whether most images have no rank correlation."""
    return found.n == 0 or found.n < found.n_nan


def _value(found: Estimate) -> str:
    spread = f" ({found.low:.2f} .. {found.high:.2f})" if found.low < found.high else ""
    return f"{found.mean:.2f}{spread}"


def _missing(found: Estimate) -> str:
    return f"{found.n_nan} of {found.n + found.n_nan} images have a constant heatmap"
