"""Heatmaps of what a classifier looks at: `explain`, and the registry of methods."""

from sufficit.explainers.cams import target_logits
from sufficit.explainers.explanation import (
    Method,
    Methods,
    OwnMethod,
    explain,
    explain_all,
    learned,
    methods_for,
)
from sufficit.explainers.registry import CAMS, EXPLAINERS, Explainer, finer_cam

__all__ = ["CAMS", "EXPLAINERS", "Explainer", "Method", "Methods", "OwnMethod", "explain"]
__all__ += ["explain_all", "finer_cam", "learned", "methods_for", "target_logits"]
