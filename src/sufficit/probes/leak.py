"""Lay masks over images of other classes: does their shape alone reveal the class?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sufficit.data.batch import Batch, Sample
from sufficit.metrics.column import Heading
from sufficit.metrics.columns import HEADINGS, ZERO_LINE
from sufficit.metrics.leakage import LIFT, LIFTS, OVER_GRADCAM, TENSORS, LeakMeter, Pool
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.probes.probe import CALLS, Donors, ProbeBase, SourceRows, by_source

COLUMNS = tuple(f"leak_{name}".replace("_donors", "") for name in TENSORS if name != "calls")
RATIO = "leak_ratio"
USUAL = "gradcam"  # whose lift others are compared with


def with_a_shape(maps: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the maps without the control that marks everything: it has no shape to leak."""
    return {name: one for name, one in maps.items() if name != ZERO_LINE}


@dataclass(frozen=True)
class LeakProbe(ProbeBase):
    """The leak of each mask. The images it `holds` are read and explained before all others."""

    asked: MaskedModel
    alpha_min: float
    donors: int
    seed: int = 0
    with_usual: bool = False  # whether Grad-CAM is among the sources
    images: Sample = None
    holds: frozenset[int] = frozenset()  # the numbers of the images that donors are drawn from
    held: Donors | None = None  # those images, once they are drawn
    key: str = "leak"

    @property
    def headings(self) -> Mapping[str, Heading]:  # type: ignore[override]  # computed here
        """The columns of the leak: shares, or lifts for a model of many classes."""
        over = (OVER_GRADCAM,) if self.with_usual else ()
        names = (LIFT, *over, *LIFTS) if self._unheld.lifted else COLUMNS
        return {name: HEADINGS[name] for name in names}

    @property
    def ratios(self) -> Mapping[str, tuple[str, str]]:  # type: ignore[override]
        """The leak over its chance level."""
        return {} if self._unheld.lifted else {RATIO: ("leak", "leak_chance")}

    @property
    def calls(self) -> int:  # type: ignore[override]
        """Forward passes per image and source, at most."""
        return self._unheld.calls

    @property
    def _unheld(self) -> LeakMeter:
        """The meter without its pool."""
        return LeakMeter(self.asked, self.alpha_min, self.donors, self.seed)

    def holding(self, held: Donors) -> "LeakProbe":
        """Return the probe with its donors."""
        return replace(self, held=held)

    @cached_property
    def _meter(self) -> LeakMeter | None:
        """The meter with its pool; None if there are no donors of another class."""
        if self.held is None or len(self.held.batch.targets.unique()) < 2:
            return None
        if not with_a_shape(self.held.maps):
            return None
        heatmaps = torch.cat([*with_a_shape(self.held.maps).values()])
        pool = Pool(self.held.batch.images, heatmaps, self.held.batch.targets)
        meter = replace(self._unheld, pool=pool)
        meter.check(pool.images)
        return meter

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        """Measure the leak; nothing where it cannot be measured."""
        if self._meter is None:
            return {}
        # The pool has the maps of the same sources, in the same order.
        assert self.held is not None
        ordered = {name: maps[name] for name in with_a_shape(self.held.maps)}
        found = self._meter.measure(torch.cat([*ordered.values()]), batch.targets, batch.numbers)
        rows = by_source(found.columns | {CALLS + self.key: found.calls.double()}, ordered)
        if found.lifts is None or not self.with_usual:
            return rows
        usual = rows[USUAL][LIFT]
        return {
            name: {**columns, OVER_GRADCAM: columns[LIFT] - usual} for name, columns in rows.items()
        }
