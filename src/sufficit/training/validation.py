"""The images that an adapter is validated on: its scores, and whether it can be trusted."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.evaluation import evaluate
from sufficit.explainers import EXPLAINERS, Method, explain_all
from sufficit.metrics.artefacts import ARTEFACTS
from sufficit.metrics.leakage import LIFT, LIMIT, OVER_GRADCAM, leak_warning
from sufficit.metrics.scores import Scores
from sufficit.report.interpretation import MOST_EMPTY, joined
from sufficit.statistics import Estimate, compare_values, estimates_of
from sufficit.sums import sums_of
from sufficit.training.level_sets import LevelSets

HELD_OUT_FILL = "blur"  # of the image itself, which no recipe trains with
CONTROLS = tuple(name for name, one in EXPLAINERS.items() if one.needs == "images")
"""Maps that do not depend on the model: any method must beat them."""
MOST_PARTS = 3  # median
LEVEL = 0.05  # of the test whether a classifier is better than chance


@dataclass(frozen=True)
class ValidationScores:
    """Means over the validation images, and what they are means of."""

    means: dict[str, float]  # of MSI, its two parts, leakage, its chance, artefacts if known
    scores: Any = None  # Scores, per image
    heatmaps: Any = None  # Tensor [N,H,W]

    @property
    def worth(self) -> float:
        """What the best epoch has most of: MSI minus the distance of the leakage from chance.

        Masks that never bring their class to mind tell it as well as those that always do.
        """
        msi = self.means["msi"]
        if LIFT in self.means:
            return msi
        apart = abs(self.means["leak"] - self.means["leak_chance"])
        return msi if math.isnan(apart) else msi - apart

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
                " learns what separates classes: add images of other classes; if there are some,"
                " shuffle the loader, or take another --seed or a larger --validation-share on the"
                " command line"
            )
        return cls(images, targets)

    def score(
        self, classifier: Classifier, method: Method, alpha_min: float, *, last: bool = False
    ) -> ValidationScores:
        """MSI, leakage and artefacts of a method's heatmaps, by coarser steps than a final score.

        The `last` score, of the adapter that is kept, has MSI under a held-out fill too.
        """
        drawn = explain_all(
            classifier, self.images, self.targets, {"method": method}, progress=False
        )
        heatmaps = drawn["method"]
        names = ("base_score", "mask_penalty", "msi")
        scores = evaluate(
            classifier,
            self.images,
            heatmaps,
            self.targets,
            columns=(*names, *ARTEFACTS),
            alpha_min=alpha_min,
            value_step=0.05,
            leak_donors=8,
            held_out_fill=HELD_OUT_FILL if last else None,
            progress=False,
        )
        means = scores.mean()
        leak = (LIFT,) if LIFT in means else ("leak", "leak_chance")
        chosen = {name: means[name] for name in (*names, *leak)}
        chosen |= {name: means[name] for name in ARTEFACTS if not math.isnan(means[name])}
        return ValidationScores(chosen, scores, heatmaps.cpu())


def predictions(classifier: Classifier, images: Tensor) -> Tensor:
    """The classifier's own classes: [N,C,H,W] -> [N], on the CPU."""
    with torch.no_grad():
        return torch.cat([classifier(batch).argmax(1).cpu() for batch in images.split(64)])


@dataclass(frozen=True)
class Accuracy:
    """How many of n images a classifier names correctly, and how many it would by chance."""

    right: int
    n: int
    chance: float  # share, if the predicted classes came in random order

    @classmethod
    def of(cls, predicted: Tensor, labels: Tensor) -> "Accuracy":
        """Count predictions [N] that are the labels [N]."""
        chance = (predicted[:, None] == labels).double().mean().item()
        return cls(int((predicted == labels).sum()), len(labels), chance)

    @property
    def poor(self) -> bool:
        """Whether it is not significantly above chance, by a binomial test at the level 0.05."""
        from scipy.special import bdtrc

        return self.right < self.n and bdtrc(self.right - 1, self.n, self.chance) > LEVEL

    @property
    def words(self) -> str:
        """The numbers in a sentence, and what to check if they are poor."""
        found = f"The model names the class of {self.right} of {self.n} held-out images"
        if not self.poor:
            return f"{found}."
        return (
            f"{found}, not significantly more than by chance ({self.chance:.0%} of them). A map for"
            " a class that the model does not see explains nothing: check that the names or the"
            " order of the class folders are those of the model's classes, and its size, mean and"
            " std, or train with --targets prediction."
        )


@dataclass(frozen=True)
class Check:
    """One question about an adapter, and its answer."""

    name: str
    holds: bool | None  # None: these images cannot tell
    words: str


@dataclass(frozen=True)
class Trust:
    """The checks of an adapter, and what follows from them."""

    checks: tuple[Check, ...]  # all but the last are about what the maps say, that about their look

    @property
    def trusted(self) -> bool | None:
        """Whether the maps say what the model uses; None where these images cannot tell."""
        found = [check.holds for check in self.checks if check.name in _CONTENT]
        return False if False in found else None if None in found else True

    @property
    def verdict(self) -> str:
        """The answer in a sentence or two."""
        failed, unsure = (
            [check.name for check in self.checks if check.holds is answer]
            for answer in (False, None)
        )
        if self.trusted is False:
            why = joined([name for name in failed if name in _CONTENT])
            return f"Do not trust this adapter: it fails in {why}."
        if self.trusted is None:
            why = joined([name for name in unsure if name in _CONTENT])
            return f"Not sure: too few held-out images to tell about {why}. Train with more images."
        look = joined([name for name in failed if name not in _CONTENT])
        but = f" Its maps show artefacts, though: {look}." if look else ""
        return f"This adapter can be trusted on images like these.{but}"

    def lines(self) -> list[str]:
        """The verdict, then a sentence per check with its mark."""
        marks = {True: "yes", False: "NO", None: "?"}
        return [self.verdict, *(f"[{marks[one.holds]}] {one.words}" for one in self.checks)]


_CONTENT = ("MSI", "MSI with another fill", "MSI at a common size", "leakage")
EVERYTHING = "marking everything"


def trust(scores: Mapping[str, Scores], alpha_min: float, sets: Mapping[str, LevelSets]) -> Trust:
    """Judge an adapter by the scores and the level sets of `lax`, `gradcam` and the controls."""
    own, unseen = scores["lax"], f"MSI with the fill {HELD_OUT_FILL}, unknown to training"
    return Trust(
        (
            _better(_values(scores, "msi"), "MSI", "MSI"),
            _better(_values(scores, "msi_held_out"), "MSI with another fill", unseen),
            _at_common_sizes(sets),
            _leakage(leak_summary(scores), measured=own.leaked is not None),
            _fragments(own.fragments, alpha_min),
        )
    )


def _values(scores: Mapping[str, Scores], column: str) -> dict[str, Any]:
    return {method: found[column].numpy() for method, found in scores.items()}


def _at_common_sizes(sets: Mapping[str, LevelSets]) -> Check:
    """Is its order better than Grad-CAM's, each cut at the one size that is best for it?"""
    values: dict[str, Any] = {name: found.at_best.numpy() for name, found in sets.items()}
    values[EVERYTHING] = sets["lax"].everything.numpy()
    sizes = " and ".join(f"{found.size:.0%}" for found in sets.values())
    words = f"MSI with every map of LAX and Grad-CAM cut at its best common size ({sizes})"
    found = _better(values, "MSI at a common size", words)
    return replace(found, words=f"{found.words} Do not use it.") if found.holds is False else found


def _better(values: Mapping[str, Any], name: str, words: str) -> Check:
    """Is it significantly better than Grad-CAM and everything else?"""
    others = [one for one in values if one not in ("lax", "gradcam")]
    standing = compare_values(values, name, controls=others)
    rivals = [one for one in standing.means if one != "lax"]
    named = {one: f"the control {one}" for one in CONTROLS}
    named |= {"gradcam": "Grad-CAM", EVERYTHING: EVERYTHING}
    means = ", ".join(f"{named[one]} {standing.means[one]:+.2f}" for one in rivals)
    start = f"{words}: LAX {standing.means['lax']:+.2f}, {means}."
    ahead = [one for one in rivals if standing.beats(one, "lax")]
    level = [one for one in rivals if one not in ahead and not standing.beats("lax", one)]
    test = f"{standing.n} images, paired tests with Holm's correction"
    if ahead or any(standing.means[one] >= standing.means["lax"] for one in level):
        rest = [one for one in level if standing.means[one] >= standing.means["lax"]]
        kinds = {"significantly worse": ahead, "not better": rest}
        said = [
            f"{how} than {joined([named[one] for one in some])}"
            for how, some in kinds.items()
            if some
        ]
        return Check(name, False, f"{start} LAX is {' and '.join(said)} ({test}).")
    if level:
        equals = joined([named[one] for one in level])
        found = f"The difference to {equals} is not significant ({test})."
        return Check(name, None, f"{start} {found}")
    return Check(name, True, f"{start} LAX is significantly better than each ({test}).")


def leak_summary(scores: Mapping[str, Scores]) -> dict[str, Estimate]:
    """The means of the adapter's scores, and how far its lift is above Grad-CAM's."""
    summary = scores["lax"].summary()
    if LIFT not in summary:
        return summary
    apart = (scores["lax"][LIFT] - scores["gradcam"][LIFT]).double().numpy()
    return summary | estimates_of(sums_of({OVER_GRADCAM: apart}), {OVER_GRADCAM: False})


def _leakage(summary: Mapping[str, Estimate], *, measured: bool) -> Check:
    """Does the shape of the masks tell the class?"""
    name = "leakage"
    if not measured:
        return Check(name, None, "Leakage: not measured, because all images have one class.")
    warning = leak_warning(summary)
    if warning is not None:
        unsure = "are too few" in warning
        return Check(name, None if unsure else False, f"Leakage: {warning}.")
    if LIFT in summary:
        over = summary[OVER_GRADCAM]
        ends = f"95 % interval {over.low:+.2f} .. {over.high:+.2f}"
        return Check(
            name,
            True,
            f"Leakage: on images of other classes the masks lift the log probability of their"
            f" class by {over.mean:+.2f} more than Grad-CAM's ({ends}), not significant.",
        )
    ratio = summary["leak_ratio"]
    ends = f"95 % interval {ratio.low:.2f} .. {ratio.high:.2f}"
    how = f"above it, within the limit of {LIMIT:g}" if ratio.low > 1 else "not significant"
    return Check(name, True, f"Leakage: {ratio.mean:.2f} times chance ({ends}), {how}.")


def _fragments(parts: Tensor, alpha_min: float) -> Check:
    """Is there a region in (nearly) every image, in few parts?"""
    median, empty = parts.median().item(), (parts == 0).double().mean().item()
    number = f"{median:g} part{'s' * (median != 1)} (median)"
    words = f"Fragments: the region at or above {alpha_min:g} has {number}"
    words += f" and is empty in {empty:.0%} of the images."
    return Check("fragments", median <= MOST_PARTS and empty <= MOST_EMPTY, words)
