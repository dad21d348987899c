"""Score and draw visual explanations of image classifiers.

Names are imported when first used, so that the command line answers before torch is loaded.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sufficit.classifier.checkpoint import Recipe as Recipe
    from sufficit.classifier.checkpoint import View as View
    from sufficit.classifier.classifier import Classifier as Classifier
    from sufficit.comparison import compare as compare
    from sufficit.errors import UserError as UserError
    from sufficit.evaluation import evaluate as evaluate
    from sufficit.explainers import explain_all as explain_all
    from sufficit.explainers.lax import Lax as Lax
    from sufficit.metrics.compare_scores import compare_scores as compare_scores
    from sufficit.metrics.leakage import Leak as Leak
    from sufficit.metrics.leakage import Pool as Pool
    from sufficit.metrics.leakage import leak as leak
    from sufficit.metrics.scores import Scores as Scores
    from sufficit.perturbation.heatmaps import normalize as normalize
    from sufficit.perturbation.heatmaps import resize as resize
    from sufficit.plots import overlay as overlay
    from sufficit.regions import Certificate as Certificate
    from sufficit.regions import Regions as Regions
    from sufficit.regions import explain as explain
    from sufficit.runs.config import Workers as Workers
    from sufficit.runs.results import RunResults as RunResults
    from sufficit.sanity import sanity_check as sanity_check
    from sufficit.similarity import agreement as agreement
    from sufficit.sources.fitted import Fitted as Fitted
    from sufficit.statistics import Standing as Standing
    from sufficit.training import LaxRecipe as LaxRecipe
    from sufficit.training import cache_features as cache_features
    from sufficit.training import train_lax as train_lax
    from sufficit.training import train_twin as train_twin

_HOMES = {
    "classifier.checkpoint": ("Recipe", "View"),
    "classifier.classifier": ("Classifier",),
    "comparison": ("compare",),
    "errors": ("UserError",),
    "explainers": ("explain_all",),
    "explainers.lax": ("Lax",),
    "metrics.compare_scores": ("compare_scores",),
    "metrics.leakage": ("Leak", "Pool", "leak"),
    "evaluation": ("evaluate",),
    "metrics.scores": ("Scores",),
    "perturbation.heatmaps": ("normalize", "resize"),
    "plots": ("overlay",),
    "runs.config": ("Workers",),
    "runs.results": ("RunResults",),
    "regions": ("Certificate", "Regions", "explain"),
    "sanity": ("sanity_check",),
    "sources.fitted": ("Fitted",),
    "similarity": ("agreement",),
    "statistics": ("Standing",),
    "training": ("LaxRecipe", "cache_features", "train_lax", "train_twin"),
}
_MODULES = {name: f"sufficit.{module}" for module, names in _HOMES.items() for name in names}

try:
    __version__ = version("sufficit")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'sufficit' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*sorted(_MODULES), "__version__"]
