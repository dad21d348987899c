"""What a probe is: one measurement, of all images of a run or of some."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from sufficit.data.batch import Batch, Sample
from sufficit.metrics.column import Columns, Heading

SourceRows = dict[str, Columns]
"""By source, what a probe found: columns [n] with a value per image, and curves [n,P]."""
CALLS, RIGHT = "calls@", "right@"
"""The start of columns that count forward passes, and hits on whole images, under a condition."""


@dataclass(frozen=True)
class Condition:
    """What answered for masked images: sources are ranked and compared under each condition."""

    column: str  # that sources are ranked by
    key: str = ""  # the end of its columns' names; empty for the first condition
    fill: str = "black"
    twin: bool = False
    masks: int = 0  # asked per image and source, at most


class Probe(Protocol):
    """One measurement. The engine knows probes by this alone."""

    @property
    def key(self) -> str:
        """The probe's name in a run; no two probes of a run share one."""

    @property
    def images(self) -> Sample:
        """The numbers of the images that it looks at; None for all."""

    @property
    def calls(self) -> int:
        """Forward passes per image and source, at most: a forecast adds them up."""

    @property
    def calls_once(self) -> int:
        """Forward passes per image, however many sources there are."""

    @property
    def headings(self) -> Mapping[str, Heading]:
        """The columns that it adds to tables."""

    @property
    def conditions(self) -> Sequence[Condition]:
        """Under which its columns rank the sources."""

    @property
    def ratios(self) -> Mapping[str, tuple[str, str]]:
        """Ratios of two columns' means that belong into the table: name -> over, under."""

    @property
    def holds(self) -> frozenset[int]:
        """The numbers of images that it needs with their heatmaps before any other."""

    def holding(self, held: "Donors") -> "Probe":
        """Return the probe with the images that it holds, read and explained."""

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        """Measure finished heatmaps at the images' size, each [N,H,W]."""


@dataclass(frozen=True)
class Donors:
    """Images with the heatmaps of every source for them."""

    batch: Batch
    maps: Mapping[str, Tensor]  # each [P,H,W]


class ProbeBase:
    """What most probes leave as it is. A probe of your own gives `key`, `headings` and a call.

    >>> import torch
    >>> class Mean(ProbeBase):
    ...     key, headings = "mean", {"mean_value": Heading("mean", "Mean value")}
    ...     def __call__(self, batch, maps):
    ...         return {name: {"mean_value": one.mean((1, 2))} for name, one in maps.items()}
    >>> Mean().calls, Mean().images
    (0, None)
    """

    key: str = ""
    images: Sample = None
    calls: int = 0
    calls_once: int = 0
    headings: Mapping[str, Heading] = {}
    conditions: Sequence[Condition] = ()
    ratios: Mapping[str, tuple[str, str]] = {}
    holds: frozenset[int] = frozenset()

    def holding(self, held: Donors) -> "Probe":
        """Return the probe itself: it holds nothing."""
        found: Any = self
        return found  # type: ignore[no-any-return]  # a subclass gives the call


def by_source(stacked: Columns, sources: Collection[str]) -> SourceRows:
    """Split columns of all sources, one after the other: each [MN] -> by source, each [N]."""
    parts = {name: values.chunk(len(sources)) for name, values in stacked.items()}
    return {
        source: {name: part[place] for name, part in parts.items()}
        for place, source in enumerate(sources)
    }
