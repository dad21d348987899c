"""Scores of heatmaps: METRICS says how each column is made, `evaluate` makes them all at once."""

from sufficit.metrics.leakage import Leak, leak
from sufficit.metrics.probe import Pool
from sufficit.metrics.registry import COLUMNS, METRICS, Metric, Schedule
from sufficit.metrics.scores import AlphaSearch, Scores, evaluate
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
