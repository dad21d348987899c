"""What sanity checks found: rows, sentences, a picture."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from sufficit.sanity.picture import sanity_figure
from sufficit.sanity.randomising import LabelTraining
from sufficit.similarity import estimate
from sufficit.statistics import Estimate

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

THRESHOLD = 0.5  # a rank correlation at which a quarter of the ranks' variance is shared
Verdict = Literal["passes", "insensitive", "undecided"]


@dataclass(frozen=True)
class Likeness:
    """How like its original maps a method's maps are for a changed model, an image at a time."""

    method: str
    step: int | None  # blocks that are random by now; None for random labels
    layer: str  # the block that became random last
    rank_correlation: Tensor  # [N], NaN where a map has no spread
    ssim: Tensor  # [N]


@dataclass(frozen=True)
class SanityReport:
    """The maps of every method after each step of the cascade, and after random labels."""

    cascade: tuple[Likeness, ...]
    random_labels: tuple[Likeness, ...]
    training: LabelTraining | None  # of the copy that learned random labels
    targets: Tensor  # [N] explained throughout
    threshold: float
    seed: int

    @property
    def methods(self) -> tuple[str, ...]:
        """In the order they were asked for."""
        return tuple(dict.fromkeys(found.method for found in self.cascade))

    def frame(self) -> "pandas.DataFrame":
        """A row for each method and step: means over images with 95 % intervals, NaN counted."""
        import pandas

        checks = [("cascade", found) for found in self.cascade]
        checks += [("random labels", found) for found in self.random_labels]
        rows = pandas.DataFrame([_row(check, found, self.seed) for check, found in checks])
        return rows.astype({"step": "Int64"})

    def cascade_of(self, method: str) -> list[Likeness]:
        """One method's likenesses, step by step."""
        return [found for found in self.cascade if found.method == method]

    def verdicts(self) -> dict[str, Verdict]:
        """Each method by its rank correlation with all layers random, against the threshold."""
        return {name: _verdict(self._end(name), self.threshold) for name in self.methods}

    def sentences(self) -> dict[str, str]:
        """What was found of each method, in words."""
        return {name: self._sentence(name) for name in self.methods}

    def remark(self) -> str | None:
        """What to think of the random labels: whether the copy learned them."""
        if self.training is None:
            return None
        found = self.training
        words = (
            f"The copy learned {found.accuracy:.0%} of {found.images} random labels in"
            f" {found.epochs} epochs (chance {found.chance:.0%})"
        )
        if found.learned:
            return f"{words}."
        return f"{words}: too little for its maps to mean much; train for more epochs."

    def figure(self) -> "Figure":
        """Rank correlation and SSIM over the cascade, a line a method."""
        return sanity_figure(self.frame(), self.threshold, len(self.targets))

    def _end(self, method: str) -> Estimate:
        return estimate(self.cascade_of(method)[-1].rank_correlation, seed=self.seed)

    def _sentence(self, method: str) -> str:
        words = _in_words(self._end(method), self.threshold)
        if words.startswith("passes"):
            words += self._since(method)
        labels = [found for found in self.random_labels if found.method == method]
        if not labels:
            return f"{words}."
        found = estimate(labels[0].rank_correlation, seed=self.seed)
        return f"{words}; {_labels_in_words(found, self.threshold)}."

    def _since(self, method: str) -> str:
        """From which block on the method stays below the threshold."""
        held = 0
        steps = self.cascade_of(method)
        for number, found in enumerate(steps, 1):
            if float(found.rank_correlation.nanmean()) >= self.threshold:
                held = number
        return f", and stays below {self.threshold:g} once {steps[held].layer} is random"


def _row(check: str, found: Likeness, seed: int) -> dict[str, Any]:
    rank, ssim = (estimate(v, seed=seed) for v in (found.rank_correlation, found.ssim))
    return {
        "check": check,
        "method": found.method,
        "step": found.step,
        "layer": found.layer,
        "rank_correlation": rank.mean,
        "rank_correlation_low": rank.low,
        "rank_correlation_high": rank.high,
        "ssim": ssim.mean,
        "ssim_low": ssim.low,
        "ssim_high": ssim.high,
        "n": rank.n + rank.n_nan,
        "n_nan": rank.n_nan,  # images with a map of no spread, which has no rank correlation
    }


def _verdict(found: Estimate, threshold: float) -> Verdict:
    """By the whole interval, which one image does not have."""
    if _too_few(found) or np.isnan(found.low):
        return "undecided"
    if found.low >= threshold:
        return "insensitive"
    return "passes" if found.high < threshold else "undecided"


def _too_few(found: Estimate) -> bool:
    """Whether most images have no rank correlation."""
    return found.n == 0 or found.n < found.n_nan


def _in_words(found: Estimate, threshold: float) -> str:
    value = _value(found)
    if _too_few(found):
        return f"undecided: {_missing(found)}"
    words = {
        "insensitive": f"insensitive to the weights: rank correlation is still {value}",
        "passes": f"passes: rank correlation falls to {value}",
        "undecided": f"undecided, more images would tell: rank correlation is {value}",
    }[_verdict(found, threshold)]
    missing = f" ({_missing(found)})" if found.n_nan else ""
    return f"{words} with all layers random{missing}"


def _labels_in_words(found: Estimate, threshold: float) -> str:
    if _too_few(found):
        return f"after training on random labels, {_missing(found)}"
    told = "insensitive to the labels: " if _verdict(found, threshold) == "insensitive" else ""
    return f"{told}{_value(found)} after training on random labels"


def _value(found: Estimate) -> str:
    spread = f" ({found.low:.2f} .. {found.high:.2f})" if found.low < found.high else ""
    return f"{found.mean:.2f}{spread}"


def _missing(found: Estimate) -> str:
    return f"{found.n_nan} of {found.n + found.n_nan} images have a map with no spread"
