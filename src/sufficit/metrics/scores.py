"""What `evaluate` returns: one value per image and column, with means, intervals and curves.

The formulas are in `columns`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sufficit.errors import UserError, unknown
from sufficit.metrics.column import Heading
from sufficit.metrics.leakage import Leak
from sufficit.metrics.metric import Curve, MeanCurve, Schedule, curves_of
from sufficit.outside import html_table
from sufficit.perturbation.bands import EVERYTHING
from sufficit.perturbation.predictions import Predictions
from sufficit.statistics import Chance, Estimate, estimates_of, ratio_of
from sufficit.sums import Sums, both, sums_of

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AlphaSearch:
    """MSI at every value of alpha_min that was tried."""

    alphas: tuple[float, ...]
    msi: Tensor  # [N,A]

    @property
    def means(self) -> Tensor:
        """Mean MSI over the images at each value, NaN ignored: [A]."""
        return self.msi.nanmean(0)

    @property
    def best(self) -> float:
        """The value with the highest mean MSI, the smaller of two that tie."""
        return self.alphas[int(self.means.nan_to_num(-torch.inf).argmax())]


@dataclass(frozen=True)
class Scores:
    """One value per image and column: `scores.msi`, `scores["msi"]`; all on the CPU."""

    answers: Predictions  # of the model with the first fill
    columns: dict[str, Tensor]  # each [N]
    headings: Mapping[str, Heading]
    schedule: Schedule  # at the alpha_min of the columns
    calls: Tensor  # [N] forward passes spent on each image
    search: AlphaSearch | None = None
    leaked: Leak | None = None

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("__") or name in self.__dataclass_fields__:
            raise AttributeError(name)
        try:
            return self[name]
        except UserError as error:
            raise AttributeError(str(error)) from error

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.columns:
            raise unknown("column", name, self.columns)
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.answers.targets)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:.4f}" for name, value in self.mean().items())
        return f"Scores(n={len(self)}, alpha_min={self.alpha_min:g}, {values})"

    def _repr_html_(self) -> str:
        rows = []
        for name, found in self.summary().items():
            better = {True: "higher", False: "lower", None: "-"}[found.higher_is_better]
            interval = "-" if isnan(found.low) else f"{found.low:.3f} .. {found.high:.3f}"
            rows.append((name, better, f"{found.mean:.3f}", interval))
        caption = f"{len(self)} image{'s'[: len(self) > 1]}, alpha_min {self.alpha_min:g}"
        return html_table(caption, ("column", "better", "mean", "95 % interval"), rows)

    def plot(self, title: str = "") -> "Figure":
        """Draw the mean curves behind the columns."""
        from sufficit.plots import curves_figure

        return curves_figure(self, title)

    @property
    def targets(self) -> Tensor:
        """The class each image was scored for: [N]."""
        return self.answers.targets

    @property
    def alpha_min(self) -> float:
        """The alpha_min of the columns."""
        return self.schedule.alpha_min

    @property
    def sampled(self) -> bool:
        """Whether each image was asked some of the masks only: its values are estimates."""
        return self.answers.drawn is not None

    @property
    def leak_ratio(self) -> float:
        """Mean leak over mean chance, if `leak_donors` was given."""
        if self.leaked is None:
            raise AttributeError("leak_ratio")
        return self.leaked.ratio

    @property
    def clean(self) -> Tensor:
        """Whether the model predicts the target for the whole image: [N]."""
        return self.answers.of([EVERYTHING], "accuracy")[:, 0]

    def mean(self) -> dict[str, float]:
        """Return the mean of each column; NaN is ignored (`nan_counts` counts it)."""
        return {name: values.nanmean().item() for name, values in self.columns.items()}

    def summary(self, *, seed: int = 0) -> dict[str, Estimate]:
        """Return mean and 95 % interval of every column, and of the leak ratio if it is known."""
        values = {name: v.numpy().astype(np.float64) for name, v in self.columns.items()}
        leaked = None
        if "leak" in values:
            leaked = sums_of(both(values["leak"], values["leak_chance"]), seed=seed)
        return summary_of(sums_of(values, seed=seed), leaked, self.headings)

    def nan_counts(self) -> dict[str, int]:
        """Return how many images have NaN in each column, because the model returned NaN."""
        return {name: int(values.isnan().sum()) for name, values in self.columns.items()}

    def curves(self) -> dict[str, Curve]:
        """Return the curves behind the columns, by name; NaN where an image was not asked."""
        return curves_of(self.answers, self.schedule)

    def mean_curves(self) -> dict[str, MeanCurve]:
        """Return each curve of the chosen score, averaged over the images, NaN ignored.

        Each point is the mean over the images that were asked there, NaN if none was.
        """
        schedule, sums = self.schedule, dict[str, tuple[tuple[float, ...], Tensor, Tensor]]()
        for some in self.answers.pieces():  # the curves of all images at once need much memory
            for name, curve in curves_of(some, schedule).items():
                values: Tensor = getattr(curve, schedule.score)
                _, total, count = sums.get(name, ((), torch.tensor(0.0), torch.tensor(0)))
                total, count = total + values.nansum(0), count + (~values.isnan()).sum(0)
                sums[name] = (curve.grid, total, count)
        return {name: MeanCurve(grid, total / count) for name, (grid, total, count) in sums.items()}

    def frame(self) -> "pandas.DataFrame":
        """Return one row per image: target, whether it is predicted, calls, all columns."""
        import pandas

        facts = {"target": self.targets, "clean_accuracy": self.clean, "calls": self.calls}
        return pandas.DataFrame({name: v.numpy() for name, v in {**facts, **self.columns}.items()})


def summary_of(
    columns: Sums,
    leaked: Sums | None,
    headings: Mapping[str, Heading],
    chance: Chance | None = None,
) -> dict[str, Estimate]:
    """Return mean and interval of every column, from sums; and the leak ratio if it is known."""
    directions = {name: headings[name].higher_is_better for name in columns.columns}
    limits = {name: headings[name].limits for name in columns.columns}
    summary = estimates_of(columns, directions, chance, limits.__getitem__)
    return summary if leaked is None else summary | {"leak_ratio": ratio_of(leaked, chance)}


def worst_of(names: Sequence[str], means: Mapping[str, float]) -> str:
    """Return the column with the lowest mean, NaN ignored.

    >>> worst_of(["msi", "msi_blur"], {"msi": 0.2, "msi_blur": 0.1})
    'msi_blur'
    """
    return min(names, key=lambda name: (isnan(means[name]), means[name]))


@dataclass(frozen=True)
class MethodScores:
    """One method's scores as a run wrote them: single images are those shown only."""

    n: int  # images scored
    columns: Mapping[str, Tensor]  # of the images shown, in their order: each [S] float64
    targets: Tensor  # [S]
    clean: float  # share of whole images to which the model gives their target, NaN ignored
    alpha_min: float
    schedule: Schedule  # at this alpha_min
    curves: Mapping[str, MeanCurve]  # by name, as far as they are known
    shown: Predictions  # of the images shown, in their order
    alphas: Mapping[float, float] | None = None  # alpha_min -> mean MSI, where it was searched for

    @staticmethod
    def of(scores: Scores, shown_rows: Sequence[int] = ()) -> "MethodScores":
        """The same scores, with the values and predictions of these rows only."""
        search, rows = scores.search, list(shown_rows)
        return MethodScores(
            n=len(scores),
            columns={name: values[rows] for name, values in scores.columns.items()},
            targets=scores.targets[rows],
            clean=scores.clean.nanmean().item(),
            alpha_min=scores.alpha_min,
            schedule=scores.schedule,
            curves=scores.mean_curves(),
            shown=scores.answers.rows(rows),
            alphas=dict(zip(search.alphas, search.means.tolist(), strict=True)) if search else None,
        )

    def __getitem__(self, column: str) -> Tensor:
        if column not in self.columns:
            raise unknown("column", column, self.columns)
        return self.columns[column]
