"""Make the output layer random: do the maps of a source change?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.classifier.randomization import cascade, copied, randomise
from sufficit.data.batch import Batch, Sample
from sufficit.explainers.explanation import methods_for
from sufficit.metrics.column import Heading
from sufficit.metrics.columns import HEADINGS
from sufficit.probes.probe import ProbeBase, SourceRows
from sufficit.seeds import seeded
from sufficit.similarity import rank_correlation
from sufficit.sources import Method, draw

HEAD = "random_head"


@dataclass(frozen=True)
class HeadProbe(ProbeBase):
    """Rank correlation of a map with that for a copy of the model whose output layer is random."""

    model: Classifier
    sources: Sequence[Method]  # those that draw from a model
    seed: int = 0
    images: Sample = None
    key: str = "head"

    @property
    def headings(self) -> Mapping[str, Heading]:  # type: ignore[override]  # computed here
        """The correlation."""
        return {HEAD: HEADINGS[HEAD]}

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        """Draw again for the copy, the same classes, and compare."""
        # Checked for the model itself: an adapter refuses a copy with other weights.
        checked = methods_for({one.name: one.method for one in self.sources}, self.model)
        sources = [replace(one, method=checked[one.name]) for one in self.sources]
        copy = copied(self.model)
        randomise(copy.bare, cascade(copy, batch.images)[0], self.seed)
        with seeded(self.seed):
            drawn = draw(copy, batch.for_another_model(), sources)
        return {
            name: {HEAD: rank_correlation(maps[name], one.at(batch.size))}
            for name, one in drawn.items()
        }
