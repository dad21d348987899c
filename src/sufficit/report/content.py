"""What a report is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sufficit.errors import UserError
from sufficit.metrics.alpha_search import AlphaCurves
from sufficit.metrics.registry import Schedule
from sufficit.metrics.scores import Scores
from sufficit.perturbation.fills import check_fill
from sufficit.perturbation.heatmaps import check_heatmaps
from sufficit.statistics import Standing
from sufficit.tables import Summaries, ranked

MOST_SHOWN = 24


@dataclass(frozen=True)
class Facts:
    """What ran, on what, where and when."""

    model: str
    data: str
    seed: int
    n_skipped: int = 0
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    command: str = ""
    date: str = ""
    more: Mapping[str, str] = field(default_factory=dict)  # anything else worth a line

    @staticmethod
    def of(
        run: Mapping[str, Any],
        *,
        model: str,
        data: str,
        seed: int,
        n_skipped: int = 0,
        more: Mapping[str, str] | None = None,
    ) -> "Facts":
        """Facts from what `sufficit.results.provenance` returns."""
        device = run["device"]
        return Facts(
            model=model,
            data=data,
            seed=seed,
            n_skipped=n_skipped,
            device=f"{device['type']}, {device['name']}, {device['dtype']}",
            versions=run["versions"],
            commit=run["commit"],
            command=run["command"],
            date=run["time"],
            more=more or {},
        )


@dataclass(frozen=True)
class Shown:
    """The images that are shown, at most MOST_SHOWN of those that were scored."""

    rows: Sequence[int]  # [n] which of the scored images they are
    images: Tensor  # [n,C,H,W] in 0..1
    heatmaps: Mapping[str, Tensor]  # method -> [n,H,W]
    labels: Sequence[int] | None = None  # [n] where they may differ from the class scored for
    chosen: str = ""  # how they were chosen, in words


@dataclass(frozen=True)
class Content:
    """All that a report shows: methods, scored on the same N images."""

    title: str
    facts: Facts
    scores: Mapping[str, Scores]
    summaries: Summaries
    standing: Standing
    names: Sequence[str]  # [N] of all images
    shown: Shown
    classes: Sequence[str] | None = None  # names of the classes
    fill: str | Tensor = "black"  # what stood in for hidden pixels; a tensor as for the shown
    remarks: Sequence[str] = ()  # what a reader must know first, beside what the scores tell
    alpha_curves: AlphaCurves | None = None  # MSI over alpha_min of some of the images

    @property
    def methods(self) -> list[str]:
        """Best first, those outside the contest too."""
        return ranked(self.summaries, self.standing)

    @property
    def first(self) -> Scores:
        """The scores of some method, for what is the same in all."""
        return next(iter(self.scores.values()))

    def schedule(self, method: str) -> Schedule:
        """Where a method's curves have their points, at the alpha_min of its scores."""
        found = self.scores[method]
        return replace(found.plan.schedules[0], alpha_min=found.alpha_min)

    def class_name(self, number: int) -> str:
        """A class in words, or its number."""
        known = self.classes or ()
        return known[number] if number < len(known) else f"class {number}"

    def check(self) -> None:
        """Raise unless the parts belong together."""
        _check_methods(self)
        _check_shown(self)


def pick_shown(scores: Mapping[str, Scores], count: int = MOST_SHOWN) -> list[int]:
    """Which images to show: in turn the best, the worst and the most disputed by MSI.

    Best and worst are by the mean over the methods, disputed by the spread between them.
    """
    values = torch.stack([found.msi for found in scores.values()]).nan_to_num(0)  # [methods,N]
    means, spreads = values.mean(0), values.amax(0) - values.amin(0)
    orders = [
        order.argsort(descending=True, stable=True).tolist() for order in (means, -means, spreads)
    ]
    in_turn = dict.fromkeys(chain.from_iterable(zip(*orders, strict=True)))
    return sorted(list(in_turn)[:count])


def _check_methods(content: Content) -> None:
    if not content.scores:
        raise UserError("a report needs the scores of one method at least, got none")
    if set(content.scores) != set(content.summaries):
        raise UserError(
            f"scores and summaries must be of the same methods, got {sorted(content.scores)} and"
            f" {sorted(content.summaries)}"
        )
    outside = set(content.standing.ranking) - set(content.scores)
    if outside:
        raise UserError(f"the standing compares methods without scores: {sorted(outside)}")
    for method, found in content.scores.items():
        if "msi" not in found.columns:
            raise UserError(f"a report shows MSI, which {method} lacks: score it with that column")
        if len(found) != len(content.names):
            raise UserError(
                f"names must be one an image: {method} has {len(found)} images, and there are"
                f" {len(content.names)} names"
            )


def _check_shown(content: Content) -> None:
    shown, n = content.shown, len(content.names)
    if not 1 <= len(shown.rows) <= MOST_SHOWN or len(shown.rows) != len(shown.images):
        raise UserError(
            f"the images shown must be 1 to {MOST_SHOWN} with a row of the scores each, got"
            f" {len(shown.images)} images and {len(shown.rows)} rows: pick_shown chooses some"
        )
    if not all(0 <= row < n for row in shown.rows):
        raise UserError(f"rows of images shown must lie in 0..{n - 1}, got {list(shown.rows)}")
    if set(shown.heatmaps) != set(content.scores):
        raise UserError(
            f"heatmaps shown must be of the methods scored, {sorted(content.scores)}, got"
            f" {sorted(shown.heatmaps)}"
        )
    for maps in shown.heatmaps.values():
        check_heatmaps(maps, shown.images)
    check_fill(content.fill, shown.images)
