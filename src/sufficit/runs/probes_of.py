"""Every measurement of a run, in one list: the only place that knows the options of scoring."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sufficit.data.batch import Sample
from sufficit.explainers.region_search import FILLS as SEARCHED_FILLS
from sufficit.metrics.column import Column, Heading
from sufficit.metrics.columns import ALPHA_GRID, METRICS
from sufficit.metrics.leakage import POOL, draw_pool
from sufficit.metrics.metric import Metric, Schedule
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.probes.band import BandProbe
from sufficit.probes.ceiling import OWN, CeilingProbe
from sufficit.probes.head import HeadProbe
from sufficit.probes.leak import LeakProbe
from sufficit.probes.parts import PartsProbe
from sufficit.probes.probe import Probe
from sufficit.probes.standard import (
    MSI,
    AskedModel,
    Derived,
    asked_models,
    column_probes,
    derived_columns,
    held_out_probe,
)
from sufficit.runs.config import DONORS
from sufficit.sources import Method, Source

if TYPE_CHECKING:
    from sufficit.runs.job import Job

HELD_OUT_FILLS = ("blur", "mean", "noise")  # the first that nothing else uses
ALPHA_CURVE = "msi_alpha"
CHECKED = 5_000  # images with leakage and the held-out fill: these checks need no more
CURVE_IMAGES, CEILING_IMAGES, HEAD_IMAGES = 16, 64, 8


def probes_of(job: "Job") -> list[Probe]:
    """The probes of a job. A new trust check is a class in `sufficit.probes` and a line here."""
    checks, scored = job.config.wanted_checks, MSI in job.scoring.metrics
    models = models_of(job)
    found = column_probes(job.scoring, models)
    checked = job.sample(CHECKED) if len(job.entries) > CHECKED else None
    if "fill" in checks and scored and (fill := held_out_fill(job)):
        asked = _asked(job, fill)
        found.append(held_out_probe(job.scoring, asked, fill, few=True, images=checked))
    if "alpha-curve" in checks and scored and job.config.alpha_min != "search":
        found += _alpha_curve(job, models[0], after=found)
    if "leak" in checks and len(job.entries) > 1:
        found.append(_leak(job, models[0].asked, checked))
    if "regions" in checks:
        found.append(PartsProbe(models[0].asked, job.schedule.alpha_min))
    if "ceiling" in checks and scored:
        found.append(_ceiling(job))
    if "head" in checks and (drawing := [one for one in job.sources if isinstance(one, Method)]):
        images = job.sample(HEAD_IMAGES)
        found.append(HeadProbe(job.classifier, tuple(drawing), job.config.seed, images))
    return found


def derived_of(job: "Job") -> list[Derived]:
    """The columns that are computed from those of the probes."""
    if MSI not in job.scoring.metrics:
        return []
    held_out = "fill" in job.config.wanted_checks and held_out_fill(job) is not None
    return derived_columns(models_of(job), held_out=held_out)


def models_of(job: "Job") -> list[AskedModel]:
    """The model and its twin with every fill."""
    return asked_models(
        job.classifier,
        job.config.fills,
        names=job.config.fills,
        twin=job.twin,
        batch_size=job.config.batch_size,
        faster=job.copies.get,
    )


def held_out_fill(job: "Job") -> str | None:
    """The first fill of a few that neither the run nor a source asks the model with."""
    asked = {*job.config.fills, *(fill for one in job.sources for fill in asked_fills(one))}
    return next((fill for fill in HELD_OUT_FILLS if fill not in asked), None)


def asked_fills(source: Source) -> tuple[str, ...]:
    """The fills that a source asks the model with while it draws."""
    found: tuple[str, ...] = getattr(source, "fills", ())
    return found


def alpha_probe(job: "Job", model: AskedModel, *, coarse: bool, calls: int | None) -> BandProbe:
    """MSI at many alpha_min, as candidates of one column."""
    config = job.config
    value_step = coarse_step(config.value_step) if coarse else config.value_step
    percent_step = 0.02 if coarse else config.percent_step
    schedules = tuple(
        Schedule(alpha, config.score_kind, value_step, percent_step) for alpha in ALPHA_GRID
    )
    column = Column(ALPHA_CURVE, _msi(), schedules, Heading("MSI", "MSI over alpha_min"))
    return BandProbe(model.asked, (column,), key="alpha-curve", most=calls, seed=config.seed)


def coarse_step(value_step: float) -> float:
    """The step of a sample's curves: 0.05, or the run's step where it is larger."""
    return max(0.05, value_step)


def _alpha_curve(job: "Job", model: AskedModel, after: list[Probe]) -> list[Probe]:
    """MSI over alpha_min on a sample, for half of what the scores cost at most.

    Or on one image, where that costs no more than the scores.
    """
    images = len(job.entries)
    scores = images * sum(probe.calls for probe in after if probe.images is None)
    curve = alpha_probe(job, model, coarse=True, calls=job.search_calls())
    each = curve.calls + 1
    most = min(CURVE_IMAGES, scores // (2 * each) or scores // each)
    if most == 0:
        return []
    return [replace(curve, images=job.sample(most))]


def _leak(job: "Job", asked: MaskedModel, images: Sample) -> LeakProbe:
    labels = torch.from_numpy(job.entries.labels())
    pool = draw_pool(labels, POOL, job.config.seed)
    return LeakProbe(
        asked=asked,
        alpha_min=job.schedule.alpha_min,
        donors=job.config.donors or DONORS,
        seed=job.config.seed,
        images=images,
        holds=frozenset(pool),
    )


def _ceiling(job: "Job") -> CeilingProbe:
    """Boxes are searched under all fills but the one they are scored with."""
    fill = held_out_fill(job) or "blur"
    schedule = Schedule(
        job.schedule.alpha_min, job.config.score_kind, coarse_step(job.config.value_step)
    )
    column = Column(OWN, _msi(), (schedule,), Heading("MSI", "MSI"))
    images = job.sample(CEILING_IMAGES)
    inner = BandProbe(_asked(job, fill), (column,), key="ceiling", images=images)
    fills = tuple(one for one in SEARCHED_FILLS if one != fill)
    return CeilingProbe(inner, fills, images=images)


def _asked(job: "Job", fill: str) -> MaskedModel:
    model = job.classifier
    return MaskedModel(model, fill, job.config.batch_size, job.copies.get(model))


def _msi() -> Metric:
    found = METRICS[MSI]
    assert isinstance(found, Metric)
    return found
