"""What a run computes from: config, classifier, images with labels, heatmap sources."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sufficit.classifier.acceleration import pays
from sufficit.classifier.checkpoint import DESCRIPTION
from sufficit.classifier.classifier import Classifier
from sufficit.classifier.fingerprint import digest
from sufficit.classifier.loading import load_classifier
from sufficit.classifier.source_code import code_digest, code_of, python_function, versions_of
from sufficit.data.images import BadImageError, ImageSource, drawn, open_images, read_image
from sufficit.data.loader import num_classes, numbers_for
from sufficit.data.manifest import Manifest, Units, listed
from sufficit.data.truth import Truth, TruthMasks, truth_from
from sufficit.errors import UserError, unknown, warn_user
from sufficit.explainers import methods_for
from sufficit.files import local_file, place
from sufficit.metrics.conditions import FIRST, Condition, check_twin, make_conditions
from sufficit.metrics.leakage import POOL, draw_pool
from sufficit.metrics.plan import Plan, coarse, make_plan, spread
from sufficit.perturbation.fills import FILLS
from sufficit.perturbation.predict import check_batch_size
from sufficit.perturbation.tokens import drops, token_model
from sufficit.provenance import plain
from sufficit.report.content import MOST_SHOWN
from sufficit.runs.config import CONTROLS, FEWEST_UNITS, LONG, MODEL, UNIT, RunConfig
from sufficit.runs.maps import GivenMaps, MapTensor, Source, check_name, identity, sources_named
from sufficit.runs.store import UNIT_SIZE
from sufficit.statistics import Chance

FIRST_LOOK = 200  # images; each look has twice as many as the one before


@dataclass(frozen=True)
class Job:
    """All that a run computes from; every worker has one."""

    config: RunConfig
    classifier: Classifier
    entries: Manifest  # all images, in order, with labels where they are known
    sources: Mapping[str, Source]  # by name, controls last
    targets: Literal["label", "prediction"]
    conditions: tuple[Condition, ...] = (FIRST,)  # fills, and the model or its twin
    twin: Classifier | None = None  # answers for masked images too; it draws no heatmaps
    placed: str | None = None  # the workers' device; None: that of the classifier
    references: tuple[str, ...] = ()  # sources that are scored but not ranked, as the truth
    truth: Truth | None = None  # where the objects are
    part: int | None = None  # the units to score, the first ones; None for all

    @cached_property
    def plan(self) -> Plan:
        """The bands that every heatmap is scored with."""
        return make_plan(**self.config.plan_options())

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """The plan of every condition, by key."""
        return {condition.key: condition.plan(self.plan) for condition in self.conditions}

    @property
    def fill(self) -> str | Tensor:
        """The fill of the first condition, which leakage and the images shown have."""
        return self.conditions[0].fill

    @cached_property
    def units(self) -> Units:
        """The images in numbered batches."""
        return Units(self.entries, None if self.config.within is None else self.order, self.part)

    @cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """The numbers of all images in random order, by seed."""
        return np.random.default_rng(self.config.seed).permutation(len(self.entries))

    @property
    def looks(self) -> list[int]:
        """The number of units at each look at the results; without `within` one, at all."""
        images, unit = len(self.entries), self.entries.unit
        return [-(-images // unit)] if self.config.within is None else look_sizes(images, unit)

    @property
    def chance(self) -> Chance:
        """The settings of intervals and tests: a share of the error for each look."""
        return Chance.split(len(self.looks), self.config.seed)

    @property
    def class_folders(self) -> Mapping[str, int]:
        """The class number of each class folder; a shard is not a class folder."""
        in_shards = ".tar/" in self.entries[0].image.name
        return {} if in_shards else self.entries.numbers or {}

    @property
    def compiles(self) -> bool:
        """Whether a compiled copy of the model scores the images."""
        if any(drops(condition.fill) for condition in self.conditions):
            return False  # a compiled copy has no parts that take tokens
        calls = len(self.entries) * len(self.sources) * self.masks
        return pays(self.classifier, self.device, calls, self.config.compile)

    @property
    def masks(self) -> int:
        """The masks asked per image and source, at most."""
        return sum(plan.width for plan in self.plans.values())

    @cached_property
    def curve_plan(self) -> Plan:
        """The bands of MSI over alpha_min, of images of the sample."""
        config = self.config
        return make_plan("search", config.score_kind, coarse(config.value_step), columns=["msi"])

    @property
    def device(self) -> str:
        """Where the units are computed."""
        return self.placed or str(self.classifier.device)

    @property
    def ranked(self) -> list[str]:
        """The sources that are compared: all but controls and references."""
        outside = (*CONTROLS, *self.references)
        return [name for name in self.sources if name not in outside] or list(self.sources)

    @property
    def controls(self) -> list[str]:
        """The sources that any method must beat."""
        outside = (*self.ranked, *self.references)
        return [name for name in self.sources if name not in outside]

    @cached_property
    def samples(self) -> dict[str, frozenset[int]]:
        """The images that MSI over alpha_min ("alpha") and the "ceiling" are measured on."""
        wanted = self.config.alpha_curve and not self.plan.searching and "msi" in self.plan.columns
        # At most half of what the scores cost, or one image where that costs no more than they.
        scores, curve = len(self.entries) * self.masks, self.curve_plan.width
        most = min(16, scores // (2 * curve) or scores // curve) if wanted else 0
        found = {}
        for kind, count in {"alpha": most, "ceiling": 64 if self.config.ceiling else 0}.items():
            some = spread(len(self.entries), count) if count else []
            # Of images in random order the first, because a run may stop early.
            early = self.config.within is not None
            found[kind] = frozenset(self.order[: len(some)].tolist() if early else some)
        return found

    @cached_property
    def pool(self) -> list[int]:
        """The images that leakage draws donors from, chosen by seed before anything is scored."""
        if not self.config.leak or len(self.entries) < 2:
            return []
        return draw_pool(torch.from_numpy(self.entries.labels()), POOL, self.config.seed)

    @cached_property
    def shown_by_seed(self) -> tuple[int, ...]:
        """Images that may be shown whatever they score, as drawn; some more than are wanted."""
        return tuple(self.order[: 2 * MOST_SHOWN].tolist())

    def close(self) -> None:
        """Close the heatmap files."""
        for source in self.sources.values():
            if isinstance(source, GivenMaps):
                source.close()

    def key(self) -> dict[str, Any]:
        """All that must be the same to resume. Model, data and sources count by their content."""
        other = ["model", "data", "methods", "controls", "save_heatmaps", "weights", "unit_size"]
        # What comes of the last four is below.
        other += ["verify", "log", "sanity", "compile", "quick", "twin", "truth"]
        config = {name: one for name, one in asdict(self.config).items() if name not in other}
        fills = [one.fill for one in self.conditions if isinstance(one.fill, Tensor)]
        classifier = self.classifier
        return config | {
            "methods": {name: identity(source) for name, source in self.sources.items()},
            "device": self.device,
            "compiled": self.compiles,
            "model": _model_digest(classifier),
            "code of the model": [classifier.code, code_of(classifier.bare)],
            "twin": self.twin and _model_digest(self.twin),
            "layer": self.config.layer or classifier.layer,
            "preprocessing": classifier.view and asdict(classifier.view),
            "values of fills": digest(*fills),
            # Files are checked by name, size and version, or by their contents.
            "images in memory": digest(*(one.pixels for one in self.entries.tensors)),
            "truth": self.truth and self.truth.digest(),
            "class numbers": _digest([self.entries.numbers, self.entries.target]),
            UNIT_SIZE: self.entries.unit,
            "torch": version("torch"),
            "versions": versions_of(classifier.bare) | {"sufficit": version("sufficit")},
        }


def look_sizes(images: int, unit: int) -> list[int]:
    """The number of units at each look: those of 200, 400, 800, ... images, then all.

    >>> look_sizes(1000, 32)
    [7, 13, 25, 32]
    """
    doublings = max(0, (images - 1) // FIRST_LOOK).bit_length()
    counts = [*(FIRST_LOOK * 2**k for k in range(doublings)), images]
    return sorted({-(-count // unit) for count in counts})


def make_job(
    config: RunConfig,
    *,
    classifier: Classifier | None = None,
    images: ImageSource | None = None,
    sources: Mapping[str, Source] | None = None,
    unit: int | None = None,
    twin: Classifier | None = None,
    truth: Truth | None = None,
) -> Job:
    """The job of a config. What is wrong with it is said here, before any image is scored.

    A classifier, images, sources, a size of units, a twin or a truth take the place of those the
    config names.
    """
    config = config if unit is None else replace(config, unit_size=unit)
    named = sources_named(config) if sources is None else dict(sources)
    for name in named:
        check_name(name)
    plan = make_plan(**config.plan_options())
    if classifier is None:
        classifier = load_model(config, layer=None)  # sources name their layer
    elif config.output not in (None, classifier.output):
        raise UserError(
            f"the classifier gives {classifier.output}, not {config.output}: set it there, as in"
            f' Classifier(..., output="{config.output}")'
        )
    config, classifier = _with_score(config, classifier, twin)
    images = open_images(config.data, **config.column_options()) if images is None else images
    twin = _twin_of(config, twin, classifier, images)
    check_batch_size(config.batch_size)
    conditions = conditions_of(config, plan, classifier, twin)
    needing = [name for name in ("within", "ceiling") if getattr(config, name)]
    if needing and ("msi" not in plan.columns or plan.searching):
        raise UserError(
            f"{needing[0]} needs MSI at one alpha_min, from the first image on: add msi to columns,"
            " and give alpha_min a number instead of search"
        )
    masks = len(named) * sum(condition.plan(plan).width for condition in conditions)
    entries = _in_units(images, config.unit_size, classifier, masks)
    numbers = numbers_for(classifier, entries.words, entries.loose, images, config.targets)
    if config.images is not None and config.images < len(entries):
        given_in_memory = (*named.values(), truth)
        if any(isinstance(one, MapTensor | TruthMasks) for one in given_in_memory):
            raise UserError(
                "images are drawn from data on disk, but heatmaps or truth are in memory: pass"
                " fewer of both"
            )
        some = drawn(images, config.images, config.seed)
        entries = _in_units(ImageSource(some), config.unit_size, classifier, masks)
    config = config.for_images(len(entries))
    entries = entries.labelled(numbers)
    methods = {name: s for name, s in named.items() if not isinstance(s, GivenMaps)}
    if methods:
        methods_for(methods, classifier)  # refuses an adapter of another classifier
    given = [source for source in named.values() if isinstance(source, GivenMaps)]
    truth = truth_from(config.truth) if truth is None else truth
    names = [entry.image.name for entry in entries] if given or truth else []
    for source in given:
        source.check(names)
    if truth is not None:
        truth.check(names)
    kind: Literal["label", "prediction"] = "prediction" if numbers is None else "label"
    return Job(config, classifier, entries, named, kind, conditions, twin, truth=truth)


def _twin_of(
    config: RunConfig, twin: Classifier | None, classifier: Classifier, images: ImageSource
) -> Classifier | None:
    """The twin that is given, or that the config names; raise where it has other classes."""
    if twin is None and config.twin is not None:
        if ":" not in config.twin and not (place(config.twin) / DESCRIPTION).exists():
            raise UserError(
                f"a twin is a folder with {DESCRIPTION}, {config.twin} is none: give the folder"
                " that sufficit train-twin wrote"
            )
        twin = load_classifier(config.twin, device=config.device, precision=config.precision)
    if twin is not None:
        check_twin(classifier, twin)
        own, wanted = num_classes(twin, images), num_classes(classifier, images)
        if own != wanted:
            raise UserError(
                f"the twin has {own} classes and the model {wanted}: give a twin of this model"
            )
    return twin


def _with_score(
    config: RunConfig, classifier: Classifier, twin: Classifier | None
) -> tuple[RunConfig, Classifier]:
    """Config and classifier of a run; a score of the user's has no classes, so no leakage."""
    if config.score.startswith("python:") and classifier.score is None:
        function = python_function(config.score.removeprefix("python:"))
        classifier = classifier.with_score(function)
        classifier.code += code_digest(function)
    if classifier.score is None:
        return config, classifier
    if twin is not None or config.twin is not None or config.targets == "label":
        raise UserError("a score of your own has no classes: leave out --twin and --targets label")
    if config.leak:
        words = "leak and clean accuracy need classes, which a score of your own has not: left out"
        warn_user(words)
    return replace(config, targets="prediction", leak=False), classifier


def conditions_of(
    config: RunConfig, plan: Plan, classifier: Classifier, twin: Classifier | None
) -> tuple[Condition, ...]:
    """The fills of a config, those that are images read, under the names that columns have."""
    held_out, few = config.held_out_fill, config.held_out_fill == "auto"
    if few:
        measured = "msi" in plan.columns and len(config.fill_names) == 1
        held_out = "none" if not measured else "black" if config.fill == "blur" else "blur"
    models = [classifier, *([] if twin is None else [twin])]
    fills = [fill_named(word, models) for word in config.fill_names]
    other = None if held_out in (None, "none") else fill_named(str(held_out), [classifier])
    given = (plan, fills, other)
    return make_conditions(*given, names=config.fill_names, twin=twin is not None, few=few)


def _in_units(
    images: ImageSource, size: int | None, classifier: Classifier, masks: int
) -> Manifest:
    """The images in units of this size; by default so small that a short run keeps some.

    `masks` are the forward passes per image.
    """
    entries = listed(images, size or UNIT)
    few = -(-len(entries) // FEWEST_UNITS)
    weights = sum(one.numel() for one in classifier.bare.parameters())
    if size is None and few < UNIT and len(entries) * masks * weights >= LONG:
        return listed([entry.image for entry in entries], few)
    return entries


def load_model(config: RunConfig, **changed: Any) -> Classifier:
    """The classifier that the options MODEL of a config name, some of them changed."""
    return load_classifier(**{name: getattr(config, name) for name in MODEL} | changed)


def fill_named(word: str, models: Sequence[Classifier]) -> str | Tensor:
    """A fill by name, or the image in a file as the first of the models sees it: [C,H,W]."""
    for model in models if drops(word) else ():
        token_model(model)  # raises for a model without tokens
    if word in FILLS:
        return word
    if not place(word).is_file():
        if "." in word or "/" in word:
            known = ", ".join(FILLS)
            raise UserError(
                f"a fill must be {known} or an image file, there is no file {word}: check the path"
            )
        raise unknown("fill", word, [*FILLS, "an image file"])
    try:
        with local_file(place(word)) as file:
            return read_image(file, models[0].view)
    except BadImageError as error:
        raise UserError(f"--fill {word}: {error}. Give a readable image") from error


def _model_digest(classifier: Classifier) -> str:
    """The weights to the bit; a fingerprint is alike for weights that are nearly the same."""
    state = {**dict(classifier.bare.named_parameters()), **dict(classifier.bare.named_buffers())}
    seen = (classifier.mean, classifier.std, classifier.output)
    return _digest([list(state), digest(*state.values()), *seen])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(plain(value)).encode()).hexdigest()[:16]
