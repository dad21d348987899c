"""`train_lax`: a classifier and images in, an adapter that explains the classifier out."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn

from sufficit.classifier.classifier import Classifier, check_classifier
from sufficit.classifier.fingerprint import digest
from sufficit.classifier.source_code import code_of
from sufficit.errors import NotFiniteError, UserError
from sufficit.explainers import explain
from sufficit.explainers.lax import CONFIG, WEIGHTS, Lax
from sufficit.explainers.recipes import LaxRecipe, recipe_of
from sufficit.explainers.step import Batch, take_step
from sufficit.files import CHECKPOINT, check_output, place, read_json
from sufficit.progress import Progress, Tick
from sufficit.provenance import plain
from sufficit.similarity import Agreement, agreement
from sufficit.training.feed import Feed, Loader, Target, feed_of, keeping_randomness, mixed_seed
from sufficit.training.processes import fabric_for, frozen
from sufficit.training.trainer import LossError, Trainer
from sufficit.training.validation import ValidationSet

if TYPE_CHECKING:
    from lightning.fabric import Fabric

PATIENCE = 5


class TrainingError(UserError):
    """Training stopped; `lax` is the best adapter of the finished epochs, if there is one."""

    lax: Lax | None = None


def train_lax(
    classifier: Classifier,
    loader: Loader,
    *,
    recipe: str | LaxRecipe = "robust",
    target: Target = "label",
    epochs: int | None = None,
    area: float | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    validation: Loader | ValidationSet | None = None,
    validation_images: int = 256,
    net: nn.Module | None = None,
    alpha_min: float | None = None,
    patience: int | None = PATIENCE,
    overwrite: bool = False,
    fabric: "Fabric | None" = None,
    about: Mapping[str, Any] | None = None,
    progress: bool | Progress | None = None,
) -> Lax:
    """Train an adapter that draws the classifier's heatmap in its own forward pass.

    `loader` gives batches of (images in 0..1, labels), or images alone with target="prediction",
    and starts again at each epoch. The first `validation_images` of `validation`, or else of
    `loader`, select the epoch. `out` gets a checkpoint per epoch and the best adapter: the
    same call resumes an interrupted run. `area` is the wanted mean of a heatmap. `patience` is how
    many epochs without improvement end the training; None trains all epochs. `net` replaces the
    convnet. `fabric` brings several devices or bfloat16. `about` is stored with the adapter and,
    like all settings, must be the same on resume. The classifier does not change.
    """
    check_classifier(classifier)
    chosen = recipe_of(recipe, epochs, area, alpha_min)
    if target not in ("label", "prediction"):
        raise UserError(f'target must be "label" or "prediction", got {target!r}')
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UserError(f"seed must be a whole number, 0 or more, got {seed!r}")
    if validation_images < 2:
        raise UserError(f"validation_images must be 2 or more, got {validation_images}")
    fabric = fabric or fabric_for(classifier.device)
    folder = None if out is None else place(out)
    grad = torch.enable_grad()  # also if the caller has turned gradients off
    with torch.inference_mode(False), grad, keeping_randomness(), frozen(classifier, fabric):
        feed = feed_of(classifier, loader, target, seed, fabric)
        if not isinstance(validation, ValidationSet):
            source = feed if validation is None else Feed(classifier, validation, target, seed)
            validation = ValidationSet.of(classifier, *source.first_images(validation_images))
        lax = _new(classifier, validation.images, chosen, net, seed)
        if folder is not None and fabric.is_global_zero:
            check_output(folder)
        given = (feed, validation, chosen, lax, fabric, about or {})
        trainer = LaxTrainer(*given, out=folder, overwrite=overwrite, patience=patience)
        trainer.fit("training", progress)
        trainer.keep(last=True)
        return trainer.result()


def _new(
    classifier: Classifier, images: Tensor, recipe: LaxRecipe, net: nn.Module | None, seed: int
) -> Lax:
    """An untrained adapter for the classifier's features."""
    with torch.no_grad():
        features, _ = classifier.features(images[:2])
    _, channels, h, w = features.shape
    if h * w < 2:
        raise UserError(
            f"The features of layer {classifier.layer!r} are {h} x {w}, too small for a heatmap:"
            " give Classifier an earlier layer"
        )
    torch.manual_seed(seed)
    own = copy.deepcopy(net)  # the caller's net stays as it is
    lax = Lax(channels, upsample=recipe.upsample, bias=recipe.bias, net=own)
    lax.belong_to(classifier, str(classifier.layer))
    return lax


class LaxTrainer(Trainer):
    """Trains an adapter and keeps the one of the best epoch."""

    def __init__(
        self,
        feed: Feed,
        validation: ValidationSet,
        recipe: LaxRecipe,
        lax: Lax,
        fabric: "Fabric",
        about: Mapping[str, Any],
        **options: Any,
    ) -> None:
        self.feed, self.validation, self.recipe, self.lax = feed, validation, recipe, lax
        self.classifier = feed.classifier
        self.facts = {
            "recipe": plain(recipe),
            "target": feed.target,
            "seed": feed.seed,
            "batches": len(feed),
            "processes": fabric.world_size,
            "about": dict(about),
        }
        settings = self.facts | {
            "validation": digest(validation.images),
            "code of the model": [feed.classifier.code, code_of(feed.classifier.bare)],
            "adapter": {k: v for k, v in lax.config.items() if k != "trained"},
        }
        adam = torch.optim.Adam(lax.parameters(), lr=recipe.lr)
        parts = (lax, adam, fabric, self._batches, self._step)
        options |= {"total": len(feed), "epochs": recipe.epochs, "rate": recipe.rate}
        super().__init__(*parts, settings=settings, **options)
        if self.state.history and self.state.best is None:
            raise UserError(f"The {CHECKPOINT} in {self.out} has no best adapter: remove it")

    def _batches(self, epoch: int) -> Iterable[Batch]:
        seed = mixed_seed(self.feed.seed, epoch, self.fabric.global_rank)
        self._generator = Generator(self.fabric.device).manual_seed(seed)
        return self.feed.batches(epoch)

    def _step(self, batch: Batch, done: float) -> dict[str, Tensor]:
        found = take_step(self.classifier, self.module, batch, self.recipe, self._generator, done)
        return {name: value for name, value in vars(found).items() if name != "terms"}

    def run_epoch(self, tick: Tick | None) -> None:
        """As any trainer; losses that are not finite become an error with the best adapter."""
        try:
            super().run_epoch(tick)
        except (LossError, NotFiniteError, torch.OutOfMemoryError) as error:
            reason = str(error)
            if isinstance(error, NotFiniteError):
                reason = (
                    "The adapter, or the classifier on masked images, gives NaN after the last"
                    " batch of an epoch: check its images, or lower the learning rate"
                )
            elif isinstance(error, torch.OutOfMemoryError):
                reason = "Out of memory: use smaller batches"
            if self.state.best is None:
                raise TrainingError(f"{reason}. No epoch was finished.") from error
            where = f"in {self.out}" if self.out else "in this error's .lax"
            epoch = best_of(self.state.history)["epoch"]
            stopped = TrainingError(f"{reason}. The adapter of epoch {epoch} is kept {where}.")
            stopped.lax = self.result()
            raise stopped from error

    def validate(self) -> dict[str, Any]:
        """The adapter's scores; the first process computes them for all."""
        found = None
        if self.fabric.is_global_zero:
            self.lax.eval()
            found = self.validation.score(self.classifier, self.lax, self.recipe.alpha_min)
        row = self.fabric.broadcast(found.row if found else {})
        if math.isnan(row["worth"]):
            raise LossError("The classifier gives NaN for masked images: it can't be explained")
        self.select(row["worth"], self.classifier.dtype)
        if self.better:
            self.validation.best = found
        return row

    def keep(self, *, last: bool = False) -> None:
        """Write the best adapter to `out` if it is new or not there; at last with all history."""
        if self.out is not None and self.fabric.is_global_zero:
            there = None  # epochs in the history of the adapter that is there
            with suppress(UserError, KeyError, TypeError):
                there = len(read_json(self.out / CONFIG)["trained"]["history"])
            there = there if (self.out / WEIGHTS).exists() else None
            if there != len(self.state.history) if last else self.better or there is None:
                self.result().save_pretrained(self.out)
        self.fabric.barrier()

    def result(self) -> Lax:
        """The best adapter, with the history of its training."""
        best = copy.deepcopy(self.lax)
        best.load_state_dict(self.state.best or {})
        best.trained = self.facts | self.state.made | {"history": list(self.state.history)}
        return best.to(self.fabric.device).eval()


def best_of(history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The row of the epoch whose adapter is kept: the highest worth, of equals the later."""
    return max(history, key=lambda row: (float(row["worth"]), row["epoch"]))


def repeatability(
    classifier: Classifier,
    loader: Loader,
    images: Tensor,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    alpha_min: float = 0.5,
    **options: Any,
) -> tuple[Agreement, list[Lax]]:
    """Train an adapter per seed and compare their heatmaps; options are those of `train_lax`.

    Rank correlation, SSIM and overlap at alpha_min, each the mean over pairs of seeds.
    """
    if len(set(seeds)) < 2:
        raise UserError(f"seeds must hold two different seeds or more, got {list(seeds)}")
    if "out" in options or "seed" in options:
        raise UserError("repeatability trains once per seed and saves nothing: drop out= and seed=")
    options["alpha_min"] = alpha_min
    trained = [train_lax(classifier, loader, seed=seed, **options) for seed in seeds]
    maps = [explain(classifier, images, method=lax).cpu() for lax in trained]
    return agreement(torch.stack(maps), alpha_min), trained
