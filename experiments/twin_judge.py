"""Train an adapter that a twin judges at every other step, so that a mask must suffice for both.

    lax = train_lax(classifier, loader, loss=judged_by(twin))

A twin is a copy of the model that is used to masks: `sufficit.train_twin`.
"""

from dataclasses import replace
from itertools import count

from torch import Tensor

from sufficit import Classifier, LaxRecipe
from sufficit.training import RECIPES, Loss, TrainingStep, recipe_loss


def judged_by(twin: Classifier, recipe: str | LaxRecipe = "crisp") -> Loss:
    """The terms of a recipe; at every other step the twin answers for the masked images.

    Freezes the twin and puts it in eval mode. Give `train_lax` the same recipe.
    """
    chosen = RECIPES[recipe] if isinstance(recipe, str) else recipe
    twin.model.eval().requires_grad_(False)
    numbers = count()

    def loss(step: TrainingStep) -> dict[str, Tensor]:
        judged = replace(step, judge=twin) if next(numbers) % 2 else step
        return recipe_loss(judged, chosen)

    return loss
