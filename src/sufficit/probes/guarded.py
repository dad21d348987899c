"""A probe of the user's, which must leave the model as it was."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.data.batch import Batch
from sufficit.explainers.guard import call_guarded
from sufficit.probes.probe import Donors, Probe, SourceRows


@dataclass(frozen=True)
class GuardedProbe:
    """The same probe; raise if it changes the model, and have it draw by seed and image."""

    probe: Probe
    classifier: Classifier
    seed: int = 0

    def __getattr__(self, name: str) -> Any:
        if name == "probe":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.probe, name)

    def holding(self, held: Donors) -> Probe:
        """Return the probe with the images that it holds."""
        found: Any = replace(self, probe=self.probe.holding(held))
        return found  # type: ignore[no-any-return]  # what it lacks is the inner probe's

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        """Measure heatmaps."""

        def call(rows: Sequence[int]) -> SourceRows:
            some = {name: one[list(rows)] for name, one in maps.items()}
            return self.probe(batch.rows(rows), some)

        return call_guarded(
            f"probe {self.probe.key}",
            self.probe,
            call,
            _joined,
            classifier=self.classifier,
            images=batch.images,
            names=batch.names,
            seed=self.seed,
        )


def _joined(parts: Sequence[SourceRows]) -> SourceRows:
    """What a probe found of several images, each alone."""
    return {
        source: {name: torch.cat([part[source][name] for part in parts]) for name in columns}
        for source, columns in parts[0].items()
    }
