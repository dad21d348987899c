"""`train_lax`: a classifier and images in, an adapter that explains the classifier out."""

import copy
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn

from sufficit.classifier.classifier import Classifier, check_has_classes
from sufficit.classifier.fingerprint import digest
from sufficit.classifier.layers import resolve
from sufficit.classifier.source_code import check_arguments, code_digest, code_of
from sufficit.errors import NotFiniteError, UserError
from sufficit.explainers.adapter_nets import TopDown
from sufficit.explainers.forward_pass import look
from sufficit.explainers.lax import CONFIG, WEIGHTS, Lax
from sufficit.files import CHECKPOINT, check_output, place, read_json
from sufficit.progress import Progress, Tick
from sufficit.provenance import plain
from sufficit.training.feed import Feed, Loader, Target, feed_of, keeping_randomness, mixed_seed
from sufficit.training.processes import fabric_for, frozen, repeatable
from sufficit.training.recipes import LaxRecipe, recipe_of
from sufficit.training.step import Loss, take_step
from sufficit.training.trainer import LossError, Patience, Trainer
from sufficit.training.training_batch import TrainingBatch
from sufficit.training.validation import ValidationScores, ValidationSet

if TYPE_CHECKING:
    from lightning.fabric import Fabric

LOSS = 6  # of terms, selection and fields of a recipe; with another one no training is resumed
STATISTICS = 64  # images that the mean and spread of features are taken from
FEW = 16  # images that the weights of the classes are taken from
WIDE = 256  # channels over stages of one size, as of a ViT: few convolutions, in few cells
SIDE = 28  # cells along a map that are fine enough, whatever the size of the features


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
    class_free: bool = False,
    layers: Sequence[str] | None = None,
    loss: Loss | None = None,
    deterministic: bool = False,
    patience: Patience = "auto",
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
    many epochs without improvement end the training: by default as many as 750 steps take, but at
    least 5; None trains all epochs. The adapter draws for the class it is asked for, unless
    `class_free`. `layers` are the ones it reads, the coarsest last; by default they are found.
    `net` replaces the adapter's net. `loss` replaces the terms of the recipe: a function of a
    `sufficit.training.TrainingStep` that returns a number or a dict of terms, which are summed; the
    history gets each as loss_NAME. The recipe still says the fills, the adapter and the schedule.
    `deterministic` gives the same adapter twice on a GPU, more slowly. `fabric` brings several
    devices or bfloat16. `about` is stored with the adapter and, like all settings, must be the
    same on resume. The classifier does not change.
    """
    check_has_classes(classifier)
    chosen = recipe_of(recipe, epochs, area, alpha_min, class_free)
    if net is not None:
        # It reads one layer, and may end in anything.
        chosen = replace(chosen, stages=1, absent=0.0, contrast=1.0)
    if loss is not None:
        check_arguments(loss, "loss", "step")
    if target not in ("label", "prediction"):
        raise UserError(f'target must be "label" or "prediction", got {target!r}')
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UserError(f"seed must be a whole number, 0 or more, got {seed!r}")
    if validation_images < 2:
        raise UserError(f"validation_images must be 2 or more, got {validation_images}")
    fabric = fabric or fabric_for(classifier.device)
    folder = None if out is None else place(out)
    grad = torch.enable_grad()  # also if the caller has turned gradients off
    with ExitStack() as stack:
        for context in (torch.inference_mode(False), grad, keeping_randomness()):
            stack.enter_context(context)
        stack.enter_context(frozen(classifier, fabric))
        stack.enter_context(repeatable(deterministic))
        feed = feed_of(classifier, loader, target, seed, fabric)
        if not isinstance(validation, ValidationSet):
            source = feed if validation is None else Feed(classifier, validation, target, seed)
            validation = ValidationSet.of(classifier, *source.first_images(validation_images))
        read = classifier.stage_layers(validation.images, chosen.stages)
        if layers is not None:
            if not layers:
                raise UserError("layers must name one layer or more, got none: leave it out")
            named = [layers] if isinstance(layers, str) else layers
            read = tuple(resolve(classifier.model, name) for name in named)
        lax = untrained(classifier, validation.images, chosen, read, net, seed)
        feed = replace(feed, layers=read)
        if folder is not None and fabric.is_global_zero:
            check_output(folder)
        trainer = LaxTrainer(
            feed,
            validation,
            chosen,
            lax,
            fabric,
            about=about or {},
            loss=loss,
            out=folder,
            overwrite=overwrite,
            patience=patience,
        )
        trainer.fit("training", progress)
        trainer.keep(last=True)
        return trainer.result()


def untrained(
    classifier: Classifier,
    images: Tensor,
    recipe: LaxRecipe,
    layers: tuple[str, ...],
    net: nn.Module | None,
    seed: int,
) -> Lax:
    """An untrained adapter for the features of these layers."""
    with torch.no_grad():
        stages, logits = classifier.stages(images[:STATISTICS], layers)
    sides = [stage.shape[2:] for stage in stages]
    if math.prod(sides[-1]) < 2:
        raise UserError(
            f"The features of layer {layers[-1]!r} are {sides[-1][0]} x {sides[-1][1]}, too small"
            " for a heatmap: give Classifier an earlier layer"
        )
    if sides != sorted(sides, reverse=True):
        shown = ", ".join(f"{name} ({h} x {w})" for name, (h, w) in zip(layers, sides, strict=True))
        raise UserError(f"layers must be in order, the coarsest last, got {shown}: sort them")
    torch.manual_seed(seed)
    if net is not None or recipe.stages == 1:
        lax = Lax(
            stages[-1].shape[1],
            upsample=recipe.upsample,
            bias=recipe.bias,
            net=copy.deepcopy(net),  # the caller's net stays as it is
        )
        layers = layers[-1:]
    else:
        # A map of four times the coarsest side, or of SIDE cells, tells enough.
        finest, enough = max(sides[0]), min(4 * max(sides[-1]), SIDE)
        steps = max(0, math.ceil(math.log2(enough / finest)))
        joined = sides.count(sides[-1])
        lax = Lax(
            [stage.shape[1] for stage in stages],
            steps=steps,
            joined=joined,
            width=WIDE if joined == len(sides) else None,
            classes=logits.shape[1] if recipe.absent else None,
            evidence=bool(recipe.absent and recipe.mosaics),
            bias=recipe.bias,
        )
        lax.standardize(stages)
        evidence = lax.net.evidence if isinstance(lax.net, TopDown) else None
        if evidence is not None:
            given = class_weights(classifier, images[:FEW], layers[-1])
            evidence.start(stages[-1], given)
    lax.belong_to(classifier, *layers)
    return lax


def class_weights(classifier: Classifier, images: Tensor, layer: str) -> Tensor:
    """How much each channel of a layer speaks for each class: [C,K].

    The mean gradient of the logits, as in Grad-CAM; for a linear classifier of pooled features it
    is its weights, but for a factor.
    """
    seen = look(classifier, images, layer, differentiate=True)
    logits = seen.logits.unbind(1)
    found = (seen.gradients(each, last=each is logits[-1]) for each in logits)
    return torch.stack([gradients.mean((0, 2, 3)) for gradients in found])


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
        loss: Loss | None = None,
        **options: Any,
    ) -> None:
        self.feed, self.validation, self.recipe, self.lax = feed, validation, recipe, lax
        self.classifier, self.loss = feed.classifier, loss
        self.facts = {
            "recipe": plain(recipe),
            "target": feed.target,
            "seed": feed.seed,
            "batches": len(feed),
            "processes": fabric.world_size,
            "about": dict(about),
            "own loss": None if loss is None else loss_facts(loss),
        }
        settings = self.facts | {
            "loss": LOSS,
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
        self._generator = Generator(self.fabric.device)
        self._gave_nan = False  # in an epoch, of which `evaluate` has warned

    def _batches(self, epoch: int) -> Iterable[TrainingBatch]:
        seed = mixed_seed(self.feed.seed, epoch, self.fabric.global_rank)
        self._generator.manual_seed(seed)
        return self.feed.batches(epoch)

    def _step(self, batch: TrainingBatch, done: float) -> dict[str, Tensor]:
        found = take_step(
            self.classifier,
            self.module,
            batch,
            self.recipe,
            self._generator,
            done=done,
            classes=self.lax.classes,
            loss=self.loss,
        )
        numbers = {
            "loss": found.loss,
            "accuracy": found.accuracy,
            "area": found.area,
            "share": found.share,
        }
        if self.loss is not None:
            numbers |= {f"loss_{name}": value for name, value in found.terms.items()}
        return numbers

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
            with warnings.catch_warnings():
                if self._gave_nan:
                    warnings.filterwarnings("ignore", "the model gave NaN")
                found = self._scored()
        values = None if found is None or found.scores is None else found.scores["msi"].double()
        self._gave_nan |= values is not None and bool(values.isnan().any())
        row, values = self.fabric.broadcast((found.row if found else {}, values))
        if math.isnan(row["worth"]):
            raise LossError("The classifier gives NaN for masked images: it can't be explained")
        self.select(row["worth"], self.classifier.dtype, values)
        return row | {"kept": self.better}

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
        best = self._sharpened(best)
        best.trained = self.facts | self.state.made | {"history": list(self.state.history)}
        return best.to(self.fabric.device)

    def _sharpened(self, lax: Lax) -> Lax:
        if self.recipe.contrast != 1:
            lax.sharpen(self.recipe.contrast, self.recipe.alpha_min)
        return lax.eval()

    def _scored(self) -> ValidationScores:
        """The scores of the adapter as it would be kept."""
        # A net of the user's may hold tensors of the last step, which can't be copied.
        lax = self.lax if self.recipe.contrast == 1 else copy.deepcopy(self.lax)
        return self.validation.score(self.classifier, self._sharpened(lax), self.recipe.alpha_min)


def best_of(history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The row of the epoch whose weights are kept; where none says so, the highest worth."""
    rows = [row for row in history if row.get("kept")]
    return rows[-1] if rows else max(history, key=lambda row: (float(row["worth"]), row["epoch"]))


def loss_facts(loss: Loss) -> dict[str, str]:
    """What tells a loss of the user's from another: its name and a digest of its code."""
    name = getattr(loss, "__qualname__", type(loss).__qualname__)
    return {"name": name, "code": code_digest(loss)}
