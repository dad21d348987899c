"""A job: config, classifier, images with labels, sources and probes of a run."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sufficit.classifier.acceleration import FastCopy, pays
from sufficit.classifier.checkpoint import DESCRIPTION
from sufficit.classifier.classifier import Classifier
from sufficit.classifier.fingerprint import digest
from sufficit.classifier.loading import load_classifier
from sufficit.classifier.source_code import (
    code_digest,
    code_of,
    identity_of,
    python_function,
    versions_of,
)
from sufficit.data.images import ImageSource, drawn, open_images
from sufficit.data.loader import num_classes, numbers_for
from sufficit.data.manifest import Manifest, Units, listed
from sufficit.data.truth import Truth, TruthMasks, truth_from
from sufficit.errors import UserError, warn_user
from sufficit.evaluation import schedules_for
from sufficit.files import place
from sufficit.metrics.columns import ZERO_LINE, check_metrics, metrics_named
from sufficit.metrics.metric import AnyMetric, MapMetric, RedrawnMetric, Schedule
from sufficit.perturbation.fills import check_fill_name
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.perturbation.predict import check_batch_size
from sufficit.perturbation.tokens import drops, token_model
from sufficit.probes.band import BandProbe
from sufficit.probes.guarded import GuardedProbe
from sufficit.probes.probe import Donors, Probe
from sufficit.probes.standard import MSI, Derived, Scoring, check_column_names, check_twin
from sufficit.provenance import plain
from sufficit.runs.config import FEWEST_UNITS, LONG, SAMPLED, SEARCHED, UNIT, RunConfig
from sufficit.runs.probes_of import derived_of, probes_of
from sufficit.runs.reader import Reader
from sufficit.runs.store import UNIT_SIZE, UNITS
from sufficit.sources import Maps, MapTensor, Source, check_names, sources_of
from sufficit.statistics import Chance

FIRST_LOOK = 200  # images
NEXT_LOOK = 1.05  # times as many images as the look before
RESERVED = ("overlays", UNITS)  # folders of a run; a source may be called as its maps are
# Options that decide no number, or that the key holds by their content.
NOT_IN_KEY = (
    *("model", "weights", "twin", "data", "truth", "methods", "unit_size"),
    *("compile", "quick", "save_heatmaps", "log"),
)


@dataclass(frozen=True)
class Held:
    """Images that a probe needs before all others, with the maps of every source."""

    donors: Donors
    maps: Mapping[str, Maps]  # as they were drawn

    @property
    def places(self) -> dict[int, int]:
        """The row of each image, by its number."""
        return {number: row for row, number in enumerate(self.donors.batch.numbers)}


@dataclass(frozen=True)
class Job:
    """All that a run computes from; every worker has one."""

    config: RunConfig
    classifier: Classifier
    entries: Manifest  # all images, in order, with labels where they are known
    sources: tuple[Source, ...]  # controls last
    targets: Literal["label", "prediction"]
    twin: Classifier | None = None  # answers for masked images too; it draws no heatmaps
    truth: Truth | None = None  # where the objects are
    metrics: Mapping[str, AnyMetric] = field(default_factory=dict)  # columns of the user's
    extra: tuple[Probe, ...] = ()  # probes of the user's
    placed: str | None = None  # the workers' device; None: that of the classifier
    alpha_min: float | None = None  # once it is known: given, or found by a first run
    held: Held | None = None  # once it is drawn
    some: tuple[int, ...] | None = None  # the numbers of the images to score; None for all
    only: tuple[Probe, ...] | None = None  # the probes of a first run, in place of all

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for a worker, which needs no list of images: units hold theirs."""
        # Not vars(self): cached properties may be large, and each worker makes its own.
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        # Some probes and derived columns depend on the list of images.
        return state | {"probes": self.probes, "derived": self.derived, "entries": None}

    @cached_property
    def schedule(self) -> Schedule:
        """The points of all curves; while alpha_min is searched for, at its usual value."""
        config = self.config
        # What a first run found; what was given, if it is a number; the usual value.
        known = (self.alpha_min, config.alpha_min, RunConfig.alpha_min)
        alpha = next(one for one in known if isinstance(one, float))
        (found,) = schedules_for([alpha], config.score_kind, config.value_step, config.percent_step)
        return found

    @property
    def is_searching(self) -> bool:
        """Whether alpha_min is still to be found."""
        return self.config.alpha_min == "search" and self.alpha_min is None

    @cached_property
    def scoring(self) -> Scoring:
        """The columns that are wanted, and how many masks are asked for them."""
        calls = self.config.most_calls
        wanted = metrics_named(
            self.config.column_words,
            self.metrics,
            truth=self.truth is not None or self.config.truth is not None,
            sampled=calls is not None,
        )
        return Scoring(wanted, self.schedule, calls, self.config.seed)

    @cached_property
    def probes(self) -> list[Probe]:
        """Every measurement of the run."""
        if self.only is not None:
            return [*self.only]
        guarded: list[Any] = [
            GuardedProbe(one, self.classifier, self.config.seed) for one in self.extra
        ]
        # A user's probe must leave the model as it was and draw by seed: a guard sees to both.
        found = [*probes_of(self), *guarded]
        check_column_names(found, self.derived)
        if self.held is None:
            return found
        return [one.holding(self.held.donors) if one.holds else one for one in found]

    @property
    def first_probe(self) -> BandProbe | None:
        """The probe of the columns under the first condition, if any column asks the model."""
        found = (one for one in self.probes if isinstance(one, BandProbe) and one.key == "")
        return next(found, None)

    @cached_property
    def derived(self) -> list[Derived]:
        """Columns that are computed from others of the same image."""
        return derived_of(self) if self.only is None else []

    @cached_property
    def units(self) -> Units:
        """The images in numbered batches."""
        # A first run looks at a sample, a run with `within` at images in random order.
        if self.some is not None:
            return Units(self.entries, np.array(self.some, dtype=np.int64))
        return Units(self.entries, None if self.config.within is None else self.order)

    @cached_property
    def reader(self) -> Reader:
        """Reads the images of units."""
        # Donors of the leak are laid under masks of any image, so that all have one size.
        one_size = any(probe.holds for probe in self.probes)
        return Reader(
            classifier=self.classifier,
            truth=self.truth,
            on_error=self.config.on_error,
            one_size=one_size,
            batch_size=self.config.batch_size,
        )

    @cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """The numbers of all images in random order, by seed."""
        return np.random.default_rng(self.config.seed).permutation(len(self.entries))

    @property
    def looks(self) -> list[int]:
        """The number of units after each of which a run with `within` may stop."""
        return look_sizes(len(self.entries), self.entries.unit)

    @property
    def chance(self) -> Chance:
        """The settings of intervals and tests."""
        return Chance(self.config.seed)

    @property
    def class_folders(self) -> Mapping[str, int]:
        """The class number of each class folder; a shard is not a class folder."""
        is_in_shard = ".tar/" in self.entries[0].image.name
        return {} if is_in_shard else self.entries.numbers or {}

    @property
    def calls(self) -> int:
        """Forward passes on masked images of the whole run, at most."""
        total = 0
        for probe in self.probes:
            images = len(self.entries) if probe.images is None else len(probe.images)
            each = probe.calls * len(self.sources)
            if isinstance(probe, BandProbe):
                # The bands of the others are the whole image, which is known, and an empty one.
                others = len(self.sources) - len(self.asked_sources)
                each = probe.calls * len(self.asked_sources) + others
            total += images * (each + probe.calls_once)
        return total

    @property
    def asked_sources(self) -> list[Source]:
        """The sources whose masks the model is asked about: not the one that marks everything."""
        return [source for source in self.sources if source.name != ZERO_LINE]

    @cached_property
    def compiles(self) -> bool:
        """Whether a compiled copy of the model answers for masked images."""
        if any(drops(fill) for fill in self.config.fills):
            return False  # a compiled copy has no parts that take tokens
        # Probes count the passes, and are made of the models that answer: of the plain ones here,
        # whatever is found. A cached property is set in __dict__.
        plain_job = replace(self, held=None)
        plain_job.__dict__["compiles"] = False
        return pays(self.classifier, self.device, plain_job.calls, self.config.compile)

    @cached_property
    def copies(self) -> dict[Classifier, FastCopy]:
        """Return the compiled copy of each model, where that pays; else nothing."""
        if not self.compiles:
            return {}
        models = [self.classifier] if self.twin is None else [self.classifier, self.twin]
        return {model: FastCopy(model, self.config.batch_size) for model in models}

    @property
    def device(self) -> str:
        """Where the units are computed."""
        return self.placed or str(self.classifier.device)

    @property
    def ranked(self) -> list[str]:
        """The sources that are compared: methods, or all if there is none."""
        methods = [source.name for source in self.sources if source.role == "method"]
        return methods or [source.name for source in self.sources]

    @property
    def controls(self) -> list[str]:
        """The sources that any method must beat; none where controls alone are compared."""
        ranked = self.ranked
        controls = [source.name for source in self.sources if source.role == "control"]
        return [name for name in controls if name not in ranked]

    def sample(self, most: int) -> frozenset[int]:
        """Return up to so many images, evenly spaced; of images in random order the first ones.

        A run with `within` may stop early, so that its samples must be among the first images.
        """
        images = len(self.entries)
        count = min(most, images)
        if self.config.within is not None:
            return frozenset(self.order[:count].tolist())
        # Evenly, because class folders come one after the other.
        return frozenset(i * images // count for i in range(count))

    def asking_only(self, images: Sequence[int], probe: Probe) -> "Job":
        """Return the job of a first run that puts one probe to some of the images."""
        return replace(self, some=tuple(images), only=(probe,), truth=None, held=None)

    def search_calls(self) -> int | None:
        """Return masks per image while alpha_min is searched for; None for all."""
        if self.config.most_calls is None:
            return None
        return max(self.config.most_calls, SEARCHED)

    def close(self) -> None:
        """Close the files of the sources."""
        for source in self.sources:
            source.close()

    def key(self) -> dict[str, Any]:
        """Return all that must be the same to resume.

        Model, data and sources count by their content.
        """
        classifier = self.classifier
        settings = {
            name: value for name, value in asdict(self.config).items() if name not in NOT_IN_KEY
        }
        return settings | {
            "methods": {source.name: source.digest() for source in self.sources},
            "metrics": {name: _metric_digest(one) for name, one in self.metrics.items()},
            "probes": {probe.key: identity_of(probe) for probe in self.extra},
            "images scored": self.some,
            "device": self.device,
            "compiled": self.compiles,
            "model": _model_digest(classifier),
            "code of the model": [classifier.code, code_of(classifier.bare)],
            "twin": self.twin and _model_digest(self.twin),
            "layer": self.config.layer or classifier.layer,
            "preprocessing": classifier.view and asdict(classifier.view),
            # Files are checked by name, size and time.
            "images in memory": digest(*(one.pixels for one in self.entries.tensors)),
            "truth": self.truth and self.truth.digest(),
            "class numbers": _digest([self.entries.numbers, self.entries.target]),
            UNIT_SIZE: self.entries.unit,
            "torch": version("torch"),
            "versions": versions_of(classifier.bare) | {"sufficit": version("sufficit")},
        }


def look_sizes(images: int, unit: int) -> list[int]:
    """Return the number of units at each look: those of 200 images, some more each time, then all.

    >>> look_sizes(300, 32)
    [7, 8, 9, 10]
    """
    counts = [min(FIRST_LOOK, images)]
    while counts[-1] < images:
        more = max(counts[-1] + unit, int(counts[-1] * NEXT_LOOK))
        counts.append(min(more, images))
    return sorted({math.ceil(count / unit) for count in counts})


def make_job(
    config: RunConfig,
    *,
    classifier: Classifier | None = None,
    images: ImageSource | None = None,
    sources: Sequence[Source] | None = None,
    unit: int | None = None,
    twin: Classifier | None = None,
    truth: Truth | None = None,
    metrics: Mapping[str, AnyMetric] | None = None,
    probes: Sequence[Probe] = (),
) -> Job:
    """Return the job of a config; raise before any image is scored for what is wrong with it.

    A classifier, images, sources, a size of units, a twin or a truth replace those that the config
    names: Python may have them in memory. A config cannot name metrics and probes.
    """
    if unit is not None:
        config = replace(config, unit_size=unit)
    if sources is None:
        sources = sources_of(
            config.methods,
            controls="controls" in config.wanted_checks,
            layer=config.layer,
            seed=config.seed,
            normalize=config.normalize,
        )
    # Sources name folders of the run: no two alike, none as a folder of its own.
    check_names(sources, RESERVED)
    if classifier is None:
        classifier = load_model(replace(config, layer=None))  # sources name their layer
    elif config.output not in (None, classifier.output):
        raise UserError(
            f"the classifier gives {classifier.output}, not {config.output}: set it there, as in"
            f' Classifier(..., output="{config.output}")'
        )
    if config.score.startswith("python:") or classifier.score is not None:
        config, classifier = _with_score(config, classifier, twin)
    if images is None:
        images = open_images(
            config.data, image_column=config.image_column, label_column=config.label_column
        )
    if twin is None and config.twin is not None:
        twin = _load_twin(config.twin, config)
    if twin is not None:
        _check_twin(twin, classifier, images)
    # What is cheap to check comes before images are listed, which may take minutes.
    check_batch_size(config.batch_size)
    _check_fills(config, classifier, twin)

    # Images are counted first: how many masks are asked depends on their number.
    entries = listed(images, config.unit_size or UNIT)
    numbers = numbers_for(classifier, entries.words, entries.loose, images, config.targets)
    if config.images is not None and config.images < len(entries):
        in_memory = any(isinstance(one, MapTensor) for one in sources)
        if in_memory or isinstance(truth, TruthMasks):
            raise UserError(
                "images are drawn from data on disk, but heatmaps or truth are in memory: pass"
                " fewer of both"
            )
        some = drawn(images, config.images, config.seed)
        entries = listed(some, config.unit_size or UNIT)
    if truth is None:
        truth = truth_from(config.truth)
    job = Job(
        config=config,
        classifier=classifier,
        entries=entries.labelled(numbers),
        sources=tuple(sources),
        targets="prediction" if numbers is None else "label",
        twin=twin,
        truth=truth,
        metrics=check_metrics(metrics),
        extra=tuple(probes),
    )
    # The number of masks decides how long the run is, and so how large its units are.
    job = _in_smaller_units(_with_calls(job))
    _check(job)
    return job


def _check(job: Job) -> None:
    """Raise where sources, truth, columns or masks do not go together."""
    names = [entry.image.name for entry in job.entries]
    for source in job.sources:
        source.check(job.classifier, names)
    if job.truth is not None:
        job.truth.check(names)
    has_msi = MSI in job.scoring.metrics
    needs_msi = job.config.within or "ceiling" in job.config.wanted_checks
    if needs_msi and (job.is_searching or not has_msi):
        needing = "within" if job.config.within else "ceiling"
        raise UserError(
            f"{needing} needs MSI at one alpha_min, from the first image on: add msi to columns,"
            " and give alpha_min a number instead of search"
        )
    if job.is_searching and not has_msi:
        raise UserError('alpha_min="search" maximises MSI: add "msi" to columns')
    for probe in job.probes:
        _ = probe.calls  # raises for too few masks


def _with_calls(job: Job) -> Job:
    """Return the job with the number of masks and donors that its images and sources call for."""
    # As a run of sampled masks would have it: for the fewest that leave means unbiased.
    sampled = replace(job, config=replace(job.config, calls=SAMPLED))
    probe = BandProbe(MaskedModel(job.classifier), tuple(sampled.scoring.columns))
    config = job.config.for_images(
        len(job.entries),
        len(job.asked_sources),
        masks=len(probe.bands) + 1,
        least=probe.least,
    )
    return replace(job, config=config)


def _in_smaller_units(job: Job) -> Job:
    """Return the job with smaller units if it is long and has few images.

    Then an interruption loses little.
    """
    few = math.ceil(len(job.entries) / FEWEST_UNITS)
    # Forward passes times weights is about proportional to the time that a run takes.
    weights = sum(one.numel() for one in job.classifier.bare.parameters())
    if job.config.unit_size is not None or few >= UNIT or job.calls * weights < LONG:
        return job
    entries = listed([entry.image for entry in job.entries], few)
    return replace(job, entries=entries.labelled(job.entries.numbers, job.entries.target))


def _load_twin(source: str, config: RunConfig) -> Classifier:
    """Load the twin that a config names."""
    if ":" not in source and not (place(source) / DESCRIPTION).exists():
        raise UserError(
            f"a twin is a folder with {DESCRIPTION}, {source} is none: give the folder that"
            " sufficit train-twin wrote"
        )
    return load_classifier(source, device=config.device, precision=config.precision)


def _check_twin(twin: Classifier, classifier: Classifier, images: ImageSource) -> None:
    """Raise for a twin of another model."""
    check_twin(classifier, twin)
    own = num_classes(twin, images)
    wanted = num_classes(classifier, images)
    if own != wanted:
        raise UserError(
            f"the twin has {own} classes and the model {wanted}: give a twin of this model"
        )


def _with_score(
    config: RunConfig, classifier: Classifier, twin: Classifier | None
) -> tuple[RunConfig, Classifier]:
    """Return config and classifier of a run with a score of the user's own.

    Such a score has no classes, and so neither labels nor leakage.
    """
    if config.score.startswith("python:") and classifier.score is None:
        function = python_function(config.score.removeprefix("python:"))
        classifier = classifier.with_score(function)
        classifier.code += code_digest(function)
    if twin is not None or config.twin is not None or config.targets == "label":
        raise UserError("a score of your own has no classes: leave out --twin and --targets label")
    checks = tuple(sorted(config.wanted_checks - {"leak"}))
    if "leak" in config.wanted_checks:
        warn_user(
            "leak and clean accuracy need classes, which a score of your own has not: left out"
        )
    return replace(config, targets="prediction", checks=checks), classifier


def _check_fills(config: RunConfig, classifier: Classifier, twin: Classifier | None) -> None:
    """Raise for an unknown fill, and for `drop` where a model has no tokens."""
    for fill in config.fills:
        check_fill_name(fill)
        if drops(fill):
            for model in filter(None, (classifier, twin)):
                token_model(model)  # raises for a model without tokens


def load_model(config: RunConfig) -> Classifier:
    """Return the classifier that a config names."""
    return load_classifier(
        config.model,
        weights=config.weights,
        num_classes=config.num_classes,
        size=config.size,
        device=config.device,
        precision=config.precision,
        layer=config.layer,
        output=config.output,
        prompts=config.prompts,
    )


def _model_digest(classifier: Classifier) -> str:
    """Return a digest of the weights to the bit; a fingerprint allows for rounding."""
    state = {**dict(classifier.bare.named_parameters()), **dict(classifier.bare.named_buffers())}
    weights = digest(*state.values())
    return _digest([list(state), weights, classifier.mean, classifier.std, classifier.output])


def _metric_digest(metric: AnyMetric) -> str:
    """Return a digest of the code of a column of the user's."""
    if isinstance(metric, MapMetric | RedrawnMetric):
        return identity_of(metric.measure)
    return identity_of(metric.formula)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(plain(value)).encode()).hexdigest()[:16]
