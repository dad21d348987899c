"""A folder's scores: how they were asked for, what came out, and the files they are written to."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from sufficit import plots as figures
from sufficit.classifier.classifier import Classifier
from sufficit.classifier.fingerprint import digest
from sufficit.data.loader import Skipped, folder_targets
from sufficit.files import make_folder
from sufficit.keeping import FOLDER, Parts
from sufficit.metrics.leakage import leak_warning
from sufficit.metrics.plan import ALPHA_GRID
from sufficit.metrics.registry import COLUMNS
from sufficit.metrics.scores import Scores
from sufficit.perturbation.predictions import ScoreKind
from sufficit.results import Estimate, as_json, provenance, save_json, save_scores
from sufficit.statistics import RESAMPLES

FILES = ("scores.parquet", "curves.parquet", "summary.json", "curves.png", "run.json")


@dataclass(frozen=True)
class Options:
    """How to score: the options of `evaluate`, and what to do with targets and bad files."""

    alpha_min: float | Literal["search"] = 0.5
    score: ScoreKind = "accuracy"
    fill: str | Tensor = "black"
    value_step: float = 0.01
    percent_step: float = 0.02
    batch_size: int | None = None
    columns: tuple[str, ...] = COLUMNS
    alphas: tuple[float, ...] = ALPHA_GRID
    held_out_fill: str | Tensor | None = None
    leak_donors: int = 0
    targets: Literal["auto", "label", "prediction"] = "auto"
    normalize: bool = False
    on_error: Literal["skip", "stop"] = "skip"
    seed: int = 0
    progress: bool | None = None

    def scoring(self) -> dict[str, Any]:
        """What of this makes a plan."""
        names = ("alpha_min", "score", "value_step", "percent_step", "columns", "alphas")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class FolderScores:
    """What came out of a folder."""

    scores: Scores
    names: tuple[str, ...]
    summary: dict[str, Estimate]
    skipped: tuple[Skipped, ...]
    target_kind: str


def as_plain(options: Options) -> dict[str, Any]:
    """The options as run.json holds them."""
    settings = asdict(replace(options, progress=None))
    for name in ("fill", "held_out_fill"):
        if isinstance(fill := getattr(options, name), Tensor):
            settings[name] = f"own tensor {list(fill.shape)}, {digest(fill)}"
    return settings


def save_run(
    folder: Path,
    result: FolderScores,
    classifier: Classifier,
    config: dict[str, Any],
    options: Options,
) -> None:
    """Write all FILES, run.json last; drop parts."""
    scores, labelled = result.scores, result.target_kind == "label"
    make_folder(folder)
    save_scores(folder, scores, result.names)
    save_json(folder / "summary.json", as_json(result.summary))
    figures.save(figures.curves_figure(scores), folder / "curves.png")
    run = provenance(config | {"options": as_plain(options)}, classifier.device, classifier.dtype)
    run |= run_facts(result) | {
        "skipped": [asdict(skipped) for skipped in result.skipped],
        "class_folders": folder_targets(result.names, scores.targets) if labelled else {},
        "seed": options.seed,
        "resamples": RESAMPLES,
    }
    if scores.search:
        run["search"] = {
            "alphas": list(scores.search.alphas),
            "mean_msi": scores.search.means.tolist(),
        }
    save_json(folder / "run.json", run)
    Parts(folder / FOLDER).remove()


def run_facts(result: FolderScores) -> dict[str, Any]:
    """What a reader of the means must know beside them."""
    scores = result.scores
    facts = {
        "n": len(scores),
        "n_skipped": len(result.skipped),
        "targets": result.target_kind,
        "clean_accuracy": float(scores.clean.nanmean()),
        "alpha_min": scores.alpha_min,
        "model_calls": int(scores.calls.sum()),
    }
    if scores.leaked is not None:
        facts |= {"leak_ratio": scores.leak_ratio, "leak_warning": leak_warning(result.summary)}
    return facts
