"""Train LAX, an adapter on a frozen classifier, and twins, copies that are used to masks."""

from sufficit.declared import FolderOptions
from sufficit.training.feed import cache_features
from sufficit.training.lax_training import TrainingError, train_lax
from sufficit.training.recipes import RECIPES, LaxRecipe, OrderRecipe
from sufficit.training.step import Loss, TrainingStep, recipe_loss, take_step
from sufficit.training.train_folder import train_folder
from sufficit.training.training_batch import TrainingBatch
from sufficit.training.twin_training import train_twin

__all__ = [
    "RECIPES",
    "FolderOptions",
    "LaxRecipe",
    "Loss",
    "OrderRecipe",
    "TrainingBatch",
    "TrainingError",
    "TrainingStep",
    "cache_features",
    "recipe_loss",
    "take_step",
    "train_folder",
    "train_lax",
    "train_twin",
]
