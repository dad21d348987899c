"""Train LAX, an adapter on a frozen classifier, and twins, copies that are used to masks."""

from sufficit.declared import FolderOptions
from sufficit.explainers.recipes import RECIPES, LaxRecipe
from sufficit.training.feed import cache_features
from sufficit.training.lax_training import TrainingError, repeatability, train_lax
from sufficit.training.train_folder import train_folder
from sufficit.training.twin_training import train_twin

__all__ = [
    "RECIPES",
    "FolderOptions",
    "LaxRecipe",
    "TrainingError",
    "cache_features",
    "repeatability",
    "train_folder",
    "train_lax",
    "train_twin",
]
