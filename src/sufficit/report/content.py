"""What a report is made of."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from sufficit.metrics.column import Heading
from sufficit.metrics.columns import ZERO_LINE, heading_of
from sufficit.metrics.scores import MethodScores
from sufficit.perturbation.predictions import Predictions
from sufficit.similarity import RankedCondition
from sufficit.sources.certificate import Certificate
from sufficit.statistics import Estimate, Standing

if TYPE_CHECKING:
    import pandas

MOST_SHOWN = 24
MOST_ROWS = 3000  # of the table of all images
REASONS = ("best", "worst", "most disputed", "drawn by seed")


@dataclass(frozen=True)
class Facts:
    """What ran, on what, where and when."""

    model: str
    data: str
    seed: int
    n_skipped: int = 0
    targets: str = ""  # label or prediction
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    command: str = ""
    date: str = ""
    more: Mapping[str, str] = field(default_factory=dict)  # anything else worth a line

    @staticmethod
    def of(run: Mapping[str, Any], **known: Any) -> "Facts":
        """Return facts of a run.json (or of `provenance`), with the other fields by name."""
        device = run["device"]
        return Facts(
            device=f"{device['type']}, {device['name']}, {device['dtype']}",
            versions=run["versions"],
            commit=run["commit"],
            command=run["command"],
            date=run["time"],
            **known,
        )


@dataclass(frozen=True)
class Shown:
    """The images that are shown, and what the model predicts for them; at most MOST_SHOWN."""

    rows: Sequence[int]  # [n] which of the scored images they are
    names: Sequence[str]  # [n]
    images: Tensor  # [n,C,H,W] in 0..1
    heatmaps: Mapping[str, Tensor]  # method -> [n,H,W]
    chosen: str = ""  # how they were chosen, in words
    reasons: Sequence[str] = ()  # [n] why each was chosen, of REASONS
    fill: str | Tensor = "black"  # of hidden pixels
    predictions: Mapping[str, Predictions] = field(default_factory=dict)  # by method
    certificates: Mapping[str, Sequence[Certificate]] = field(default_factory=dict)
    """By method, of those that cut their maps where the model agrees: [n]."""


@dataclass(frozen=True)
class Content:
    """All that a report shows: methods scored on the same N images."""

    title: str
    facts: Facts
    scores: Mapping[str, MethodScores]
    summaries: Mapping[str, Mapping[str, Estimate]]  # method -> column
    standing: Standing
    shown: Shown
    headings: Mapping[str, Heading] = field(default_factory=dict)  # of the columns
    rows: Mapping[str, "pandas.DataFrame"] = field(default_factory=dict)
    """One row per image, by method, to download; nothing where these are more than MOST_ROWS."""
    classes: Sequence[str] | None = None  # names of the classes
    remarks: Sequence[str] = ()  # what a reader must know first and the scores do not say
    alpha_curve: Mapping[str, Any] | None = None  # MSI over alpha_min on a sample, as in run.json
    class_agnostic: Sequence[str] = ()  # methods that draw the same map for every class
    unmarked: Mapping[str, int] = field(default_factory=dict)
    """Images in which a method's map marks nothing at alpha_min, where these are many."""
    conditions: Sequence[RankedCondition] = ()  # how methods rank with other fills, and for a twin
    fit_fills: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The fills with which a fitted source asked the model, by source."""
    made: Sequence[str] = ()  # how it was measured, in sentences that are no warnings

    @property
    def fitted(self) -> tuple[str, ...]:
        """The methods that are cut where the model agrees, best first."""
        return tuple(name for name in self.standing.ranking if name in self.fit_fills)

    def groups_of(self, standing: Standing) -> list[Standing]:
        """Return the standing of the methods as they are drawn, and of those that are fitted.

        A fit asks the model before it is scored, so that the two answer different questions. A
        control that is fitted is one for fitted methods only.
        """
        drawn = [name for name in standing.ranking if name not in self.fit_fills]
        fitted = [name for name in standing.ranking if name in self.fit_fills]
        # The fitted blob is no control of methods as they are drawn: it has asked the model.
        plain = [name for name in standing.controls if name not in self.fit_fills]
        found = []
        if drawn:
            found.append(standing.among(drawn, plain))
        if fitted:
            found.append(standing.among(fitted, standing.controls))
        return found

    @property
    def groups(self) -> list[Standing]:
        """The methods as they are drawn, and those that are fitted, each ranked by itself."""
        return self.groups_of(self.standing)

    @property
    def zero_line(self) -> float:
        """The MSI of marking the whole image; NaN where it was not scored."""
        found = self.summaries.get(ZERO_LINE, {}).get(self.standing.column)
        return math.nan if found is None else found.mean

    @property
    def methods(self) -> list[str]:
        """All methods: those that are drawn, fitted ones, then controls and references.

        Each by the mean of the ranked column, best first, those without a mean last.
        """
        means = {m: found[self.standing.column].mean for m, found in self.summaries.items()}
        sign = -1 if self.standing.higher_is_better else 1
        ranking = self.standing.ranking

        def place(name: str) -> tuple[bool, bool, bool, float]:
            is_fitted = name in ranking and name in self.fit_fills
            return name not in ranking, is_fitted, math.isnan(means[name]), sign * means[name]

        return sorted(means, key=place)

    def mean(self, method: str) -> float:
        """Return the mean of a method in the ranked column."""
        return self.summaries[method][self.standing.column].mean

    @property
    def first(self) -> MethodScores:
        """The scores of some method, for what is the same in all."""
        return next(iter(self.scores.values()))

    @property
    def n(self) -> int:
        """The number of images."""
        return self.first.n

    def heading(self, column: str) -> Heading:
        """Return the heading of a column or a curve."""
        return self.headings.get(column) or heading_of(column)

    def class_name(self, number: int) -> str:
        """Return the name of a class, or its number."""
        known = self.classes or ()
        return known[number] if number < len(known) else f"class {number}"


class Choice:
    """The images to show, chosen while their values come a few at a time.

    A quarter each has the highest mean over the methods, the lowest, and the widest spread between
    methods; the rest is drawn. Images without a value can only be drawn.
    """

    def __init__(self, most: int = MOST_SHOWN) -> None:
        self.most = most
        # Per reason the sort keys and the images that come first. An image that is among the first
        # of all was among the first when it came, so that no other needs to be kept.
        self._firsts = [(np.empty(0), np.empty(0, np.int64)) for _ in REASONS[:-1]]

    def add(self, images: ArrayLike, msi: Mapping[str, ArrayLike]) -> None:
        """Add images by number, with each method's MSI: [n], {method: [n]}."""
        values = np.stack([np.asarray(found, np.float64) for found in msi.values()])
        known = ~np.isnan(values).any(axis=0)
        means = values[:, known].mean(axis=0)
        keys = [-means, means]
        if len(values) > 1:  # a single method disagrees with none
            keys.append(-np.ptp(values[:, known], axis=0))
        added = np.asarray(images, np.int64)[known]
        for place, new in enumerate(keys):
            old, kept = self._firsts[place]
            both = np.concatenate([old, new])
            numbers = np.concatenate([kept, added])
            # Earlier reasons may take the first images of this one: it keeps as many more.
            room = (place + 1) * (self.most // 4)
            first = np.lexsort((numbers, both))[:room]
            self._firsts[place] = both[first], numbers[first]

    def chosen(self, drawn: Iterable[int]) -> dict[int, str]:
        """Return the images to show and why; `drawn` are images in the order of the draw."""
        chosen: dict[int, str] = {}
        for reason, (_, images) in zip(REASONS, self._firsts, strict=False):
            free = [image for image in images.tolist() if image not in chosen]
            chosen |= dict.fromkeys(free[: self.most // 4], reason)
        rest = islice((one for one in drawn if one not in chosen), self.most - len(chosen))
        return chosen | dict.fromkeys(sorted(rest), REASONS[-1])
