"""run.json as a dataclass: facts of a run that are not in its tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf, isnan
from typing import TYPE_CHECKING, Any

from sufficit.metrics.column import Heading
from sufficit.provenance import plain, provenance, typed
from sufficit.similarity import RankedCondition
from sufficit.sources import SourceFacts
from sufficit.statistics import Chance

if TYPE_CHECKING:
    from sufficit.runs.job import Job


@dataclass(frozen=True)
class SearchRecord:
    """MSI at every alpha_min tried, on a sample of the images."""

    alphas: list[float]
    mean_msi: dict[str, list[float]]  # by source
    own_alpha_min: dict[str, float]
    images: int


@dataclass(frozen=True)
class TruthRecord:
    """The number of images whose truth is missing or unusable."""

    path: str | None
    n_without: int
    n_bad: int
    bad: dict[str, str]  # the first images whose truth is unusable, and why


@dataclass(frozen=True)
class Record:
    """The results of a run, besides its tables."""

    n: int
    methods: list[str]  # best first, then controls and references
    columns: dict[str, Heading]  # of the tables, in order
    sources: dict[str, SourceFacts]
    controls: list[str]
    alpha_min: float
    targets: str = ""  # label or prediction
    clean_accuracy: float = float("nan")
    references: list[str] = field(default_factory=list)
    n_skipped: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)  # the first ones: name, reason
    model_calls: int = 0
    empty_heatmaps: dict[str, int] = field(default_factory=dict)
    n_stretched: int = 0
    stretched_heatmaps: list[str] = field(default_factory=list)
    truth: TruthRecord | None = None
    rank_shares: dict[str, list[float]] = field(default_factory=dict)
    leak_ratio: dict[str, float] = field(default_factory=dict)
    leak_warnings: dict[str, str] = field(default_factory=dict)
    output: str = ""
    output_remark: str = ""
    preprocessing: dict[str, Any] | None = None
    class_folders: dict[str, int] = field(default_factory=dict)
    class_names: list[str] | None = None
    sampled: str | None = None
    few_images: str | None = None
    seed: int = 0
    chance: Chance | None = None
    within: dict[str, Any] | None = None
    search: SearchRecord | None = None
    alpha_curve: dict[str, Any] | None = None
    twin: dict[str, Any] | None = None
    shown: dict[str, str] = field(default_factory=dict)  # image -> why it is shown
    worst_fill: dict[str, dict[str, str]] = field(default_factory=dict)
    conditions: list[RankedCondition] = field(default_factory=list)
    rank_correlations: list[dict[str, Any]] = field(default_factory=list)
    run: str = ""  # the digest of settings and images
    made: dict[str, Any] = field(default_factory=dict)  # config, command, time, commit, versions

    def as_json(self, job: "Job") -> dict[str, Any]:
        """Return the content of run.json: the fields, then config, command, time and versions."""
        # Config and provenance come first in the file: that is what people look for.
        made = provenance(asdict(job.config), job.classifier.device, job.classifier.dtype)
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "made"}
        found: dict[str, Any] = plain(made | own)
        return found

    @staticmethod
    def read(known: Mapping[str, Any]) -> "Record":
        """Return the record of a run.json; what is no field of a record is kept in `made`."""
        own = {one.name for one in fields(Record)} - {"made"}
        found: Record = typed(Record, {name: value for name, value in known.items() if name in own})
        columns = {
            name: replace(heading, limits=_limits(heading.limits))
            for name, heading in found.columns.items()
        }
        rest = {name: value for name, value in known.items() if name not in own}
        return replace(found, columns=columns, made=rest)


def _limits(values: Sequence[float | None]) -> tuple[float, float]:
    """Return limits from JSON, which has null or NaN where there is no limit."""
    low, high = values
    return (
        -inf if low is None or isnan(low) else low,
        inf if high is None or isnan(high) else high,
    )
