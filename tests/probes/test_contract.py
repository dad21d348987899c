"""Every probe keeps the same promises: the engine, the forecast and the tables rely on them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib import import_module
from inspect import getmembers, isclass
from pathlib import Path
from pkgutil import iter_modules
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

import sufficit.probes
from extensions import TOP_QUARTER, Mirrored, OtherHead, Redrawn
from small_models import rand, small_vit
from sufficit import Classifier
from sufficit.data.batch import Batch
from sufficit.data.images import ImageSource
from sufficit.data.truth import TruthMasks
from sufficit.metrics.column import CANDIDATE
from sufficit.perturbation.masked_model import whole_images
from sufficit.probes.band import ANSWERS, CURVE, BandProbe
from sufficit.probes.guarded import GuardedProbe
from sufficit.probes.probe import CALLS, RIGHT, Probe, SourceRows
from sufficit.progress import counted
from sufficit.runs.config import config_from
from sufficit.runs.drawing import draw_usable, holding
from sufficit.runs.engine import quiet, score_unit
from sufficit.runs.job import Job, make_job
from sufficit.runs.probes_of import alpha_probe, models_of
from sufficit.runs.spread import in_this_process
from sufficit.runs.store import Store
from sufficit.sources import source_of

N = 5
LABELS = torch.tensor([0, 1, 2, 0, 1])
MARK = 0.501  # of the first pixel: the model gives NaN for a masked image that has it


def marked_images() -> Tensor:
    """Images of which the second one has a mark."""
    images = 0.1 + 0.9 * rand(N, 3, 16, 16, seed=4)
    images[1, :, -1, -1] = MARK
    return images


WHOLE = marked_images()[1].mean()


class Fragile(nn.Module):
    """Gives NaN for the marked image through a mask that keeps the mark, and no other NaN."""

    def forward(self, images: Tensor) -> Tensor:
        marked = (images[:, :, -1, -1] - MARK).abs().amax(1) < 1e-6
        masked = (images.mean((1, 2, 3)) - WHOLE).abs() > 1e-6
        return images.masked_fill((marked & masked)[:, None, None, None], torch.nan)


def cnn(seed: int = 0) -> Classifier:
    torch.manual_seed(seed)
    model = nn.Sequential(
        Fragile(),
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    with torch.no_grad():
        model[5].weight *= 8
    return Classifier(model.eval(), layer="2")


def vit() -> Classifier:
    torch.manual_seed(0)
    return Classifier(small_vit().eval())


def first_logit(logits: Tensor) -> Tensor:
    return logits[:, 0].exp()


def grey(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
    return images.mean(1)


def images_of(case: "Case") -> Tensor:
    side = 32 if case.model == "vit" else 16
    return 0.1 + 0.9 * rand(N, 3, side, side, seed=4)


@dataclass(frozen=True, eq=False)
class Case:
    """The options of a run, and what it is a run of."""

    name: str
    options: Mapping[str, Any]
    model: str = "cnn"
    twin: bool = False
    truth: bool = False
    searching: bool = False
    own: bool = False  # probes and columns of the user's

    @cached_property
    def classifier(self) -> Classifier:
        if self.model == "score":
            return cnn().with_score(first_logit)
        return {"cnn": cnn, "vit": vit}[self.model]()

    def job(self, images: Tensor) -> Job:
        """A job over these images."""
        usual = {"model": "m", "data": "d", "value_step": 0.25, "percent_step": 0.25, "donors": 2}
        config = config_from({**usual, "device": "cpu", "checks": "none", **self.options})
        names = [f"{number}.png" for number in range(len(images))]
        sources = {"grey": grey} if self.model == "vit" else {"gradcam": "gradcam", "mine": grey}
        extra: list[Probe] = []
        if self.own:
            extra = [
                Mirrored(self.classifier),
                Redrawn(self.classifier, ("gradcam",)),
                OtherHead(self.classifier, "5", "gradcam"),
            ]
        labels = None if self.model == "score" else LABELS
        return make_job(
            config,
            classifier=self.classifier,
            images=ImageSource.from_tensors(images, names, labels),
            sources=[
                *(
                    source_of(name, one, layer="2" if self.model != "vit" else None)
                    for name, one in sources.items()
                ),
                source_of("random", "random"),
                source_of("everything", "everything"),
            ],
            twin=cnn(1) if self.twin else None,
            truth=TruthMasks((images.mean(1) > 0.6).float()) if self.truth else None,
            metrics={"top_quarter": TOP_QUARTER} if self.own else None,
            probes=extra,
        )


CASES = [
    Case("all columns", {"columns": "all", "checks": "leak,alpha-curve"}, truth=True),
    Case("fills and twin", {"fills": "black,blur", "checks": "fill,head"}, twin=True),
    Case(
        "cells twice",
        {"fills": "mean,noise", "columns": "msi,single_deletion", "score": "confidence"},
    ),
    Case("through maps", {"fills": "black,blur", "columns": "msi,adcc,arcc"}),
    Case("few masks", {"calls": 18, "columns": "paper,msi_rank", "checks": "fill"}),
    Case("road", {"fills": "road", "columns": "msi,insertion_pixel"}),
    Case("drop", {"fills": "drop", "columns": "msi,insertion_percent"}, model="vit"),
    Case("own score", {"columns": "paper", "targets": "prediction"}, model="score"),
    Case("ceiling", {"columns": "msi", "checks": "ceiling"}),
    Case("regions", {"columns": "msi", "checks": "regions"}),
    Case("search", {"alpha_min": "search", "columns": "msi"}, searching=True),
    Case("own", {"columns": "msi,top_quarter"}, own=True),
]


@dataclass(frozen=True)
class Ready:
    """A job whose images are read and drawn."""

    job: Job
    batch: Batch
    maps: Mapping[str, Tensor]

    def probe(self, key: str) -> Probe:
        (found,) = (one for one in self.job.probes if one.key == key)
        if key == "ceiling":
            found = replace(found, search=60)  # type: ignore[type-var]
        return found


@cache
def job_of(case: Case, *, marked: bool = False) -> Job:
    """The job of a case; with one image that the model gives NaN for through masks."""
    job = case.job(marked_images() if marked else images_of(case))
    if case.searching:
        probe = alpha_probe(job, models_of(job)[0], coarse=False, calls=None)
        return job.asking_only(range(N), probe)
    if marked:  # donors are clean images: what the model says of them is in every row
        return replace(job, held=ready(case).job.held)
    return job


@cache
def ready(case: Case, *, marked: bool = False) -> Ready:
    """The job of a case, drawn."""
    job = job_of(case, marked=marked)
    if not marked:
        with TemporaryDirectory() as place:
            store = Store(Path(place)).start(job.key(), job.entries)
            job = holding(job, store, in_this_process, False)
    batch, notes = job.reader.read(job.units[0])
    batch, drawn = draw_usable(replace(job, held=None), batch, notes)
    assert batch is not None
    assert len(batch) == N
    return Ready(job, batch, {name: one.at(batch.size) for name, one in drawn.items()})


def asked(probe: Probe, made: Ready, some: list[int]) -> SourceRows:
    """What a probe finds of some of the images, of which nothing but the predictions is known."""
    batch = made.batch.rows(some)
    whole = whole_images(made.job.classifier, batch)
    batch = replace(batch, known={("whole", made.job.classifier): whole})
    with quiet():
        return probe(batch, {name: one[some] for name, one in made.maps.items()})


EACH = [(case, one.key) for case in CASES for one in job_of(case).probes]
every_probe = pytest.mark.parametrize(
    ("case", "key"), EACH, ids=[f"{case.name}-{key or 'first'}" for case, key in EACH]
)
ALL = list(range(N))


def columns_of(found: SourceRows) -> dict[tuple[str, str], Tensor]:
    return {(s, name): values for s, own in found.items() for name, values in own.items()}


def assert_same(one: SourceRows, other: SourceRows, tolerance: float = 1e-5) -> None:
    """Twice the same columns with the same values, NaN at the same places."""
    first, second = columns_of(one), columns_of(other)
    assert first.keys() == second.keys()
    for key, values in first.items():
        wrong = partial("{}: {}".format, key)
        torch.testing.assert_close(
            values, second[key], atol=tolerance, rtol=0, equal_nan=True, msg=wrong
        )


def test_every_kind_of_probe_is_among_them() -> None:
    names = [one.name for one in iter_modules(sufficit.probes.__path__)]
    modules = [import_module(f"sufficit.probes.{name}") for name in names]
    classes = {
        one
        for module in modules
        for _, one in getmembers(module, isclass)
        if one.__module__ == module.__name__ and one.__name__.endswith("Probe")
    }
    found = {type(ready(case).probe(key)) for case, key in EACH}
    assert found >= classes - {Probe}


@every_probe
def test_images_one_by_one_give_what_they_give_together(case: Case, key: str) -> None:
    made = ready(case)
    probe = made.probe(key)
    whole = asked(probe, made, ALL)
    for row in ALL:
        alone = asked(probe, made, [row])
        assert_same(alone, {s: {n: v[[row]] for n, v in own.items()} for s, own in whole.items()})


@every_probe
def test_the_order_of_the_images_changes_no_row(case: Case, key: str) -> None:
    made, order = ready(case), [3, 0, 4, 2, 1]
    whole = asked(made.probe(key), made, ALL)
    moved = asked(made.probe(key), made, order)
    assert_same(moved, {s: {n: v[order] for n, v in own.items()} for s, own in whole.items()})


@every_probe
def test_calls_are_never_more_than_forecast(case: Case, key: str) -> None:
    made, passes = ready(case), list[int]()
    probe = made.probe(key)
    with counted(passes.append):
        found = asked(probe, made, ALL)
    width = len(made.maps)
    limit = N * (probe.calls * width + probe.calls_once)
    assert sum(passes) <= limit
    said = [v.nansum() for (_, name), v in columns_of(found).items() if name.startswith(CALLS)]
    # Whole images count once per model, and were asked before.
    others = width - 1  # without the control that marks everything
    whole = N * others * bool(getattr(probe, "counts_whole", False))
    if said and key != "ceiling":  # whose search is not in the rows
        assert sum(passes) <= sum(said) - whole <= limit - whole
    assert (limit == 0) == (sum(passes) == 0)


@every_probe
def test_columns_are_those_of_the_headings(case: Case, key: str) -> None:
    made = ready(case)
    probe = made.probe(key)
    for source, columns in asked(probe, made, ALL).items():
        assert source in made.maps
        known = (CALLS, RIGHT, ANSWERS, CURVE)
        names = [name for name in columns if not name.startswith(known)]
        values = {name for name in names if CANDIDATE not in name}
        chosen = {name.partition(CANDIDATE)[0] for name in names} - values
        assert values <= {*probe.headings}
        assert {*probe.headings} - values <= chosen
        for name in values:
            assert columns[name].shape == (N,)
            if getattr(probe, "drawing", None) is not None:
                continue  # an estimate may be outside
            low, high = probe.headings[name].limits
            finite = columns[name][~columns[name].isnan()]
            assert ((finite >= low - 1e-9) & (finite <= high + 1e-9)).all(), name


@every_probe
def test_a_probe_is_the_same_in_another_process(case: Case, key: str) -> None:
    made = ready(case)
    probe = made.probe(key)
    again = cloudpickle.loads(cloudpickle.dumps(probe))
    assert (again.key, again.calls, again.calls_once) == (key, probe.calls, probe.calls_once)
    assert {*again.headings} == {*probe.headings}
    with quiet():
        assert_same(*(one(made.batch.for_another_model(), made.maps) for one in (again, probe)), 0)


@every_probe
def test_images_outside_of_a_sample_are_left_nan(case: Case, key: str) -> None:
    made = ready(case)
    probe = made.probe(key)
    inner = probe.probe if isinstance(probe, GuardedProbe) else probe
    whole = asked(probe, made, ALL)
    if isinstance(inner, Mirrored):
        sampled: Any = Mirrored(inner.model, frozenset({1, 3}))
    elif hasattr(inner, "images") and hasattr(inner, "__dataclass_fields__"):
        fields = inner.__dataclass_fields__  # type: ignore[attr-defined]
        if "images" not in fields:
            pytest.skip("it always looks at all images")
        sampled = replace(probe, images=frozenset({1, 3}))  # type: ignore[type-var]
    else:
        pytest.skip("it always looks at all images")
    with quiet():
        rows = score_unit(replace(made.job, only=(sampled,)), made.job.units[0])
    for (source, name), values in columns_of(whole).items():
        if values.ndim == 1 and not name.startswith(ANSWERS):
            found = rows.values[source][name]
            assert found[[0, 2, 4]].isnan().all(), name
            torch.testing.assert_close(
                found[[1, 3]], values[[1, 3]].double(), atol=1e-5, rtol=0, equal_nan=True
            )


@every_probe
def test_nan_stays_in_its_row(case: Case, key: str) -> None:
    if case.model == "vit":
        pytest.skip("its tokens are left out, so that no pixel tells it is masked")
    clean, marked = ready(case), ready(case, marked=True)
    whole, broken = (asked(made.probe(key), made, ALL) for made in (clean, marked))
    others = [0, 2, 3, 4]
    given = {s: {n: v[others] for n, v in own.items()} for s, own in broken.items()}
    assert_same(given, {s: {n: v[others] for n, v in own.items()} for s, own in whole.items()})
    hit = [v[1].isnan().any() for v in columns_of(broken).values() if v.is_floating_point()]
    if isinstance(clean.probe(key), BandProbe):
        assert any(hit), "the model gave no NaN"
