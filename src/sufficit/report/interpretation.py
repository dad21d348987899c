"""What the scores say in words, after the supplement of MSI's paper, and what to beware of."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from sufficit.metrics.curves import mean_height
from sufficit.metrics.leakage import leak_warning
from sufficit.metrics.registry import Schedule, hide_bands, show_bands
from sufficit.metrics.scores import Scores
from sufficit.perturbation import bands
from sufficit.perturbation.predictions import Predictions
from sufficit.report.content import Content

NEAR = 0.25  # how far from +1, 0 or -1 is still close to it
FEW_IMAGES = 30
LOW_ACCURACY = 0.7
MANY_NAN = 0.05


@dataclass(frozen=True)
class Losses:
    """What keeps a mean MSI from +1, in four parts that add up to 1 - MSI."""

    size: float  # the share of the image that is marked
    short: float  # what is marked does not suffice
    outside: float  # what is not marked suffices too
    weaker: float  # what is marked suffices without its peak

    @property
    def largest(self) -> str:
        """The part that costs most."""
        parts = asdict(self)
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Reading:
    """One method's scores in words."""

    method: str
    msi: float
    place: str  # near which of the paper's three marks MSI lies
    why: str
    losses: Losses


def reading(method: str, scores: Scores, schedule: Schedule) -> Reading:
    """What a method's mean MSI says, and which of its parts decides that."""
    parts = scores.answers.by_piece(lambda some: {"all": _parts(some, schedule)})["all"]
    size, kept, inner_mean, outside, weak = _present(parts).mean(0).tolist()
    losses = Losses(size, 1 - (kept + inner_mean) / 2, outside / 2, weak / 2)
    value = scores.msi.nanmean().item()
    told = _Told(schedule.score == "accuracy", size, kept, inner_mean, outside, weak)
    return Reading(method, value, place_of(value), _why(value, losses, told), losses)


def _parts(answers: Predictions, schedule: Schedule) -> Tensor:
    """What MSI is made of: size, kept, kept on the way, outside, hidden on the way: [N,5]."""
    show = answers.of(show_bands(schedule), schedule.score)
    hide = answers.of(hide_bands(schedule), schedule.score)
    rest = answers.of([bands.rest(schedule.alpha_min)], schedule.score)[:, 0]
    inner, weaker = mean_height(show, schedule.alphas), mean_height(hide, schedule.alphas)
    penalty = answers.share(bands.at_least(schedule.alpha_min)).double()
    return torch.stack([penalty, show[:, 0], inner, rest, weaker], dim=1)


def _present(parts: Tensor) -> Tensor:
    """The images of which all parts are known: [N,5] -> [n,5]."""
    return parts[~parts.isnan().any(1)]


def place_of(msi: float) -> str:
    """Where an MSI lies among the marks +1, 0 and -1.

    >>> [place_of(msi) for msi in (0.8, 0.5, 0.1, -0.5, -1.2)]
    ['close to +1', 'between 0 and +1', 'near 0', 'between 0 and -1', 'close to -1']
    """
    if math.isnan(msi):
        return "unknown"
    if abs(msi) <= NEAR:
        return "near 0"
    mark = "+1" if msi > 0 else "-1"
    return f"close to {mark}" if abs(msi) >= 1 - NEAR else f"between 0 and {mark}"


@dataclass(frozen=True)
class _Told:
    """Means that a sentence may name."""

    accuracy: bool
    size: float
    kept: float
    inner: float
    outside: float
    weak: float

    def score(self, value: float) -> str:
        if self.accuracy:
            return f"the model is right on {value:.0%} of the images"
        return f"the model gives the class {value:.0%} on average"


def _why(msi: float, losses: Losses, told: _Told) -> str:
    if math.isnan(msi):
        return "The model answered with NaN for every image."
    if msi >= 1 - NEAR:
        return (
            f"A small region suffices: {told.size:.0%} of the image is marked, and with that alone"
            f" {told.score(told.kept)}. It likely holds all the evidence there is."
        )
    if losses.largest == "short":
        return _short(msi, told)
    return {
        "size": (
            f"The mask is too large: it marks {told.size:.0%} of the image. Look whether the object"
            " is as large, or whether the explanation lacks focus."
        ),
        "outside": (
            "Other regions suffice too: with all that it marks taken away,"
            f" {told.score(told.outside)}, so there is evidence it does not capture."
        ),
        "weaker": (
            "Its peak is not needed: with the peak taken away from the marked region,"
            f" {told.score(told.weak)}."
        ),
    }[losses.largest]


def _short(msi: float, told: _Told) -> str:
    """What is marked falls short: how much that means follows from where MSI lies."""
    if msi > NEAR:
        return (
            "What keeps it from +1 is mostly that what it marks does not always suffice:"
            f" {_shortfall(told)}."
        )
    if msi >= -NEAR:
        found = _shortfall(told)
        return (
            f"Not so much a large mask ({told.size:.0%} of the image) or evidence elsewhere"
            f" (without what it marks {told.score(told.outside)}) keeps it near 0: what it marks"
            f" does not suffice. {found[0].upper()}{found[1:]}."
        )
    poor = "A poor mask: what" if msi <= NEAR - 1 else "What"
    return f"{poor} it marks does not suffice: {_shortfall(told)}."


def _shortfall(told: _Told) -> str:
    """Whether all that is marked falls short, or only what is marked most."""
    if told.kept <= told.inner + NEAR:
        return f"with that alone {told.score(told.kept)}"
    return (
        f"with all that is marked {told.score(told.kept)}, and as the threshold rises from there,"
        f" {told.score(told.inner)} at the mean"
    )


def readings(content: Content) -> list[Reading]:
    """Every method in words, best first."""
    return [
        reading(method, content.scores[method], content.schedule(method))
        for method in content.methods
    ]


@dataclass(frozen=True)
class Caution:
    """What a reader should know before believing the numbers, and the details on demand."""

    text: str
    details: tuple[str, ...] = ()


def cautions(content: Content) -> list[Caution]:
    """All that a reader should know before believing the numbers."""
    plain = (*content.remarks, *_few(content), *_inaccurate(content), *_missing(content))
    return [*map(Caution, plain), *_leaks(content)]


def _few(content: Content) -> Iterator[str]:
    n = len(content.names)
    if n < FEW_IMAGES:
        yield (
            f"{n} image{'s are' if n > 1 else ' is'} few: intervals from fewer than {FEW_IMAGES}"
            " are rough, and real differences between methods go unseen."
        )


def _inaccurate(content: Content) -> Iterator[str]:
    right = content.first.clean.nanmean().item()
    if right < LOW_ACCURACY:
        yield (
            f"The classifier gives only {right:.0%} of the whole images the class they are scored"
            " for. Where it is wrong on the whole image, no mask can do well, and MSI says more of"
            " the classifier than of the explanation."
        )


def _missing(content: Content) -> Iterator[str]:
    for method in content.methods:
        counts = content.scores[method].nan_counts()
        worst = max(counts, key=lambda column: counts[column])
        if counts[worst] > MANY_NAN * len(content.names):
            yield (
                f"{method}: {counts[worst]} of {len(content.names)} images have no {worst}, because"
                " the model answered NaN. Means leave them out."
            )


def _leaks(content: Content) -> Iterator[Caution]:
    """What is to say of the leak, the methods of one case together."""
    found = {
        method: sentence
        for method, summary in content.summaries.items()
        if "leak_ratio" in summary and (sentence := leak_warning(summary))
    }
    leaking = [m for m in content.methods if m in found and found[m].startswith("the masks leak")]
    unsure = [m for m in content.methods if m in found and m not in leaking]
    if leaking:
        yield Caution(
            f"The masks of {', '.join(leaking)} leak: their shape itself tells the model the class,"
            " whatever the image shows, so MSI flatters them.",
            tuple(f"{method}: {found[method]}." for method in leaking),
        )
    if unsure:
        yield Caution(
            f"There are too few images to tell whether the masks of {', '.join(unsure)} leak.",
            tuple(f"{method}: {found[method]}." for method in unsure),
        )
