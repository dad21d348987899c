"""The probes of the columns: every column under the first fill, those of the model under others."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import torch
from torch import Tensor

from sufficit.classifier.acceleration import FastCopy
from sufficit.classifier.classifier import Classifier, check_classifier
from sufficit.data.batch import Sample
from sufficit.errors import UserError
from sufficit.metrics.column import Column, Heading
from sufficit.metrics.columns import HEADINGS, METRICS, column_of, heading_of
from sufficit.metrics.metric import (
    AnyMetric,
    CellMetric,
    DerivedMetric,
    MapMetric,
    Metric,
    RedrawnMetric,
    Schedule,
    SeenMetric,
)
from sufficit.perturbation.fills import FILLS
from sufficit.perturbation.masked_model import Fill, MaskedModel
from sufficit.probes.band import BandProbe
from sufficit.probes.cells import CellProbe
from sufficit.probes.maps import MapProbe
from sufficit.probes.probe import Condition, Probe
from sufficit.probes.seen import RedrawnProbe, SeenProbe
from sufficit.sources import Method

HELD_OUT, TWIN = "held_out", "twin"  # keys
FEW = 8  # masks per image of the held-out fill, where nobody asked for more
OTHERS_GROUP = "MSI with other fills, and for a twin"
MSI = "msi"


@dataclass(frozen=True)
class Scoring:
    """What is scored, whatever the model and the fill."""

    metrics: Mapping[str, AnyMetric]  # by the name of their column
    schedule: Schedule
    calls: int | None = None  # masks per image, at most; None for all
    seed: int = 0  # of the masks drawn, where not all are asked

    @property
    def columns(self) -> list[Column]:
        """The columns of bands."""
        return [
            column_of(name, metric, self.schedule)
            for name, metric in self.metrics.items()
            if isinstance(metric, Metric) and metric.fill is None
        ]

    @property
    def filled(self) -> dict[str, list[Column]]:
        """The columns of bands that have a fill of their own, by fill."""
        found: dict[str, list[Column]] = {}
        for name, metric in self.metrics.items():
            if isinstance(metric, Metric) and metric.fill is not None:
                column = column_of(name, metric, self.schedule)
                found.setdefault(metric.fill, []).append(column)
        return found

    @property
    def cells(self) -> dict[str, CellMetric]:
        """The columns of image masks."""
        return {n: one for n, one in self.metrics.items() if isinstance(one, CellMetric)}

    @property
    def maps(self) -> dict[str, MapMetric]:
        """The columns of the heatmap alone."""
        return {n: one for n, one in self.metrics.items() if isinstance(one, MapMetric)}

    @property
    def seen(self) -> dict[str, SeenMetric]:
        """The columns of the image through the heatmap."""
        return {n: one for n, one in self.metrics.items() if isinstance(one, SeenMetric)}

    @property
    def redrawn(self) -> dict[str, RedrawnMetric]:
        """The columns that draw each heatmap again."""
        return {n: one for n, one in self.metrics.items() if isinstance(one, RedrawnMetric)}


@dataclass(frozen=True)
class AskedModel:
    """A masked model with the end of its columns' names, and what it is called."""

    asked: MaskedModel
    key: str = ""
    fill: str = "black"
    twin: bool = False

    @property
    def words(self) -> str:
        """The condition in the heading of its columns."""
        fill = "" if self.key in ("", TWIN) else f"fill {self.fill}"
        return ", ".join(filter(None, ["twin" * self.twin, fill]))


def asked_models(
    model: Classifier,
    fills: Sequence[Fill],
    *,
    names: Sequence[str] | None = None,
    twin: Classifier | None = None,
    batch_size: int | None = None,
    faster: Callable[[Classifier], FastCopy | None] = lambda _: None,
) -> list[AskedModel]:
    """Return the model with every fill, then the twin with every fill, the first one first.

    `names` are those of the fills in columns. `faster` gives a compiled copy, or None.
    """
    if not fills:
        raise UserError("fills must name at least one fill, got none: black is the default")
    words = [str(name) for name in names] if names else [word_of(fill) for fill in fills]
    keys = [key_of(fill, place) for place, fill in enumerate(names or fills)]
    if twice := [key for place, key in enumerate(keys) if key in keys[:place]]:
        raise UserError(
            f"two fills would be called {twice[0]!r} in columns: give each fill once, and files"
            " different names"
        )
    ends = ["", *keys[1:]]
    found = []
    for one, start in ((model, ""), (twin, TWIN)):
        if one is None:
            continue
        for end, fill, word in zip(ends, fills, words, strict=True):
            asked = MaskedModel(one, fill, batch_size, faster(one))
            key = "_".join(filter(None, [start, end]))
            found.append(AskedModel(asked, key, word, twin=bool(start)))
    return found


def column_probes(
    scoring: Scoring, models: Sequence[AskedModel], *, curves: bool = True, keeps: bool = True
) -> list[Probe]:
    """Return the probes of all columns under the first condition, and of others under each.

    A column of the map alone is not repeated, nor one that asks the model nothing. `keeps` has the
    first probe keep its answers, if all masks are asked.
    """
    found: list[Probe] = []
    columns = scoring.columns
    repeated = [column for column in columns if column.asks_model]
    for model in models:
        first = not model.key
        own = columns if first else [_under(column, model) for column in repeated]
        if not first and not own and not scoring.cells and not scoring.seen:
            raise UserError(
                f"{', '.join(scoring.metrics)} ask the model nothing, so that no fill or twin"
                " changes them: add a column such as msi, or give one fill"
            )
        if own:
            probe = band_probe(scoring, model, own)
            probe = replace(probe, counts_whole=model.key in ("", TWIN))
            if first:
                exact = probe.drawing is None
                probe = replace(
                    probe,
                    curves=scoring.schedule if curves else None,
                    keeps_answers=keeps and exact,
                )
            found.append(probe)
        if scoring.cells:
            found.append(_cell_probe(scoring, model))
        if scoring.seen:
            found.append(_seen_probe(scoring, model))
    for fill, some in scoring.filled.items():
        asked = replace(models[0].asked, fill=fill)
        found.append(band_probe(scoring, AskedModel(asked, f"with {fill}", fill), some, end=""))
    if scoring.maps:
        headings = {name: heading_of(name, one) for name, one in scoring.maps.items()}
        found.append(MapProbe(scoring.maps, scoring.schedule, headings))
    return found


def band_probe(
    scoring: Scoring,
    model: AskedModel,
    columns: Sequence[Column],
    *,
    most: int | None = None,
    images: Sample = None,
    end: str | None = None,
) -> BandProbe:
    """Return the probe of some columns under a condition; `most` takes the place of the calls.

    `end` is that of its columns' names, where it is not the key.
    """
    probe = BandProbe(
        asked=model.asked,
        columns=tuple(columns),
        key=model.key,
        end=model.key if end is None else end,
        most=scoring.calls if most is None else most,
        seed=scoring.seed,
        images=images,
    )
    if MSI not in [column.name for column in columns]:
        return probe
    name = f"{MSI}_{model.key}" if model.key else MSI
    masks = probe.calls + (model.key in ("", TWIN))
    return replace(probe, condition=Condition(name, model.key, model.fill, model.twin, masks))


def held_out_probe(
    scoring: Scoring, asked: MaskedModel, fill: str, *, few: bool, images: Sample = None
) -> BandProbe:
    """Return the probe of MSI under a fill that nothing else uses, on few masks per image."""
    heading = HEADINGS["msi_held_out"]
    column = replace(column_of(MSI, METRICS[MSI], scoring.schedule), heading=heading)  # type: ignore[arg-type]
    model = AskedModel(asked, HELD_OUT, fill)
    probe = band_probe(scoring, model, [column], images=images)
    if not few:
        return probe
    return band_probe(scoring, model, [column], most=max(FEW, probe.least), images=images)


def _under(column: Column, model: AskedModel) -> Column:
    """A column under another condition: the same values, another heading."""
    group = OTHERS_GROUP if column.name == MSI else ""
    heading = column.heading.under(model.words, model.key, group)
    return replace(column, heading=heading)


def _cell_probe(scoring: Scoring, model: AskedModel) -> CellProbe:
    end = _end_of(model)
    return CellProbe(
        asked=model.asked,
        metrics=scoring.cells,
        headings=_headings_under(scoring.cells, model),
        key=f"cells{end}",
        end=end,
        seed=scoring.seed,
    )


def _seen_probe(scoring: Scoring, model: AskedModel) -> SeenProbe:
    end = _end_of(model)
    headings = _headings_under(scoring.seen, model)
    return SeenProbe(model.asked, scoring.seen, headings, key=f"seen{end}", end=end)


def redrawn_probe(scoring: Scoring, model: AskedModel, sources: Sequence[Method]) -> RedrawnProbe:
    """Return the probe of the columns that draw the maps of methods again."""
    headings = _headings_under(scoring.redrawn, model)
    return RedrawnProbe(model.asked, tuple(sources), scoring.redrawn, headings)


def _end_of(model: AskedModel) -> str:
    """The end of a column's name under a condition."""
    return f"_{model.key}" if model.key else ""


def _headings_under(metrics: Mapping[str, AnyMetric], model: AskedModel) -> dict[str, Heading]:
    """The headings of columns under a condition."""
    end = _end_of(model)
    found = {}
    for name, metric in metrics.items():
        heading = heading_of(name, metric)
        found[name + end] = heading.under(model.words, model.key, "") if end else heading
    return found


@dataclass(frozen=True)
class Derived:
    """A column that is computed from others of the same image."""

    name: str
    of: tuple[str, ...]
    compute: Callable[[Tensor], Tensor]  # [n,len(of)] -> [n]

    @property
    def heading(self) -> Heading:
        """What tables say of it."""
        return heading_of(self.name)


def derived_columns(models: Sequence[AskedModel], *, held_out: bool) -> list[Derived]:
    """Return the mean of MSI over fills, and its fall under the held-out fill."""
    found = [
        Derived(f"msi_mean{end}", names, lambda values: values.mean(1))
        for end, names in groups_of(models).items()
    ]
    if held_out:
        names = (MSI, f"{MSI}_{HELD_OUT}")
        found.append(Derived("fill_drop", names, lambda values: values[:, 0] - values[:, 1]))
    return found


def derived_metrics(scoring: Scoring) -> list[Derived]:
    """Return the columns that are computed from others, under the first condition."""
    return [
        Derived(name, metric.of, metric.formula)
        for name, metric in scoring.metrics.items()
        if isinstance(metric, DerivedMetric)
    ]


def groups_of(models: Sequence[AskedModel]) -> dict[str, tuple[str, ...]]:
    """Return the columns of MSI with every fill, by "" and "_twin", where there are several."""
    found: dict[str, list[str]] = {}
    for model in models:
        name = f"{MSI}_{model.key}" if model.key else MSI
        found.setdefault(f"_{TWIN}" * model.twin, []).append(name)
    return {end: tuple(names) for end, names in found.items() if len(names) > 1}


def key_of(fill: Fill, place: int) -> str:
    """Return what columns call a fill: its name, that of its file, or its place among the fills.

    The fill `mean` is called mean_fill, because msi_mean is the mean over fills.

    >>> key_of("blur", 1), key_of("mean", 2), key_of("fills/Tall grass.png", 3)
    ('blur', 'mean_fill', 'tall_grass')
    """
    if not isinstance(fill, str):
        return f"fill{place + 1}"
    if fill in FILLS:
        return "mean_fill" if fill == "mean" else fill
    return re.sub(r"\W+", "_", PurePath(fill).stem.lower()).strip("_") or f"fill{place + 1}"


def word_of(fill: Fill) -> str:
    """Return a fill in a word."""
    return fill if isinstance(fill, str) else "a fill of your own"


def check_column_names(probes: Sequence[Probe], derived: Sequence[Derived]) -> None:
    """Raise where two probes would give columns of the same name."""
    seen: set[str] = set()
    for names in [*(probe.headings for probe in probes), {one.name: 0 for one in derived}]:
        if same := sorted(seen & {*names}):
            raise UserError(
                f"two columns would be called {same[0]!r}: give the metric or probe another name"
            )
        seen |= {*names}


def check_twin(classifier: Classifier, twin: Classifier) -> None:
    """Raise unless both have the same classes and see images alike, as far as they say so."""
    check_classifier(twin)
    if None not in (known := (classifier.classes, twin.classes)) and known[0] != known[1]:
        raise UserError(
            f"the twin has other classes than the model ({len(twin.classes or ())} named, the model"
            f" {len(classifier.classes or ())}): give a twin of this model"
        )
    if None not in (views := (classifier.view, twin.view)) and views[0] != views[1]:
        raise UserError(
            f"the twin sees images otherwise than the model ({views[1]}, the model {views[0]}):"
            " give a twin of this model"
        )


def stacked(columns: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return some columns side by side: [n,len(names)]."""
    return torch.stack([columns[name] for name in names], dim=1)
