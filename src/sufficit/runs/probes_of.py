"""Every measurement of a run, in one list: the only place that knows the options of scoring."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sufficit.data.batch import Sample
from sufficit.explainers.region_search import SEARCHED_FILLS
from sufficit.metrics.column import Column, Heading
from sufficit.metrics.columns import ALPHA_GRID, METRICS
from sufficit.metrics.leakage import POOL, draw_pool
from sufficit.metrics.metric import Metric, Schedule
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.probes.band import BandProbe
from sufficit.probes.ceiling import OWN, CeilingProbe
from sufficit.probes.head import HeadProbe
from sufficit.probes.leak import USUAL, LeakProbe
from sufficit.probes.parts import PartsProbe
from sufficit.probes.probe import Probe
from sufficit.probes.standard import (
    MSI,
    AskedModel,
    Derived,
    asked_models,
    column_probes,
    derived_columns,
    derived_metrics,
    held_out_probe,
    redrawn_probe,
)
from sufficit.runs.config import DONORS
from sufficit.sources import Method

if TYPE_CHECKING:
    from sufficit.runs.job import Job

HELD_OUT_FILLS = ("blur", "mean", "noise")  # the first that nothing else uses
ALPHA_CURVE = "msi_alpha"
CHECKED = 5_000  # images with leakage and the held-out fill: these checks need no more
# The most images that a check of a sample looks at: what each costs is in `CHECKS`.
CURVE_IMAGES = 16
CEILING_IMAGES = 64
HEAD_IMAGES = 8


def probes_of(job: "Job") -> list[Probe]:
    """Return the probes of a job.

    A new trust check is a class in `sufficit.probes` and a line here.
    """
    checks = job.config.wanted_checks
    scored = MSI in job.scoring.metrics
    models = models_of(job)
    found = column_probes(job.scoring, models)
    # Only methods draw again, for other images or another output layer.
    drawing = tuple(one for one in job.sources if isinstance(one, Method))
    if job.scoring.redrawn:
        found.append(redrawn_probe(job.scoring, models[0], drawing))
    checked = job.sample(CHECKED) if len(job.entries) > CHECKED else None
    fill = held_out_fill(job)
    if "fill" in checks and scored and fill is not None:
        asked = _asked(job, fill)
        found.append(held_out_probe(job.scoring, asked, fill, few=True, images=checked))
    if "alpha-curve" in checks and scored and job.config.alpha_min != "search":
        found += _alpha_curve(job, models[0], after=found)
    # A donor is another image: one image has none.
    if "leak" in checks and len(job.entries) > 1:
        found.append(_leak(job, models[0].asked, checked))
    if "regions" in checks:
        found.append(PartsProbe(models[0].asked, job.schedule.alpha_min))
    if "ceiling" in checks and scored:
        found.append(_ceiling(job))
    if "head" in checks and drawing:
        images = job.sample(HEAD_IMAGES)
        found.append(HeadProbe(job.classifier, drawing, job.config.seed, images))
    return found


def derived_of(job: "Job") -> list[Derived]:
    """Return the columns that are computed from those of the probes."""
    found = derived_metrics(job.scoring)
    if MSI not in job.scoring.metrics:
        return found
    held_out = "fill" in job.config.wanted_checks and held_out_fill(job) is not None
    return found + derived_columns(models_of(job), held_out=held_out)


def models_of(job: "Job") -> list[AskedModel]:
    """Return the model and its twin with every fill."""
    return asked_models(
        job.classifier,
        job.config.fills,
        names=job.config.fills,
        twin=job.twin,
        batch_size=job.config.batch_size,
        faster=job.copies.get,
    )


def held_out_fill(job: "Job") -> str | None:
    """Return the first fill of a few that neither the run nor a source asks the model with."""
    asked = {*job.config.fills}
    for source in job.sources:
        asked |= {*getattr(source, "fills", ())}  # of a source that asks the model while it draws
    return next((fill for fill in HELD_OUT_FILLS if fill not in asked), None)


def alpha_probe(job: "Job", model: AskedModel, *, coarse: bool, calls: int | None) -> BandProbe:
    """Return the probe of MSI at many alpha_min, as candidates of one column."""
    config = job.config
    value_step = coarse_step(config.value_step) if coarse else config.value_step
    percent_step = 0.02 if coarse else config.percent_step
    schedules = tuple(
        Schedule(alpha, config.score_kind, value_step, percent_step) for alpha in ALPHA_GRID
    )
    column = Column(ALPHA_CURVE, _msi(), schedules, Heading("MSI", "MSI over alpha_min"))
    return BandProbe(model.asked, (column,), key="alpha-curve", most=calls, seed=config.seed)


def coarse_step(value_step: float) -> float:
    """Return the step of a sample's curves: 0.05, or the run's step where it is larger."""
    return max(0.05, value_step)


def _alpha_curve(job: "Job", model: AskedModel, after: list[Probe]) -> list[Probe]:
    """Return the probe of MSI over alpha_min on a sample, for at most half the scores' cost.

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
    """Return the probe of leakage, with the images it holds."""
    labels = torch.from_numpy(job.entries.labels())
    pool = draw_pool(labels, POOL, job.config.seed)
    return LeakProbe(
        asked=asked,
        alpha_min=job.schedule.alpha_min,
        donors=job.config.donors or DONORS,
        seed=job.config.seed,
        with_usual=any(source.name == USUAL for source in job.sources),
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
    # Scored with a fill that the search has not seen, or a box could fit its fill.
    inner = BandProbe(_asked(job, fill), (column,), key="ceiling", images=images)
    fills = tuple(one for one in SEARCHED_FILLS if one != fill)
    return CeilingProbe(inner, fills, images=images)


def _asked(job: "Job", fill: str) -> MaskedModel:
    """Return the model with a fill."""
    model = job.classifier
    return MaskedModel(model, fill, job.config.batch_size, job.copies.get(model))


def _msi() -> Metric:
    """Return the formula of MSI, which needs the model."""
    found = METRICS[MSI]
    assert isinstance(found, Metric)
    return found
