"""`Cut`: another source's map, cut at one size for all images."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sufficit.classifier.classifier import Classifier
from sufficit.data.batch import Batch
from sufficit.errors import UserError
from sufficit.sources.kinds import Maps, Method, Role, Source, SourceBase, SourceFacts, drawn_by


@dataclass(frozen=True, eq=False)
class Cut(SourceBase):
    """Mark the pixels that the map of a source ranks highest; the model is not asked.

    - `source`: the source; `gradcam` cut at 0.1 is called `gradcam@0.1`.
    - `share`: of the pixels, above 0 to 1. A region lies in that of every larger share.
    """

    is_trusted = True
    source: Source
    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(
                f"the size of a region is a share of the image, above 0 to 1, got {self.share}:"
                " such as 0.1"
            )

    @property
    def name(self) -> str:  # type: ignore[override]  # computed here
        """That of the source, with the share."""
        return f"{self.source.name}@{self.share:g}"

    @property
    def role(self) -> Role:  # type: ignore[override]  # computed here
        """That of the source."""
        return self.source.role

    def maps(self, model: Classifier, batch: Batch) -> Maps:
        """Draw the source's maps, and mark the same share of each."""
        inner = drawn_by(self.source, model, batch)
        shares = torch.full((len(inner.maps),), self.share, dtype=torch.float64, device="cpu")
        return replace(inner, columns={}, shares=shares, asked=None)

    def methods(self) -> list[Method]:
        """Return the methods that the source reads."""
        return self.source.methods()

    def check(self, model: Classifier, names: Sequence[str]) -> None:
        """Raise before a run for what the source cannot do."""
        self.source.check(model, names)

    def digest(self) -> str:
        """Return the source and the share."""
        return f"{self.source.digest()}, cut at {self.share}"

    def facts(self) -> SourceFacts:
        """Return the facts of the source: a cut costs nothing."""
        return self.source.facts()

    def close(self) -> None:
        """Close the source's files."""
        self.source.close()
