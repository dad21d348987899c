"""Scores of heatmaps: METRICS defines the columns, `evaluate` computes them all in one pass."""

from importlib import import_module
from typing import TYPE_CHECKING

from sufficit.metrics.columns import COLUMNS, METRICS
from sufficit.metrics.leakage import Leak, Pool, leak
from sufficit.metrics.metric import CellMetric, MapMetric, Metric, Schedule, SeenMetric
from sufficit.metrics.scores import AlphaSearch, Scores

if TYPE_CHECKING:
    from sufficit.evaluation import evaluate
    from sufficit.torchmetrics import MSI, Evaluation, Fidelity, InsertionDeletion, Leakage

__all__ = [
    "COLUMNS",
    "METRICS",
    "MSI",
    "AlphaSearch",
    "CellMetric",
    "Evaluation",
    "Fidelity",
    "InsertionDeletion",
    "Leak",
    "Leakage",
    "MapMetric",
    "Metric",
    "Pool",
    "Schedule",
    "Scores",
    "SeenMetric",
    "evaluate",
    "leak",
]


def __getattr__(name: str) -> object:
    """Import at first use what stands on the metrics, and torchmetrics, which is slow to import."""
    if name not in __all__:
        raise AttributeError(f"module 'sufficit.metrics' has no attribute {name!r}")
    home = "sufficit.evaluation" if name == "evaluate" else "sufficit.torchmetrics"
    return getattr(import_module(home), name)
