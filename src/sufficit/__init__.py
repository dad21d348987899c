"""Score and draw visual explanations of image classifiers.

Names are imported when first used, so that the command line answers before torch is loaded.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sufficit.classifiers import Classifier
    from sufficit.errors import UserError
    from sufficit.explainers import explain, explain_all
    from sufficit.heatmaps import normalize, resize
    from sufficit.metrics.evaluate import Scores, evaluate
    from sufficit.parts import Recipe, View
    from sufficit.sanity import sanity_check
    from sufficit.similarity import agreement

_HOMES = {
    "Classifier": "sufficit.classifiers",
    "Recipe": "sufficit.parts",
    "Scores": "sufficit.metrics.evaluate",
    "UserError": "sufficit.errors",
    "View": "sufficit.parts",
    "agreement": "sufficit.similarity",
    "evaluate": "sufficit.metrics.evaluate",
    "explain": "sufficit.explainers",
    "explain_all": "sufficit.explainers",
    "normalize": "sufficit.heatmaps",
    "resize": "sufficit.heatmaps",
    "sanity_check": "sufficit.sanity",
}

__all__ = [
    "Classifier",
    "Recipe",
    "Scores",
    "UserError",
    "View",
    "agreement",
    "evaluate",
    "explain",
    "explain_all",
    "normalize",
    "resize",
    "sanity_check",
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
