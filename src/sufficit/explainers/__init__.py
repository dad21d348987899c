"""Heatmaps of what a classifier looked at: `explain`, and the table of methods."""

from sufficit.explainers.entry import Explainer, target_logits
from sufficit.explainers.explanation import (
    Method,
    Methods,
    OwnMethod,
    explain,
    explain_all,
    learned,
    methods_for,
)
from sufficit.explainers.finer import finer_cam
from sufficit.explainers.registry import CAMS, EXPLAINERS

__all__ = [
    "CAMS",
    "EXPLAINERS",
    "Explainer",
    "Method",
    "Methods",
    "OwnMethod",
    "explain",
    "explain_all",
    "finer_cam",
    "learned",
    "methods_for",
    "target_logits",
]
