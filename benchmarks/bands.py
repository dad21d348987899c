"""The bands and columns of a table, as `evaluate` asks for them."""

from collections.abc import Sequence
from typing import Any

from sufficit import Classifier
from sufficit.evaluation import schedules_for
from sufficit.metrics.columns import ALPHA_GRID, METRICS, column_of, metrics_named
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.probes.band import BandProbe


def band_probe(
    classifier: Classifier,
    *,
    columns: Sequence[str] | None = None,
    alpha_min: float | str = 0.5,
    score: str = "accuracy",
    value_step: float = 0.01,
    percent_step: float = 0.02,
    calls: int | None = None,
) -> BandProbe:
    """The probe of some columns, by default the eleven; of MSI alone in a search for alpha_min."""
    tried: list[Any] = [*ALPHA_GRID] if alpha_min == "search" else [alpha_min]
    schedules = tuple(schedules_for(tried, score, value_step, percent_step))
    wanted = metrics_named(columns, {}, truth=False, sampled=calls is not None)
    if alpha_min == "search":
        wanted = {"msi": METRICS["msi"]}
    found = []
    for name, metric in wanted.items():
        column = column_of(name, metric, schedules[0])  # type: ignore[arg-type]  # they are of bands
        found.append(type(column)(name, column.metric, schedules, column.heading))
    return BandProbe(MaskedModel(classifier), tuple(found), most=calls)
