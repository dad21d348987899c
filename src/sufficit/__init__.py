"""Score and draw visual explanations of image classifiers.

Names are imported when first used, so that the command line answers before torch is loaded.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sufficit.classifier.checkpoint import Recipe, View
    from sufficit.classifier.classifier import Classifier
    from sufficit.errors import UserError
    from sufficit.explainers import explain, explain_all
    from sufficit.explainers.lax import Lax
    from sufficit.metrics.compare_scores import compare_scores
    from sufficit.metrics.leakage import Leak, Pool, leak
    from sufficit.metrics.scores import Scores, evaluate
    from sufficit.perturbation.heatmaps import normalize, resize
    from sufficit.sanity import sanity_check
    from sufficit.similarity import agreement
    from sufficit.statistics import Standing
    from sufficit.training import LaxRecipe, cache_features, repeatability, train_lax

_HOMES = {
    "Classifier": "sufficit.classifier.classifier",
    "Lax": "sufficit.explainers.lax",
    "LaxRecipe": "sufficit.training",
    "Leak": "sufficit.metrics.leakage",
    "Pool": "sufficit.metrics.leakage",
    "Recipe": "sufficit.classifier.checkpoint",
    "Scores": "sufficit.metrics.scores",
    "Standing": "sufficit.statistics",
    "UserError": "sufficit.errors",
    "View": "sufficit.classifier.checkpoint",
    "agreement": "sufficit.similarity",
    "cache_features": "sufficit.training",
    "compare_scores": "sufficit.metrics.compare_scores",
    "evaluate": "sufficit.metrics.scores",
    "explain": "sufficit.explainers",
    "explain_all": "sufficit.explainers",
    "leak": "sufficit.metrics.leakage",
    "normalize": "sufficit.perturbation.heatmaps",
    "repeatability": "sufficit.training",
    "resize": "sufficit.perturbation.heatmaps",
    "sanity_check": "sufficit.sanity",
    "train_lax": "sufficit.training",
}

__all__ = [
    "Classifier",
    "Lax",
    "LaxRecipe",
    "Leak",
    "Pool",
    "Recipe",
    "Scores",
    "Standing",
    "UserError",
    "View",
    "agreement",
    "cache_features",
    "compare_scores",
    "evaluate",
    "explain",
    "explain_all",
    "leak",
    "normalize",
    "repeatability",
    "resize",
    "sanity_check",
    "train_lax",
]

try:
    __version__ = version("sufficit")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'sufficit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
