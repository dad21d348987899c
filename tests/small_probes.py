"""A probe of bands with the options of `evaluate`, for tests of what it asks and answers."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from sufficit import Classifier
from sufficit.evaluation import batch_of, schedules_for
from sufficit.metrics.columns import metrics_named
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.perturbation.predictions import Predictions
from sufficit.probes.band import BandProbe
from sufficit.probes.standard import Scoring

ONE = "heatmaps"


def probe_for(
    classifier: Classifier,
    *,
    alphas: Sequence[float] = (0.5,),
    score: str = "accuracy",
    value_step: float = 0.01,
    percent_step: float = 0.02,
    columns: Sequence[str] | None = None,
    calls: int | None = None,
    fill: str | Tensor = "black",
) -> BandProbe:
    """The probe of the columns' bands, at each alpha_min."""
    schedules = schedules_for(alphas, score, value_step, percent_step)
    metrics = metrics_named(columns, {}, truth=False, sampled=calls is not None)
    found = [replace(c, schedules=tuple(schedules)) for c in Scoring(metrics, schedules[0]).columns]
    return BandProbe(MaskedModel(classifier, fill), tuple(found), most=calls)


def ask(
    probe: BandProbe, images: Tensor, heatmaps: Tensor, targets: Tensor | None = None
) -> Predictions:
    """What the model says of every band, for heatmaps of one source or several."""
    return probe.answers(batch_of(probe.asked.model, images, targets), {ONE: heatmaps})
