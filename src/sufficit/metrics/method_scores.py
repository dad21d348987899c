"""One method's scores as a run writes them and as reports and figures read them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan

from torch import Tensor

from sufficit.errors import unknown
from sufficit.metrics.curves import MeanCurve
from sufficit.metrics.registry import Schedule
from sufficit.metrics.scores import Scores
from sufficit.perturbation.predictions import Predictions


@dataclass(frozen=True)
class MethodScores:
    """One method's scores as a run wrote them: the predictions are of the images shown only."""

    columns: Mapping[str, Tensor]  # each [N] float64
    targets: Tensor  # [N]
    clean: Tensor  # [N] 1 where the model gives the whole image its target, NaN where it said NaN
    calls: Tensor  # [N] model calls
    alpha_min: float
    schedule: Schedule  # at this alpha_min
    curves: Mapping[str, MeanCurve]  # by name, as far as they are known
    shown: Predictions  # of the images shown, in their order
    alphas: Mapping[float, float] | None = None  # alpha_min -> mean MSI, where it was searched for

    @staticmethod
    def of(scores: "Scores | MethodScores", shown_rows: Sequence[int] = ()) -> "MethodScores":
        """The same scores, with the predictions of these rows only."""
        if isinstance(scores, MethodScores):
            return scores
        search = scores.search
        return MethodScores(
            columns=scores.columns,
            targets=scores.targets,
            clean=scores.clean,
            calls=scores.calls,
            alpha_min=scores.alpha_min,
            schedule=replace(scores.plan.schedules[0], alpha_min=scores.alpha_min),
            curves=scores.mean_curves(),
            shown=scores.answers.rows(list(shown_rows)),
            alphas=dict(zip(search.alphas, search.means.tolist(), strict=True)) if search else None,
        )

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, column: str) -> Tensor:
        if column not in self.columns:
            raise unknown("column", column, self.columns)
        return self.columns[column]

    @property
    def own_alpha(self) -> float | None:
        """The alpha_min with the highest mean MSI of this method, where it was searched for."""
        known = {a: msi for a, msi in (self.alphas or {}).items() if not isnan(msi)}
        return max(known, key=lambda alpha: known[alpha]) if known else None
