"""Heatmaps of what a classifier looks at: `explain_all`, and the registry of methods."""

from sufficit.explainers.cams import target_logits
from sufficit.explainers.explainer import Explainer, Option
from sufficit.explainers.explanation import (
    Method,
    Methods,
    OwnMethod,
    explain_all,
    learned,
    methods_for,
    recommended,
)
from sufficit.explainers.registry import CAMS, EXPLAINERS, explainer_named

__all__ = ["CAMS", "EXPLAINERS", "Explainer", "Method", "Methods", "Option", "OwnMethod"]
__all__ += ["explain_all", "explainer_named", "learned", "methods_for", "recommended"]
__all__ += ["target_logits"]
