"""What a report is made of."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from sufficit.errors import UserError
from sufficit.metrics.scores import MethodScores, Scores
from sufficit.perturbation.fills import check_fill
from sufficit.perturbation.heatmaps import check_heatmaps
from sufficit.statistics import Estimate, Standing

MOST_SHOWN = 24
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
        """Facts from what `provenance` returns and run.json holds, and the other fields by name."""
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
    """The images that are shown, at most MOST_SHOWN of those that were scored."""

    rows: Sequence[int]  # [n] which of the scored images they are
    images: Tensor  # [n,C,H,W] in 0..1
    heatmaps: Mapping[str, Tensor]  # method -> [n,H,W]
    labels: Sequence[int] | None = None  # [n] where they may differ from the targets
    chosen: str = ""  # how they were chosen, in words
    reasons: Sequence[str] = ()  # [n] why each was chosen, of REASONS


@dataclass(frozen=True)
class Content:
    """All that a report shows: methods scored on the same N images."""

    title: str
    facts: Facts
    scores: Mapping[str, MethodScores]
    summaries: Mapping[str, Mapping[str, Estimate]]  # method -> column
    standing: Standing
    names: Sequence[str]  # [N] of all images
    shown: Shown
    classes: Sequence[str] | None = None  # names of the classes
    fill: str | Tensor = "black"  # of hidden pixels; a tensor is for the images shown
    remarks: Sequence[str] = ()  # what a reader must know first and the scores do not say
    alpha_curve: Mapping[str, Any] | None = None  # MSI over alpha_min on a sample, as in run.json
    controls: Sequence[str] = ()  # methods outside the ranking that any method must beat

    @property
    def methods(self) -> list[str]:
        """All methods by the mean of the ranked column, best first, those without a mean last."""
        means = {m: found[self.standing.column].mean for m, found in self.summaries.items()}
        sign = -1 if self.standing.higher_is_better else 1
        return sorted(means, key=lambda m: (math.isnan(means[m]), sign * means[m]))

    @property
    def first(self) -> MethodScores:
        """The scores of some method, for what is the same in all."""
        return next(iter(self.scores.values()))

    def class_name(self, number: int) -> str:
        """The name of a class, or its number."""
        known = self.classes or ()
        return known[number] if number < len(known) else f"class {number}"

    def check(self) -> None:
        """Raise unless the parts fit together."""
        shown, n, count, methods = (
            self.shown,
            len(self.names),
            len(self.shown.rows),
            set(self.scores),
        )
        if not methods:
            raise UserError("a report needs the scores of at least one method, got none")
        for what, found in (("summaries", self.summaries), ("heatmaps", shown.heatmaps)):
            if set(found) != methods:
                raise UserError(
                    f"{what} must be of the methods scored, {sorted(methods)}, got {sorted(found)}"
                )
        if outside := {*self.standing.ranking, *self.controls} - methods:
            raise UserError(f"methods without scores: {sorted(outside)}. Add their scores")
        if not 1 <= count <= MOST_SHOWN or count != len(shown.images):
            raise UserError(
                f"a report shows 1 to {MOST_SHOWN} images with one row of the scores each, got"
                f" {len(shown.images)} images and {count} rows: choose them with pick_shown"
            )
        for method, scored in self.scores.items():
            if "msi" not in scored.columns:
                raise UserError(f"{method} has no MSI, which a report shows: score it with msi")
            if len(scored) != n:
                raise UserError(f"{method} has {len(scored)} images, got {n} names: give one each")
            if len(scored.shown.targets) != count:
                raise UserError(
                    f"{method} has predictions of {len(scored.shown.targets)} images for {count}"
                    " images shown: give MethodScores.of the rows that are shown"
                )
            check_heatmaps(shown.heatmaps[method], shown.images)
        if not all(0 <= row < n for row in shown.rows):
            raise UserError(f"rows of images shown must be in 0..{n - 1}, got {list(shown.rows)}")
        check_fill(self.fill, shown.images)


def choose(
    msi: Mapping[str, ArrayLike],
    *,
    most: int = MOST_SHOWN,
    seed: int = 0,
    allowed: Sequence[int] | None = None,
) -> dict[int, str]:
    """Rows to show and why, from each method's MSI per image: {method: [N]}.

    A quarter each has the highest mean over the methods, the lowest, and the widest spread between
    methods; the rest is drawn by the seed. Images without a value can only be drawn. `allowed` are
    the rows to choose from, all by default.

    >>> choose({"a": [0.9, 0.1, 0.5, -0.8], "b": [0.9, 0.1, -0.5, -0.9]}, most=4)
    {0: 'best', 3: 'worst', 2: 'most disputed', 1: 'drawn by seed'}
    """
    values = np.stack([np.asarray(found, np.float64) for found in msi.values()])
    rows = np.arange(values.shape[1]) if allowed is None else np.asarray(allowed)
    known = rows[~np.isnan(values[:, rows]).any(axis=0)]
    means, spread = values[:, known].mean(0), np.ptp(values[:, known], axis=0)
    orders = [-means, means, *([-spread] if len(values) > 1 else [])]
    chosen: dict[int, str] = {}
    for reason, order in zip(REASONS, orders, strict=False):
        in_order = known[np.argsort(order, kind="stable")].tolist()
        free = [row for row in in_order if row not in chosen]
        chosen |= dict.fromkeys(free[: most // 4], reason)
    drawn = np.random.default_rng(seed).permutation(values.shape[1]).tolist()
    permitted = {*rows.tolist()}
    rest = [row for row in drawn if row in permitted and row not in chosen]
    return chosen | dict.fromkeys(sorted(rest[: most - len(chosen)]), REASONS[-1])


def pick_shown(scores: Mapping[str, Scores | MethodScores], count: int = MOST_SHOWN) -> list[int]:
    """The rows of the images to show, as `choose` finds them, in ascending order."""
    return sorted(choose({m: s.columns["msi"].numpy() for m, s in scores.items()}, most=count))
