"""Scores of heatmaps: METRICS defines the columns, `evaluate` computes them all in one pass."""

from typing import TYPE_CHECKING

from sufficit.metrics.columns import COLUMNS, METRICS
from sufficit.metrics.leakage import Leak, Pool, leak
from sufficit.metrics.metric import Metric, Schedule
from sufficit.metrics.scores import AlphaSearch, Scores, evaluate

if TYPE_CHECKING:
    from sufficit.metrics.torchmetrics import MSI, Evaluation, Fidelity, InsertionDeletion, Leakage

__all__ = [
    "COLUMNS",
    "METRICS",
    "MSI",
    "AlphaSearch",
    "Evaluation",
    "Fidelity",
    "InsertionDeletion",
    "Leak",
    "Leakage",
    "Metric",
    "Pool",
    "Schedule",
    "Scores",
    "evaluate",
    "leak",
]


def __getattr__(name: str) -> object:
    """Import the torchmetrics classes at first use, because torchmetrics is slow to import."""
    if name not in __all__:
        raise AttributeError(f"module 'sufficit.metrics' has no attribute {name!r}")
    from sufficit.metrics import torchmetrics

    return getattr(torchmetrics, name)
