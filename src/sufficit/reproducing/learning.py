"""The stages that train: the classifier, then the adapters."""

import shutil
from dataclasses import replace

import torch

from sufficit.classifiers import Classifier
from sufficit.comparing.groups import quiet
from sufficit.files import CHECKPOINT
from sufficit.models import IMAGENET_MEAN, IMAGENET_STD, MODELS, build, fill_in, fold
from sufficit.parts import Recipe, View
from sufficit.reproducing.tables import Table
from sufficit.reproducing.work import TRAINED, Work
from sufficit.results import save_json
from sufficit.training import RECIPES, LaxRecipe, train_lax
from sufficit.training.classifiers import ClassifierRecipe, accuracy, train_classifier


def train_the_classifier(work: Work) -> None:
    """Train it plainly, fold its batch norms, save it, test it."""
    folder, note = work.out / "classifier", work.out / "classifier" / TRAINED
    if note.exists():
        return
    plan, sets, training = work.plan, work.sets, work.out / "classifier-training"
    with work.clock("classifier"):
        with torch.random.fork_rng():
            torch.manual_seed(plan.seed)
            model = build(plan.model, len(sets.classes), plan.side)
        random = fill_in(model, plan.model, plan.weights, plan.side)
        history = train_classifier(
            model,
            work.parts[0],
            _recipe(work),
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            fabric=work.fabric,
            out=training,
            seed=plan.seed,
            progress=work.progress,
        )
        options = {"num_classes": len(sets.classes), "image_size": plan.side, "folded": True}
        Classifier(
            fold(model.cpu().eval()),
            MODELS[plan.model].layer,
            IMAGENET_MEAN,
            IMAGENET_STD,
            classes=sets.classes,
            view=View((plan.side, plan.side)),
            recipe=Recipe(f"sufficit:{plan.model}", options),
        ).save(folder)
        right = accuracy(work.classifier, sets.test)
        told = {"test_accuracy": right, "test_images": len(sets.test), "history": history}
        counts = {"train_images": len(work.parts[0]), "random_at_first": random}
        save_json(note, told | counts | {"data": sets.source} | work.record())
        shutil.rmtree(training, ignore_errors=True)
    work.clock.say(f"  {right:.1%} of {len(sets.test)} test images right")


def _recipe(work: Work) -> ClassifierRecipe:
    training, batch = work.table.training, work.plan.train_batch
    lr = training.lr if work.plan.weights == "none" else training.fine_lr
    return ClassifierRecipe(
        epochs=work.plan.epochs,
        batch_size=batch,
        optimizer=training.optimizer,
        lr=lr * batch / training.batch_size,
        weight_decay=training.weight_decay,
        augment=training.augment,
    )


def train_the_adapters(work: Work) -> None:
    """An adapter for each recipe and seed."""
    for name, (recipe, seed) in work.plan.adapters.items():
        folder = work.out / "adapters" / name
        if (folder / TRAINED).exists():
            continue
        loader = work.loader
        images, labels = work.parts[1].part(slice(None))
        with work.clock(f"adapter {name}"), quiet():
            lax = train_lax(
                work.classifier,
                loader,
                recipe=lax_recipe(work.table, recipe, work.plan.lax_epochs),
                seed=seed,
                alpha_min=work.table.alpha_min,
                patience=None,
                validation=[(images, labels)],
                validation_images=len(labels),
                fabric=work.fabric,
                out=folder,
                progress=work.progress,
            )
            save_json(folder / TRAINED, work.record() | {"seed": seed, "recipe": recipe})
            (folder / CHECKPOINT).unlink(missing_ok=True)
        work.clock.say(f"  validation MSI {lax.trained['history'][-1]['msi']:.3f}")


def lax_recipe(table: Table, name: str, epochs: int) -> LaxRecipe:
    """A recipe as this table has it."""
    recipe = replace(RECIPES[name], epochs=epochs)
    if name != "paper":
        return recipe
    adapter = table.adapter
    return replace(recipe, entropy=adapter.entropy, upsample=adapter.upsample, lr=adapter.lr)
