"""How the sources of a run rank by MSI under every condition, added up unit by unit."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sufficit.files import writing
from sufficit.metrics.conditions import groups_of
from sufficit.metrics.scores import Scores, worst_of
from sufficit.outside import as_csv
from sufficit.perturbation.bands import EVERYTHING
from sufficit.runs.job import Job
from sufficit.runs.looks import chance_of
from sufficit.similarity import RankedCondition
from sufficit.statistics import Estimate, Standing, standing_of
from sufficit.sums import Sums, with_pairs


class Rankings:
    """The sums behind each condition's tests, its calls, and hits on whole images."""

    def __init__(self, job: Job) -> None:
        self.job = job
        with_msi = [one for one in job.conditions if "msi" in job.plans[one.key].columns]
        self.conditions = with_msi if "msi" in job.plan.columns else []
        self._msi: dict[str, Sums] = {}
        self._calls = dict.fromkeys(job.plans, 0)
        self._clean = {twin: np.zeros(2) for twin in (False, True)}  # hits, images

    def add(self, numbers: npt.ArrayLike, scores: Mapping[str, Scores]) -> None:
        """Add the scores of a unit."""
        tested, seed = (*self.job.ranked, *self.job.controls), self.job.config.seed
        for condition in self.conditions:
            key, column = condition.key, condition.column("msi")
            pairs = with_pairs({name: scores[name].columns[column].numpy() for name in tested})
            self._msi.setdefault(key, Sums([*pairs], seed=seed)).add(numbers, pairs)
            found = [one.others[key] if key else one.answers for one in scores.values()]
            self._calls[key] += sum(int(one.calls.sum()) for one in found)
            if key in ("", "twin"):
                hits = found[0].of([EVERYTHING], "accuracy").numpy()
                self._clean[condition.twin] += np.nansum(hits), np.isfinite(hits).sum()

    def ranked(self) -> list[RankedCondition]:
        """Every condition in which MSI was scored, the first one first."""
        found, job = [], self.job
        for condition in self.conditions if self._msi else ():
            key, (hits, n) = condition.key, self._clean[condition.twin].tolist()
            given = (job.ranked, condition.column("msi"), chance_of(job), job.controls)
            standing = standing_of(self._msi[key], *given)
            facts = (condition.fill_name, condition.twin, job.plans[key].width, self._calls[key])
            found.append(RankedCondition(key, *facts, hits / n if n else float("nan"), standing))
        return found


def add_worst(job: Job, summaries: Mapping[str, dict[str, Estimate]]) -> dict[str, dict[str, str]]:
    """Add MSI with the worst fill to every source's summary; return the columns it is from."""
    found: dict[str, dict[str, str]] = {}
    for end, columns in groups_of(job.conditions).items() if "msi" in job.plan.columns else ():
        for name, own in summaries.items():
            lowest = worst_of(columns, {column: own[column].mean for column in columns})
            own[f"msi_worst{end}"] = own[lowest]
            found.setdefault(f"msi_worst{end}", {})[name] = lowest
    return found


def write_pairs(path: Path, standings: Sequence[Standing]) -> None:
    """Write one row per condition and pair, with how its interval and p-value were made."""
    import pandas

    frames = [one.frame().assign(**asdict(one.chance)) for one in standings]
    for frame, one in zip(frames, standings, strict=True):
        frame.insert(0, "column", one.column)
    with writing(path) as part:
        part.write_text(as_csv(pandas.concat(frames)), encoding="utf-8")
