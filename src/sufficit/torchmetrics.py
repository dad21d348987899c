"""torchmetrics classes with the numbers of `evaluate` and `leak`, over batches and processes."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, distributed
from torchmetrics import Metric as TorchMetric
from torchmetrics.utilities import dim_zero_cat

from sufficit.classifier.classifier import Classifier, check_classifier
from sufficit.data.batch import Batch
from sufficit.errors import UserError
from sufficit.evaluation import (
    batch_of,
    calls_from,
    check_asked,
    check_names,
    in_order,
    schedules_for,
    search_of,
    settled,
)
from sufficit.metrics.columns import (
    ALPHA_GRID,
    COLUMNS,
    METRICS,
    alpha_from,
    alphas_from,
    check_metrics,
    metrics_named,
)
from sufficit.metrics.leakage import TENSORS, Leak, LeakMeter, Pool, checked, checked_pool
from sufficit.metrics.localization import checked_truth
from sufficit.metrics.metric import AnyMetric, CellMetric, MapMetric, Metric, Schedule
from sufficit.metrics.pooled import halves_of
from sufficit.metrics.scores import Scores
from sufficit.perturbation.fills import check_fill_name
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.perturbation.predict import check_batch_size
from sufficit.perturbation.predictions import ROWS, ScoreKind
from sufficit.probes.band import BandProbe
from sufficit.probes.cells import CellProbe
from sufficit.probes.maps import MapProbe
from sufficit.probes.probe import Probe
from sufficit.probes.standard import MSI as MSI_COLUMN
from sufficit.probes.standard import AskedModel, Scoring, band_probe, column_probes

ONE = "heatmaps"  # the only source


class _RowMetric(TorchMetric):
    """A metric whose states have a row per image; a process may have seen no image."""

    is_differentiable = False
    full_state_update = False
    calls: list[Tensor]  # every such metric counts them, a row per image
    rows: tuple[str, ...]  # the states with a row per image
    _before = 0  # images of earlier batches that are not in the state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Score a batch, and return its means: [N,C,H,W], [N,H,W], [N]."""
        self._before = sum(len(part) for part in self.calls)  # the update below starts empty
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._before = 0

    def _numbers(self, images: Tensor) -> range:
        """Return the numbers of a batch's images among all that this process has seen."""
        first = self._before + sum(len(part) for part in self.calls)
        return range(first, first + len(images))

    def _names(self, images: Tensor) -> list[str]:
        """Return names for images without any: their numbers, in several processes after a rank."""
        several = distributed.is_available() and distributed.is_initialized()
        rank = f"{distributed.get_rank()}/" if several else ""
        return [f"{rank}{number}" for number in self._numbers(images)]

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        """Join the rows of all processes; torchmetrics gathers no states of different shapes."""
        group = process_group or self.process_group
        own = {name: [part.cpu() for part in getattr(self, name)] for name in self.rows}
        every: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(every, own, group)
        for name in self.rows:
            parts = [part.to(self.device) for states in every for part in states[name]]
            setattr(self, name, parts)

    def _add_states(self, names: Sequence[str], *settings: object) -> None:
        """Declare the states with a row per image, and one that tells the settings apart."""
        self.rows = tuple(names)
        for name in names:
            self.add_state(name, default=[], dist_reduce_fx="cat")
        # A MetricCollection merges metrics whose states are equal after the first batch. This
        # state differs between metrics with different settings.
        key = torch.tensor(zlib.crc32(repr(settings).encode()))
        self.add_state("setting", key, dist_reduce_fx="max")

    def _add_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Append the rows of a batch to the states."""
        for name in self.rows:
            getattr(self, name).append(rows[name].to(self.device))

    def _joined(self) -> dict[str, Tensor]:
        """Return each state with the rows of all updates joined, on the CPU."""
        if not len(getattr(self, self.rows[0])):
            raise UserError(
                "no images have been scored: call update(images, heatmaps, targets) first"
            )
        return {name: dim_zero_cat(getattr(self, name)).cpu() for name in self.rows}


class Evaluation(_RowMetric):
    """All eleven columns in one pass: `compute` returns their means, `scores` one value per image.

    - classifier: the model that is asked; it is left as it was.
    - alpha_min: pixels at or above it are marked. With "search" each batch is asked the masks of
      all `alphas`, and the columns are those of the best one. `evaluate` asks in two passes: where
      `calls` limits the masks as well, it draws other ones.
    - score: what a masked image scores: "accuracy" or "confidence".
    - fill: what hidden pixels become: a name or a tensor.
    - value_step: of the curves over pixel values.
    - percent_step: of the curves over shares of the pixels, a share too.
    - batch_size: masked images per forward pass; chosen for the device if left out.
    - alphas: what alpha_min="search" tries.
    - columns: names of other columns, as in `evaluate`.
    - metrics: your own columns, {name: Metric}.
    - calls: masks per image, drawn by the seed; "exact" asks all of them.
    - seed: of what is drawn.
    - truth: whether `update` takes the truth, whose columns are added.
    - kwargs: go to torchmetrics' Metric.

    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
    >>> metric = MSI(Classifier(model), alpha_min=0.4)
    >>> metric.update(torch.rand(2, 3, 4, 4), torch.rand(2, 4, 4), torch.tensor([0, 1]))
    >>> sorted(metric.compute())
    ['base_score', 'mask_penalty', 'msi']
    """

    higher_is_better: bool | None = None
    columns: ClassVar[tuple[str, ...]] = COLUMNS

    def __init__(
        self,
        classifier: Classifier,
        *,
        alpha_min: float | Literal["search"] = 0.5,
        score: ScoreKind = "accuracy",
        fill: str | Tensor = "black",
        value_step: float = 0.01,
        percent_step: float = 0.02,
        batch_size: int | None = None,
        alphas: Sequence[float] = ALPHA_GRID,
        columns: Sequence[str] | None = None,
        metrics: Mapping[str, AnyMetric] | None = None,
        calls: int | Literal["exact"] = "exact",
        seed: int = 0,
        truth: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_fill_name(fill)
        check_batch_size(batch_size)
        self.classifier = classifier
        self.asked = MaskedModel(classifier, fill, batch_size)
        self.own = check_metrics(metrics)
        self.most = calls_from(calls)
        self.seed = seed
        # A subclass names its columns; those of the user are added to them.
        named = (*self.columns, *self.own) if columns is None else columns
        wanted = metrics_named(named, self.own, truth=truth, sampled=self.most is not None)
        kinds = Metric | MapMetric | CellMetric
        others = [name for name, one in wanted.items() if not isinstance(one, kinds)]
        others += [name for name, one in wanted.items() if isinstance(one, Metric) and one.fill]
        if others:
            raise UserError(
                f"{others[0]} is no column of the torchmetrics classes: score it with evaluate or"
                " compare"
            )
        self.wanted = tuple(wanted)
        self.is_searching = alpha_min == "search"
        if self.is_searching and MSI_COLUMN not in wanted:
            raise UserError('alpha_min="search" maximises MSI: add "msi" to columns')
        tried = alphas_from(alphas) if self.is_searching else [alpha_min]
        self.schedules = tuple(schedules_for(tried, score, value_step, percent_step))

        scoring = self._scoring(self.schedules[0])
        self.parts = ROWS if self._bands.drawing is None else (*ROWS, "drawn")
        others = [*map(_cell_state, scoring.cells), *map(_map_state, scoring.maps)]
        self._add_states(
            [*self.parts, "half", *others],
            self.wanted,
            self.own,
            self.schedules,
            self.most,
            seed,
            fill,
            id(classifier),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the probe of bands, which is made again: formulas cannot be pickled."""
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_bands"}

    def update(
        self,
        images: Tensor,
        heatmaps: Tensor,
        targets: Tensor | None = None,
        names: Sequence[str] | None = None,
        truth: Tensor | None = None,
    ) -> None:
        """Score a batch: [N,C,H,W], [N,H,W], [N], and [N,H,W] above 0 on the object.

        With `calls`, masks are drawn by the images' names. Without names, it is the number of the
        image among those of this process, and in one of several processes its rank as well.
        """
        check_classifier(self.classifier)
        goals = checked(images, heatmaps, targets)
        if self.classifier.score is not None and goals is not None:
            raise UserError("a score of your own has no classes: leave out targets")
        check_names(names, len(images))
        check_asked(self.asked, images)
        first = self._scoring(self.schedules[0])
        if truth is None and any(metric.needs_truth for metric in first.maps.values()):
            raise UserError("the metric compares with a truth: give update(..., truth=masks)")
        batch = batch_of(
            self.classifier,
            images,
            goals,
            names=names or self._names(images),
            truth=checked_truth(truth, heatmaps),
            batch_size=self.asked.batch_size,
        )
        answers = self._bands.answers(batch, {ONE: heatmaps})
        rows = {name: getattr(answers, name) for name in self.parts}
        # One half of the images chooses the share at which the other half is scored by rank.
        rows["half"] = torch.from_numpy(halves_of(batch.names, self.seed))
        rows |= self._cell_rows(batch, heatmaps)
        rows |= self._map_rows(batch, heatmaps)
        self._add_rows(rows)

    def compute(self) -> dict[str, Tensor]:
        """Return the mean of each column, and alpha_min if it was searched for."""
        scores = self.scores()
        means = {name: torch.tensor(value) for name, value in scores.mean().items()}
        if scores.search is not None:
            means["alpha_min"] = torch.tensor(scores.alpha_min)
        return means

    def scores(self) -> Scores:
        """Return what `evaluate` returns for the images this process has seen so far."""
        rows = self._joined()
        # Bands of every alpha_min were asked, so that the best one needs no second pass.
        answers = self._bands.kept({name: rows[name] for name in self.parts})
        search = search_of(answers, self.schedules) if self.is_searching else None
        alphas = [schedule.alpha_min for schedule in self.schedules]
        place = 0 if search is None else alphas.index(search.best)

        scoring = self._scoring(self.schedules[place])
        probes = self._probes(scoring)
        model = AskedModel(self.asked)
        values = answers.by_piece(band_probe(scoring, model, scoring.columns).values)
        values |= {name: rows[_cell_state(name)] for name in scoring.cells}
        values |= {name: rows[_map_state(name)][:, place] for name in scoring.maps}
        columns = settled(values, rows["half"].numpy())
        headings = {name: heading for probe in probes for name, heading in probe.headings.items()}
        shared = sum(probe.calls_once for probe in probes) + self._bands.counts_whole
        return Scores(
            answers=answers,
            columns=in_order(scoring, columns, headings),
            headings=headings,
            schedule=scoring.schedule,
            calls=answers.calls + shared,
            search=search,
        )

    def _scoring(self, schedule: Schedule) -> Scoring:
        """Return what is scored, at one alpha_min."""
        metrics = {
            name: self.own[name] if name in self.own else METRICS[name] for name in self.wanted
        }
        return Scoring(metrics, schedule, self.most, self.seed)

    def _probes(self, scoring: Scoring) -> list[Probe]:
        """Return the probes of the columns, with which no curves are kept."""
        return column_probes(scoring, [AskedModel(self.asked)], curves=False, keeps=False)

    @cached_property
    def _bands(self) -> BandProbe:
        """The probe of the bands that the columns need at all alpha_min that are tried."""
        scoring = self._scoring(self.schedules[0])
        columns = [replace(column, schedules=self.schedules) for column in scoring.columns]
        probe = band_probe(scoring, AskedModel(self.asked), columns)
        # The whole image is a call of its own only where masks are asked at all.
        return replace(probe, counts_whole=bool(columns))

    def _cell_rows(self, batch: Batch, heatmaps: Tensor) -> dict[str, Tensor]:
        """Return the columns of image masks: each [N]."""
        scoring = self._scoring(self.schedules[0])
        rows: dict[str, Tensor] = {}
        for probe in self._probes(scoring):
            if isinstance(probe, CellProbe):
                values = probe(batch, {ONE: heatmaps})[ONE]
                rows |= {_cell_state(name): values[name] for name in scoring.cells}
        return rows

    def _map_rows(self, batch: Batch, heatmaps: Tensor) -> dict[str, Tensor]:
        """Return the columns of the heatmap alone, at every alpha_min: each [N,A]."""
        metrics = self._scoring(self.schedules[0]).maps
        by_alpha = [
            MapProbe(metrics, schedule)(batch, {ONE: heatmaps})[ONE] for schedule in self.schedules
        ]
        return {
            _map_state(name): torch.stack([rows[name] for rows in by_alpha], 1) for name in metrics
        }


def _cell_state(column: str) -> str:
    """Return the name of the state of a column of image masks."""
    return f"cell_{column}"


def _map_state(column: str) -> str:
    """Return the name of the state of a column of the heatmap alone."""
    return f"map_{column}"


class MSI(Evaluation):
    """BaseScore, MaskPenalty and MSI."""

    higher_is_better = True
    columns = ("base_score", "mask_penalty", "msi")


class InsertionDeletion(Evaluation):
    """Insertion (higher is better) and deletion (lower is), by pixel value and by percentage."""

    columns = ("insertion_pixel", "deletion_pixel", "insertion_percent", "deletion_percent")


class Fidelity(Evaluation):
    """Fid- (lower is better) and Fid+ (higher is), by pixel value and by percentage."""

    columns = ("fid_minus_pixel", "fid_plus_pixel", "fid_minus_percent", "fid_plus_percent")


class Leakage(_RowMetric):
    """The leak: `compute` returns the means of its columns and the ratio of leak to chance.

    A batch of one class has no donors: its images have NaN in `leak` and the chances. The ratio is
    that of the means over all images.

    - classifier: the model that is asked; it is left as it was.
    - alpha_min: masks keep the pixels at or above it.
    - donors: images of other classes per image.
    - seed: of the donors that are drawn.
    - fill: what hidden pixels become: a name or a tensor, the same for all images.
    - pool: where donors, and the masks behind the chance level, come from; None: the batch of each
      update.
    - batch_size: masked images per forward pass; chosen for the device if left out.
    - kwargs: go to torchmetrics' Metric.

    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
    >>> metric = Leakage(Classifier(model), donors=4)
    >>> metric.update(torch.rand(2, 3, 4, 4), torch.rand(2, 4, 4), torch.tensor([0, 1]))
    >>> sorted(metric.compute())[:3]
    ['leak', 'leak_chance', 'leak_grey']
    """

    higher_is_better = False

    def __init__(
        self,
        classifier: Classifier,
        *,
        alpha_min: float = 0.5,
        donors: int = 16,
        seed: int = 0,
        fill: str | Tensor = "black",
        pool: Pool | None = None,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_fill_name(fill)
        self.classifier = classifier
        self.meter = LeakMeter(
            asked=MaskedModel(classifier, fill, batch_size),
            alpha_min=alpha_from(alpha_min),
            donors=donors,
            seed=seed,
            pool=checked_pool(pool),
        )
        columns = ("lifts", "calls") if self.meter.lifted else TENSORS
        self._add_states(
            columns, self.meter.alpha_min, donors, seed, fill, id(pool), id(classifier)
        )

    def update(self, images: Tensor, heatmaps: Tensor, targets: Tensor | None = None) -> None:
        """Measure a batch: [N,C,H,W], [N,H,W], [N]."""
        numbers = self._numbers(images)
        leaked = self.meter.leak(images, heatmaps, targets, numbers=numbers, strict=False)
        self._add_rows({name: getattr(leaked, name) for name in self.rows})

    def compute(self) -> dict[str, Tensor]:
        """Return the mean of each column, and the ratio of leak to chance; or of the lifts."""
        leaked = self.leaked()
        means = {name: torch.tensor(value) for name, value in leaked.mean().items()}
        return means if self.meter.lifted else means | {"leak_ratio": torch.tensor(leaked.ratio)}

    def leaked(self) -> Leak:
        """Return what `leak` returns for the images this process has seen so far."""
        rows = self._joined()
        if self.meter.lifted:
            return Leak.of_lifts(rows["lifts"], rows["calls"], self.meter.alpha_min)
        return Leak(**rows, alpha_min=self.meter.alpha_min)
