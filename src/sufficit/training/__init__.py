"""Train LAX: an adapter on a frozen classifier."""

from sufficit.training.feeding import cache_features
from sufficit.training.folders import FolderOptions, train_folder
from sufficit.training.lax import TrainingError, train_lax
from sufficit.training.recipes import RECIPES, LaxRecipe
from sufficit.training.repeating import repeatability

__all__ = [
    "RECIPES",
    "FolderOptions",
    "LaxRecipe",
    "TrainingError",
    "cache_features",
    "repeatability",
    "train_folder",
    "train_lax",
]
