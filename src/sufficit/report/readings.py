"""The mean MSI of each method in words: which of its parts decides it.

How MSI is read follows the supplement of MSI's paper.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sufficit.report.content import Content

NEAR = 0.25  # how far from +1, 0 or -1 is still close to it


@dataclass(frozen=True)
class Reading:
    """One method's scores in words.

    `losses` keep the mean MSI from +1 and add up to 1 - MSI: size, the share of the image that is
    marked; short, what is marked does not suffice; outside, what is not marked suffices too;
    weaker, what is marked suffices without its peak.
    """

    method: str
    msi: float
    place: str  # which of the paper's three marks MSI is close to
    why: str
    losses: Mapping[str, float]


def readings(content: Content) -> list[Reading]:
    """Return what the mean MSI of each method means and which part of it decides, best first.

    Every method that has all columns of MSI. The score of what is not marked follows from the mean
    base score, which is 1/2 [kept - outside + mean of Show - mean of Hide].
    """
    found = []
    for method in content.methods:
        scores = content.scores[method]
        if not {"msi", "base_score", "mask_penalty"} <= {*scores.columns}:
            continue
        msi, base, size = (
            content.summaries[method][name].mean for name in ("msi", "base_score", "mask_penalty")
        )
        show = scores.curves["show"]
        kept = show.values[0].item()  # Show at alpha_min: all that is marked
        inner = show.height
        weak = scores.curves["hide"].height
        outside = kept + inner - weak - 2 * base  # the base score solved for what is not marked
        losses = {
            "size": size,
            "short": 1 - (kept + inner) / 2,
            "outside": outside / 2,
            "weaker": weak / 2,
        }
        words = why(msi, losses, kept, inner, accuracy=scores.schedule.score == "accuracy")
        if method in content.unmarked:
            images = f"{content.unmarked[method]} of {content.n} images"
            where = f"marks nothing at alpha_min {content.first.alpha_min:g} in {images}"
            words += f" {method} {where}: MSI there is that of an empty mask."
        reading = Reading(method=method, msi=msi, place=place_of(msi), why=words, losses=losses)
        found.append(reading)
    return found


def place_of(msi: float) -> str:
    """Return which of the marks +1, 0 and -1 an MSI is close to.

    >>> [place_of(msi) for msi in (0.8, 0.5, 0.1, -0.5, -1.2)]
    ['close to +1', 'between 0 and +1', 'near 0', 'between 0 and -1', 'close to -1']
    """
    if math.isnan(msi):
        return "unknown"
    if abs(msi) <= NEAR:
        return "near 0"
    mark = "+1" if msi > 0 else "-1"
    return f"close to {mark}" if abs(msi) >= 1 - NEAR else f"between 0 and {mark}"


def why(
    msi: float, losses: Mapping[str, float], kept: float, inner: float, *, accuracy: bool
) -> str:
    """Return why a mean MSI is what it is.

    `kept` is the mean score of what is marked, `inner` the mean as the threshold rises from
    alpha_min to 1. Scores are accuracies, or else confidences.
    """
    says = "the model gives the class {:.0%} on average".format
    if accuracy:
        says = "the model is right on {:.0%} of the images".format
    outside = says(2 * losses["outside"])
    weak = says(2 * losses["weaker"])
    if math.isnan(msi):
        return "The model answered with NaN for every image."
    if msi >= 1 - NEAR:
        return (
            f"A small region suffices: {losses['size']:.0%} of the image is marked, and with that"
            f" alone {says(kept)}. It likely holds all the evidence there is."
        )
    other = {
        "size": (
            f"The mask is too large: it marks {losses['size']:.0%} of the image. Check whether the"
            " object is as large, or whether the explanation lacks focus."
        ),
        "outside": (
            f"Other regions suffice too: with all that it marks removed, {outside}, so there is"
            " evidence that it does not capture."
        ),
        "weaker": f"Its peak is not needed: with the peak removed from the marked region, {weak}.",
    }
    largest = max(losses, key=lambda name: losses[name])
    if largest in other:
        return other[largest]
    # What is left is "short": the marked pixels do not suffice.
    found = f"with that alone {says(kept)}"
    if kept > inner + NEAR:
        found = (
            f"with all that is marked {says(kept)}, and as the threshold rises from there,"
            f" {says(inner)} on average"
        )
    if msi > NEAR:
        return f"It stays below +1 mostly because what it marks does not always suffice: {found}."
    if msi >= -NEAR:
        return (
            f"It is near 0 because what it marks does not suffice: {found}. The size of the mask"
            f" ({losses['size']:.0%} of the image) and evidence elsewhere (without what it marks"
            f" {outside}) matter less."
        )
    poor = "A poor mask: what" if msi <= NEAR - 1 else "What"
    return f"{poor} it marks does not suffice: {found}."
