"""What a search for each image reaches, beside the sources: how much is there to be had?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sufficit.data.batch import Batch, Sample
from sufficit.explainers.region_search import region_search
from sufficit.metrics.column import Heading
from sufficit.metrics.columns import HEADINGS
from sufficit.probes.band import BandProbe
from sufficit.probes.probe import CALLS, ProbeBase, SourceRows

OWN, SEARCHED = "msi_ceiling", "ceiling"
CALLS_PER_IMAGE = 1500


@dataclass(frozen=True)
class CeilingProbe(ProbeBase):
    """MSI of every source and of searched boxes, under a fill that the search does not use."""

    inner: BandProbe  # MSI with that fill
    fills: Sequence[str]  # of the search
    search: int = CALLS_PER_IMAGE
    images: Sample = None
    key: str = "ceiling"

    @property
    def calls(self) -> int:  # type: ignore[override]  # computed here
        """Forward passes per image and source, at most."""
        return self.inner.calls

    @property
    def calls_once(self) -> int:  # type: ignore[override]
        """Forward passes per image: those of the search, and of its boxes' score."""
        return self.search + self.inner.calls

    @property
    def headings(self) -> Mapping[str, Heading]:  # type: ignore[override]
        """The source's own MSI with that fill, and that of the boxes."""
        return {OWN: HEADINGS[OWN], SEARCHED: HEADINGS[SEARCHED]}

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        """Search a box for each image, then score the boxes as one more source."""
        boxes = region_search(
            self.inner.asked.runner(batch.images),
            batch.images,
            batch.targets,
            calls=self.search,
            fills=self.fills,
            batch_size=self.inner.asked.batch_size,
        )
        found = self.inner(batch, {**maps, SEARCHED: boxes.to(next(iter(maps.values())).device)})
        boxed = found.pop(SEARCHED)
        calls = CALLS + self.inner.key
        rows = {
            source: {
                OWN: columns[OWN],
                SEARCHED: boxed[OWN],
                CALLS + self.key: columns[calls],
            }
            for source, columns in found.items()
        }
        # The search is shared by all sources; its passes, at most so many, count for the first one.
        first = next(iter(rows.values()))
        first[CALLS + self.key] = first[CALLS + self.key] + boxed[calls] + self.search
        return rows
