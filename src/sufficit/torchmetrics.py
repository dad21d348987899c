"""torchmetrics classes with the numbers of `evaluate` and `leak`, over batches and processes."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, distributed
from torchmetrics import Metric as TorchMetric
from torchmetrics.utilities import dim_zero_cat

from sufficit.classifier.classifier import Classifier, check_classifier
from sufficit.errors import UserError
from sufficit.metrics.columns import COLUMNS, alpha_from
from sufficit.metrics.leakage import (
    TENSORS,
    Leak,
    LeakProbe,
    Pool,
    checked,
    checked_pool,
)
from sufficit.metrics.localization import LOCALIZATION, checked_truth
from sufficit.metrics.metric import Metric
from sufficit.metrics.plan import ALPHA_GRID, ask, check_names, make_plan
from sufficit.metrics.scores import Scores, read
from sufficit.perturbation.fills import check_fill_name
from sufficit.perturbation.predict import check_batch_size
from sufficit.perturbation.predictions import ScoreKind


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
        """The numbers of a batch's images among all that this process has seen."""
        first = self._before + sum(len(part) for part in self.calls)
        return range(first, first + len(images))

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        """Join the rows of all processes; torchmetrics gathers no states of different shapes."""
        group = process_group or self.process_group
        own = {name: [part.cpu() for part in getattr(self, name)] for name in self.rows}
        every: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(every, own, group)
        for name in self.rows:
            found = [part.to(self.device) for one in every for part in one[name]]
            setattr(self, name, found)

    def _add_states(self, names: Sequence[str], *settings: object) -> None:
        self.rows = tuple(names)
        for name in names:
            self.add_state(name, default=[], dist_reduce_fx="cat")
        # A MetricCollection merges metrics whose states are equal after the first batch. This
        # state differs between metrics with different settings.
        key = torch.tensor(zlib.crc32(repr(settings).encode()))
        self.add_state("setting", key, dist_reduce_fx="max")

    def _add_rows(self, found: object) -> None:
        for name in self.rows:
            getattr(self, name).append(getattr(found, name).to(self.device))

    def _joined(self) -> dict[str, Tensor]:
        """Return each state with the rows of all updates joined, on the CPU."""
        if not len(getattr(self, self.rows[0])):
            raise UserError(
                "no images have been scored: call update(images, heatmaps, targets) first"
            )
        return {name: dim_zero_cat(getattr(self, name)).cpu() for name in self.rows}


class Evaluation(_RowMetric):
    """All eleven columns in one pass: `compute` returns their means, `scores` one value per image.

    `columns` names others, as in `evaluate`. `metrics` adds your own columns: {name: Metric}.
    `calls` limits the masks asked per image, drawn by the seed. With `truth=True`, `update` takes
    the truth and its columns are added.

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
        metrics: Mapping[str, Metric] | None = None,
        calls: int | Literal["exact"] = "exact",
        seed: int = 0,
        truth: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_fill_name(fill)
        self.classifier = classifier
        own = dict(metrics or {})
        wanted = (*self.columns, *own) if columns is None else columns
        curves = (alpha_min, score, value_step, percent_step)
        self.plan = make_plan(*curves, wanted, tuple(alphas), own, calls, seed, truth=truth)
        check_batch_size(batch_size)
        self.fill, self.batch_size = fill, batch_size
        self._add_states(self.plan.parts, self.plan, fill, id(classifier))

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
        known = checked(images, heatmaps, targets)
        check_names(names, len(images))
        ready = distributed.is_available() and distributed.is_initialized()
        rank = f"{distributed.get_rank()}/" if ready else ""
        names = names or [f"{rank}{number}" for number in self._numbers(images)]
        given = (self.classifier, images, heatmaps, known, self.plan, self.fill)
        if truth is None and {*self.plan.columns} & {*LOCALIZATION}:
            raise UserError("the metric compares with a truth: give update(..., truth=masks)")
        where = checked_truth(truth, heatmaps)
        how: Any = {"batch_size": self.batch_size, "names": names, "truth": where}
        found = ask(*given, **how)
        self._add_rows(found)

    def compute(self) -> dict[str, Tensor]:
        """Return the mean of each column, and alpha_min if it was searched for."""
        scores = self.scores()
        means = {name: torch.tensor(value) for name, value in scores.mean().items()}
        if scores.search is not None:
            means["alpha_min"] = torch.tensor(scores.alpha_min)
        return means

    def scores(self) -> Scores:
        """Return what `evaluate` returns for the images this process has seen so far."""
        return read({"": self.plan.predictions(self._joined())}, self.plan)


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

    Donors, and the masks behind the chance level, come from the batch of each update, or from a
    given pool. A batch of one class has no donors: its images have NaN in `leak` and the chances.
    The ratio is that of the means over all images.

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
        how: Any = {"fill": fill, "batch_size": batch_size, "pool": checked_pool(pool)}
        self.probe = LeakProbe(classifier, alpha_from(alpha_min), donors, seed, **how)
        settings = (self.probe.alpha_min, donors, seed, fill, id(pool), id(classifier))
        self._add_states(TENSORS, *settings)

    def update(self, images: Tensor, heatmaps: Tensor, targets: Tensor | None = None) -> None:
        """Measure a batch: [N,C,H,W], [N,H,W], [N]."""
        how: Any = {"numbers": self._numbers(images), "strict": False}
        self._add_rows(self.probe.leak(images, heatmaps, targets, **how))

    def compute(self) -> dict[str, Tensor]:
        """Return the mean of each column, and the ratio of leak to chance."""
        found = self.leaked()
        means = {name: torch.tensor(value) for name, value in found.mean().items()}
        return means | {"leak_ratio": torch.tensor(found.ratio)}

    def leaked(self) -> Leak:
        """Return what `leak` returns for the images this process has seen so far."""
        return Leak(**self._joined(), alpha_min=self.probe.alpha_min)
