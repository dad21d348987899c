"""Scores of heatmaps: METRICS says how each column is made, `evaluate` makes them all at once."""

from sufficit.metrics.classes import MSI, Evaluation, Fidelity, InsertionDeletion
from sufficit.metrics.columns import COLUMNS, METRICS, Metric, Schedule
from sufficit.metrics.evaluate import AlphaSearch, Scores, evaluate

__all__ = [
    "COLUMNS",
    "METRICS",
    "MSI",
    "AlphaSearch",
    "Evaluation",
    "Fidelity",
    "InsertionDeletion",
    "Metric",
    "Schedule",
    "Scores",
    "evaluate",
]
