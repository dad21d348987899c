"""The stages that train: the classifier, then the adapters."""

import shutil
import time
from dataclasses import asdict, replace
from typing import Any

from sufficit.classifier.architectures import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    MODELS,
    build,
    fill_in,
    fold,
)
from sufficit.classifier.checkpoint import Recipe, View
from sufficit.classifier.classifier import Classifier
from sufficit.comparing.groups import quiet
from sufficit.data.loader import within
from sufficit.errors import UserError
from sufficit.explainers.lax import CONFIG, Lax
from sufficit.files import CHECKPOINT, read_json
from sufficit.progress import Progress, bar
from sufficit.reproduce.tables import Table
from sufficit.reproduce.work import TRAINED, Work
from sufficit.results import plain, save_json
from sufficit.seeds import seeded
from sufficit.training import RECIPES, LaxRecipe, train_lax
from sufficit.training.classifier_training import ClassifierRecipe, accuracy, train_classifier
from sufficit.training.feed import Loader


def train_the_classifier(work: Work) -> None:
    """Train it plainly, fold its batch norms, save it, test it."""
    folder, note = work.out / "classifier", work.out / "classifier" / TRAINED
    if note.exists():
        return
    plan, sets, training = work.plan, work.sets, work.out / "classifier-training"
    with work.clock("classifier"):
        with seeded(plan.seed):
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
    """An adapter for each recipe and seed; each process trains its share of what is left."""
    crew, names = work.crew, list(work.plan.adapters)
    paths = [work.out / "adapters" / name / TRAINED for name in names]
    left = [number for number, path in enumerate(paths) if not path.exists()]
    for number in {*range(len(names))} - {*left}:
        _check_recipe(work, names[number])
    mine = crew.mine("adapters", left)
    alone = crew.size == 1
    before, total = len(names) - len(left), len(names)
    with (
        bar("adapters", False if alone else work.progress) as tick,
        crew.stage("adapters", tick, before, total) as told,
    ):
        for done, number in enumerate(mine):
            # Telling is listening too: who trains for hours learns that another one is gone.
            progress = work.progress if alone else within(told, done, 1, total)
            _train_adapter(work, names[number], progress)


def _check_recipe(work: Work, name: str) -> None:
    """Raise where an adapter was trained before its recipe became what it is now."""
    folder, (recipe, _) = work.out / "adapters" / name, work.plan.adapters[name]
    chosen = lax_recipe(work.table, recipe, work.plan.lax_epochs)
    now = plain(asdict(replace(chosen, alpha_min=work.table.alpha_min)))
    before = read_json(folder / CONFIG)["trained"]["recipe"]
    changed = [
        f"{key} {before.get(key)}, now {now[key]}" for key in now if before.get(key) != now[key]
    ]
    if changed:
        raise UserError(
            f"{folder} was trained by an earlier recipe {recipe!r} ({'; '.join(changed)}): begin"
            " anew in another --out, or delete the folders adapters and numbers"
        )


def _train_adapter(work: Work, name: str, progress: bool | Progress | None) -> None:
    recipe, seed = work.plan.adapters[name]
    folder, loader = work.out / "adapters" / name, work.loader
    begun = time.monotonic()
    with work.clock(f"adapter {name}"), quiet():
        chosen = lax_recipe(work.table, recipe, work.plan.lax_epochs)
        lax = learn(work, loader, recipe=chosen, seed=seed, out=folder, progress=progress)
        told = {"seed": seed, "recipe": recipe, "seconds": round(time.monotonic() - begun, 2)}
        save_json(folder / TRAINED, work.record() | told)
        (folder / CHECKPOINT).unlink(missing_ok=True)
    work.clock.say(f"  validation MSI {lax.trained['history'][-1]['msi']:.3f}")


def learn(work: Work, loader: Loader, **options: Any) -> Lax:
    """An adapter of the run's classifier; pictures held out from training choose the epoch."""
    images, labels = work.parts[1].part(slice(None))
    return train_lax(
        work.classifier,
        loader,
        alpha_min=work.table.alpha_min,
        patience=None,
        validation=[(images, labels)],
        validation_images=len(labels),
        fabric=work.fabric,
        **options,
    )


def lax_recipe(table: Table, name: str, epochs: int) -> LaxRecipe:
    """A recipe as this table has it."""
    recipe = replace(RECIPES[name], epochs=epochs)
    if name != "paper":
        return recipe
    adapter = table.adapter
    return replace(recipe, entropy=adapter.entropy, upsample=adapter.upsample, lr=adapter.lr)
