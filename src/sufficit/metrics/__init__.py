"""Scores of heatmaps: METRICS says how each column is made, `evaluate` makes them all at once."""

from sufficit.metrics.classes import MSI, Evaluation, Fidelity, InsertionDeletion, Leakage
from sufficit.metrics.columns import COLUMNS, METRICS, Metric, Schedule
from sufficit.metrics.evaluate import AlphaSearch, Scores, evaluate
from sufficit.metrics.leak import Leak, leak
from sufficit.metrics.probe import Pool

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
