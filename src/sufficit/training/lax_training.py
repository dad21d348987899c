"""`train_lax`: a classifier and images in, an adapter that explains the classifier out."""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import islice
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
from sufficit.explainers.evidence import find_evidence
from sufficit.explainers.forward_pass import look
from sufficit.explainers.lax import CONFIG, WEIGHTS, Lax
from sufficit.explainers.order_net import cells_for
from sufficit.files import CHECKPOINT, check_output, place, read_json
from sufficit.progress import Progress, Tick, duration
from sufficit.provenance import plain, surroundings
from sufficit.sources.asked import SIZES
from sufficit.training.feed import Feed, Loader, Target, feed_of, keeping_randomness, mixed_seed
from sufficit.training.frozen_copy import compiled, frozen_copy
from sufficit.training.level_sets import LevelSets, level_sets
from sufficit.training.order_step import order_step
from sufficit.training.processes import fabric_for, frozen, repeatable
from sufficit.training.recipes import USUAL_EPOCHS, LaxRecipe, OrderRecipe, recipe_of
from sufficit.training.size_choice import choose_size
from sufficit.training.step import Loss, take_step
from sufficit.training.trainer import LossError, Patience, Trainer, weights_of
from sufficit.training.validation import ValidationScores, ValidationSet, predictions

if TYPE_CHECKING:
    from lightning.fabric import Fabric

LOSS = 8  # of terms, selection and fields of a recipe; with another one no training is resumed
STATISTICS = 64  # images that the mean and spread of features are taken from
FEW = 16  # images that the weights of the classes are taken from
MOST_STAGES, USUAL_STAGES = 4, 3  # that an order is drawn from
MIRRORED = 0.75  # share of images whose class stays when they are mirrored, for which they may be
# Steps from which compiling pays: on a ResNet50 it saves 24 ms of each and takes 50 s in all.
COMPILED_FROM = 3000
TOGETHER = 64  # images whose orders are drawn at a time
PASSES_OF_LOOK = 51  # per image: 24 regions, their rests, nothing, everything, the order
LOOKS = 4  # at the validation images, while an order is trained
EARLY = 64  # of them, before the last look, which decides the size
NARROW = 32  # channels of an order's net, for small classifiers
WIDE = 256  # channels over stages of one size, as of a ViT: few convolutions, in few cells
SIDE = 28  # cells along a map that are fine enough, whatever the size of the features


class TrainingError(UserError):
    """Training stopped; `lax` is the best adapter of the finished epochs, if there is one."""

    lax: Lax | None = None


def train_lax(
    classifier: Classifier,
    loader: Loader,
    *,
    recipe: str | LaxRecipe | OrderRecipe = "robust",
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
    announce: Callable[[str], None] | None = None,
) -> Lax:
    """Train an adapter that draws the classifier's heatmap in its own forward pass.

    The classifier does not change. The recipe `robust` trains an order of the pixels for a number
    of steps and cuts it at one size, or at a size predicted for each image where validation images
    say that this is better. The other recipes train heatmaps, and validation images select the
    epoch.

    - `classifier`: the model to explain.
    - `loader`: batches of (images in 0..1, labels), or of images alone with target="prediction". It
      starts again at each epoch.
    - `recipe`: "robust", "crisp", "paper", "l1", or a recipe of your own.
    - `target`: "label", or "prediction" to explain the classifier's own predictions.
    - `epochs`: how many; by default 400 steps for `robust`, else those of the recipe.
    - `area`: share of the image that maps of `robust` mark; of the other recipes the wanted mean of
      a heatmap. By default `robust` finds it.
    - `seed`: of weights, order and everything random.
    - `out`: a folder for the adapter and a checkpoint per epoch. The same call resumes there.
    - `validation`: a loader of other images, or a ValidationSet; by default the first of `loader`.
    - `validation_images`: how many of them.
    - `net`: replaces the adapter's net; not for `robust`.
    - `alpha_min`: the threshold that scores use.
    - `class_free`: draw one map per image, whichever class is asked for; not for `robust`.
    - `layers`: the ones to read, the coarsest last; by default they are found.
    - `loss`: replaces the terms of the recipe, not of `robust`: a function of a
      `sufficit.training.TrainingStep` that returns a number, or a dict of terms that are summed.
      The history gets each term as loss_NAME; the recipe still says fills, adapter and schedule.
    - `deterministic`: the same adapter twice on a GPU, more slowly.
    - `patience`: epochs without improvement that end the training: "auto" is as many as 750 steps
      take, but at least 5; None trains all epochs. Not for `robust`.
    - `overwrite`: delete what `out` holds of another training.
    - `fabric`: a `lightning.fabric.Fabric`, for several devices or bfloat16.
    - `about`: is stored with the adapter; like all settings it must be the same on resume.
    - `progress`: show a bar, or call this function.
    - `announce`: gets a sentence on how long the training will take.
    """
    check_has_classes(classifier)
    chosen = recipe_of(recipe, epochs, area, alpha_min, class_free)
    if isinstance(chosen, OrderRecipe):
        _check_no_parts(net=net, loss=loss, patience=None if patience == "auto" else patience)
    elif net is not None:
        # It reads one layer, and may end in anything.
        chosen = replace(chosen, stages=1, absent=0.0, contrast=1.0)
    if loss is not None:
        check_arguments(loss, "loss", "step")
    _check_options(target, seed, validation_images)
    fabric = fabric or fabric_for(classifier.device, precision=usual_precision(classifier, chosen))
    folder = None if out is None else place(out)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())  # also if the caller has turned gradients off
        stack.enter_context(keeping_randomness())
        stack.enter_context(frozen(classifier, fabric))
        stack.enter_context(repeatable(deterministic))
        feed = feed_of(classifier, loader, target, seed, fabric)
        if not isinstance(validation, ValidationSet):
            source = feed if validation is None else Feed(classifier, validation, target, seed)
            validation = ValidationSet.of(classifier, *source.first_images(validation_images))
        named = _named_layers(classifier, layers)
        if folder is not None and fabric.is_global_zero:
            check_output(folder)
        trainer: LaxTrainer
        if isinstance(chosen, OrderRecipe):
            trainer = OrderTrainer(
                feed,
                validation,
                chosen,
                untrained_order(classifier, validation.images, chosen, named, seed),
                fabric,
                about or {},
                out=folder,
                overwrite=overwrite,
            )
        else:
            read = named or classifier.stage_layers(validation.images, chosen.stages)
            trainer = LaxTrainer(
                replace(feed, layers=read),
                validation,
                chosen,
                untrained(classifier, validation.images, chosen, read, net, seed),
                fabric,
                about or {},
                loss=loss,
                out=folder,
                overwrite=overwrite,
                patience=patience,
            )
        if announce is not None and not trainer.over():
            words = trainer.forecast()  # all processes take its trial steps
            if fabric.is_global_zero:
                announce(words)
        trainer.fit("training", progress)
        trainer.keep(last=True)
        return trainer.result()


def usual_precision(classifier: Classifier, recipe: LaxRecipe | OrderRecipe) -> str:
    """An order is trained in bf16 on a GPU, in a fraction of the time."""
    fast = isinstance(recipe, OrderRecipe) and classifier.device.type == "cuda"
    return "bf16" if fast else "fp32"


def _check_options(target: str, seed: int, validation_images: int) -> None:
    """Raise for values that no training takes."""
    if target not in ("label", "prediction"):
        raise UserError(f'target must be "label" or "prediction", got {target!r}')
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UserError(f"seed must be a whole number, 0 or more, got {seed!r}")
    if validation_images < 2:
        raise UserError(f"validation_images must be 2 or more, got {validation_images}")


def _check_no_parts(**parts: object) -> None:
    """Raise for a part that only the other recipes have."""
    for name, part in parts.items():
        if part is not None:
            raise UserError(
                f"the recipe robust has no {name}: leave it out, or use the recipe crisp or paper"
            )


def _named_layers(
    classifier: Classifier, names: Sequence[str] | str | None
) -> tuple[str, ...] | None:
    """The layers that the caller names, or None."""
    if names is None:
        return None
    if not names:
        raise UserError("layers must name one layer or more, got none: leave it out")
    listed = [names] if isinstance(names, str) else names
    return tuple(resolve(classifier.model, name) for name in listed)


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
    sides = check_stages(stages, layers)
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


def check_stages(stages: Sequence[Tensor], layers: Sequence[str]) -> list[torch.Size]:
    """Height and width of the stages; raise unless they are maps, the coarsest last."""
    sides = [stage.shape[2:] for stage in stages]
    if math.prod(sides[-1]) < 2:
        raise UserError(
            f"The features of layer {layers[-1]!r} are {sides[-1][0]} x {sides[-1][1]}, too small"
            " for a heatmap: give Classifier an earlier layer"
        )
    if sides != sorted(sides, reverse=True):
        shown = ", ".join(f"{name} ({h} x {w})" for name, (h, w) in zip(layers, sides, strict=True))
        raise UserError(f"layers must be in order, the coarsest last, got {shown}")
    return sides


def untrained_order(
    classifier: Classifier,
    images: Tensor,
    recipe: OrderRecipe,
    layers: tuple[str, ...] | None,
    seed: int,
) -> Lax:
    """An untrained adapter that orders cells, for these layers or for the stages that it finds."""
    some = images[:FEW]
    head = find_evidence(classifier, some)
    names = layers or classifier.stage_layers(some, MOST_STAGES, head.layer)
    if head.kind == "token" and names[-1] != head.layer:
        raise UserError(
            f"the last of layers must be {head.layer!r}, which the model's head reads, got"
            f" {names[-1]!r}"
        )
    with torch.no_grad():
        stages, _ = classifier.stages(some, names)
    sides = check_stages(stages, names)
    cells = cells_for(images.shape[2:], sides[-1], recipe.cells)
    channels = [stage.shape[1] for stage in stages]
    if head.kind == "token":
        channels[-1] *= 2  # the last features come with what each token adds to the class token
    # A fourth stage is worth its cost where it is no finer than the map, and sees other cells.
    if layers is None and (max(sides[0]) > cells or sides[0] == sides[-1]):
        names, channels = names[-USUAL_STAGES:], channels[-USUAL_STAGES:]
    torch.manual_seed(seed)
    width = min(recipe.width, max(NARROW, channels[-1]))
    lax = Lax(channels, width=width, cells=cells, block=recipe.block, head=head)
    lax.belong_to(classifier, *names)
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

    # What is trained comes first; then the options of `train_lax` that only a trainer needs.
    def __init__(
        self,
        feed: Feed,
        validation: ValidationSet,
        recipe: LaxRecipe | OrderRecipe,
        lax: Lax,
        fabric: "Fabric",
        about: Mapping[str, Any],
        *,
        loss: Loss | None = None,
        out: Path | None = None,
        overwrite: bool = False,
        patience: Patience = None,
        total: int | None = None,  # batches per epoch; None: those of the loader
        epochs: int | None = None,  # None: those of the recipe
    ) -> None:
        self.feed, self.validation, self.lax = feed, validation, lax
        self.recipe: Any = recipe
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
        usual = recipe.epochs or USUAL_EPOCHS
        super().__init__(
            lax,
            self.optimizer_of(lax),
            fabric,
            self._batches,
            self._step,
            total=len(feed) if total is None else total,
            epochs=usual if epochs is None else epochs,
            rate=recipe.rate,
            out=out,
            settings=settings,
            overwrite=overwrite,
            patience=patience,
        )
        if self.state.history and self.state.best is None:
            raise UserError(f"The {CHECKPOINT} in {self.out} has no best adapter: remove it")
        self._generator = Generator(self.fabric.device)
        self._gave_nan = False  # in an epoch, of which `evaluate` has warned

    def forecast(self) -> str:
        """How long the training is."""
        return f"Training takes at most {self.epochs} epochs."

    def optimizer_of(self, lax: Lax) -> torch.optim.Optimizer:
        """The optimizer of the adapter's weights."""
        return torch.optim.Adam(lax.parameters(), lr=self.recipe.lr)

    def _batches(self, epoch: int) -> Iterable[Any]:
        self._reseed(epoch)
        return self.feed.batches(epoch)

    def _reseed(self, epoch: int) -> None:
        self._generator.manual_seed(mixed_seed(self.feed.seed, epoch, self.fabric.global_rank))

    def _step(self, batch: Any, done: float) -> dict[str, Tensor]:
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


class OrderTrainer(LaxTrainer):
    """Trains an order of the pixels, keeps its last weights, and finds the size to cut it at."""

    # The parameters of `LaxTrainer` that an order has.
    def __init__(
        self,
        feed: Feed,
        validation: ValidationSet,
        recipe: OrderRecipe,
        lax: Lax,
        fabric: "Fabric",
        about: Mapping[str, Any],
        *,
        out: Path | None = None,
        overwrite: bool = False,
    ) -> None:
        batches = len(feed)
        # Of a large data set, an epoch is as many batches as the whole training has steps.
        total = min(batches, recipe.steps) if recipe.epochs is None else batches
        usual = math.ceil(recipe.steps / total) if total else USUAL_EPOCHS
        # Without a limit the loader runs to its end, and knows it.
        self.limit = total if total < batches else None
        self.steps_done = 0  # of an epoch
        self.flips = mirrors_keep_classes(feed.classifier, validation.images)
        self.asked: Classifier | None = None  # the fast copy, or that compiled
        half = "bf16" in str(fabric.strategy.precision.precision)
        self.fast = frozen_copy(
            feed.classifier,
            validation.images[:FEW],
            lax.reads,
            torch.bfloat16 if half else feed.classifier.dtype,
        )
        if recipe.size is None:  # its head of sizes is dropped at the end, unless it is better
            lax.predict_sizes(SIZES)
        super().__init__(
            feed,
            validation,
            recipe,
            lax,
            fabric,
            about,
            out=out,
            overwrite=overwrite,
            total=total,
            epochs=recipe.epochs or usual,
        )
        self.facts |= {
            "epochs": self.epochs,
            "flips": self.flips and recipe.flips > 0,
            "evidence": lax.head.words if lax.head else "",
        }

    def optimizer_of(self, lax: Lax) -> torch.optim.Optimizer:
        """The optimizer of the adapter's weights."""
        recipe = self.recipe
        return torch.optim.AdamW(lax.parameters(), recipe.lr, weight_decay=recipe.weight_decay)

    def _batches(self, epoch: int) -> Iterable[Any]:
        self._reseed(epoch)
        self.steps_done = 0
        for batch in islice(self.feed.pairs(epoch), self.limit):
            self.steps_done += 1
            yield batch

    def _step(self, batch: Any, done: float) -> dict[str, Tensor]:
        images, labels = batch
        if self.asked is None:
            pays = images.is_cuda and self.steps_left >= COMPILED_FROM
            self.asked = compiled(self.fast, images.repeat(2, 1, 1, 1)) if pays else self.fast
        return order_step(
            self.asked,
            self.lax,
            self.module,
            images,
            labels,
            self.recipe,
            self._generator,
            done=done,
            flips=self.flips,
        )

    @property
    def steps_left(self) -> int:
        """Steps of the epochs that are not done; 0 if the loader has no length."""
        return (self.epochs - self.state.epoch) * self.total

    def forecast(self) -> str:
        """How long the rest of the training will take, by the second of two trial steps.

        The looks at validation images are a part of it: on a CPU up to half.
        """
        batch = next(iter(self._batches(0)))
        step = [self._trial(batch) for _ in range(2)][1]
        left = self.steps_left
        n = self.total * self.epochs
        n_images = len(self.validation.images)
        early = [e for e in self._looks if self.state.epoch < e < self.epochs]
        seen = PASSES_OF_LOOK * (n_images + len(early) * min(EARLY, n_images))
        seconds = left * step + seen * seconds_per_pass(self.fast, self.validation.images)
        about = f"about {duration(seconds)}" if left else "a time that is not known"
        return (
            f"Training takes {left or n} steps in {self.epochs - self.state.epoch} epochs and"
            f" {about} on this device ({step:.2f} s per step). It starts from"
            f" {self.lax.head.words if self.lax.head else ''}."
        )

    @property
    def _looks(self) -> set[int]:
        """The epochs after which the validation images are looked at."""
        return {math.ceil(self.epochs * k / LOOKS) for k in range(1, LOOKS + 1)}

    def _trial(self, batch: Any) -> float:
        """The seconds of a step that changes nothing."""
        start = time.monotonic()
        self.start()
        loss = self.learn(batch, 0.0)["loss"]
        self.optimizer.zero_grad()
        float(loss.detach())  # a GPU is done now
        return time.monotonic() - start

    def learn(self, batch: Any, done: float) -> dict[str, Tensor]:
        """As any trainer, with gradients of a bounded norm."""
        numbers = super().learn(batch, done)
        self.fabric.clip_gradients(
            self.module,
            self.optimizer,
            max_norm=self.recipe.clip,
            error_if_nonfinite=False,  # the loss of the next look says so
        )
        return numbers

    def validate(self) -> dict[str, Any]:
        """Look at the level sets now and then; they decide the size alone, at the end."""
        epoch = self.state.epoch + 1
        self.better = True
        row: dict[str, Any] = {"kept": True, "steps": self.steps_done}
        if epoch in self._looks:
            found = self._look(last=epoch == self.epochs) if self.fabric.is_global_zero else {}
            row |= self.fabric.broadcast(found)
        self.state.best = weights_of(self.bare)
        self.state.made = surroundings(self.fabric.device, self.classifier.dtype)
        return row

    def _look(self, *, last: bool) -> dict[str, Any]:
        """What the validation images' level sets are worth; the last look chooses the sizes.

        Looks before it are for the history alone, at a few images: on a CPU they take longer than
        the steps between them.
        """
        some = slice(None if last else EARLY)
        images, targets = self.validation.images[some], self.validation.targets[some]
        drawn = orders(self.fast, self.lax, images, targets)
        found = level_sets(self.fast, images, targets, drawn)
        row: dict[str, Any] = row_of(found)
        if not last or self.lax.size_head is None:
            return row
        head, scores = choose_size(drawn, found.msi)
        row |= scores | {"predicts_size": head is not None}
        if head is not None:
            self.lax.size_head.load_state_dict(head.state_dict())
            row["mean_size"] = float(head(drawn).mean())
        return row

    def _sharpened(self, lax: Lax) -> Lax:
        """The adapter with what cuts its orders, by the last look."""
        looks = [row for row in self.state.history if "size" in row]
        last = looks[-1] if looks else {"size": lax.size}
        if self.recipe.size is not None:
            lax.one_size(self.recipe.size)
        elif not last.get("predicts_size"):
            lax.one_size(last["size"])
        else:
            lax.size = last["mean_size"]
        return lax.eval()


def seconds_per_pass(classifier: Classifier, images: Tensor) -> float:
    """How long a masked image takes, by the second of two looks at two images."""
    some = images[:2]
    targets = torch.zeros(len(some), dtype=torch.long, device="cpu")
    spent = 0.0
    for _ in range(2):
        start = time.monotonic()
        level_sets(classifier, some, targets, some.mean(1))
        spent = time.monotonic() - start
    return spent / (len(some) * PASSES_OF_LOOK)


@torch.no_grad()
def orders(classifier: Classifier, lax: Lax, images: Tensor, targets: Tensor) -> Tensor:
    """An adapter's orders of images for their targets: [N,h,w] on the CPU."""
    device, found = classifier.device, []
    for some, goals in zip(images.split(TOGETHER), targets.split(TOGETHER), strict=True):
        seen = lax.look(classifier, some.to(device))
        found.append(lax.draw(seen, goals.to(device)).float().cpu())
    return torch.cat(found)


def row_of(found: LevelSets) -> dict[str, float]:
    """The numbers of level sets for the history."""
    return {
        "insertion": float(found.insertion.mean()),
        "size": found.size,
        "msi": float(found.at_best.mean()),
    }


def mirrors_keep_classes(classifier: Classifier, images: Tensor) -> bool:
    """Whether most images keep their class when they are mirrored; digits do not."""
    plain_ones, mirrored = predictions(classifier, images), predictions(classifier, images.flip(3))
    return bool((plain_ones == mirrored).float().mean() >= MIRRORED)


def best_of(history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The row of the epoch whose weights are kept; where none says so, the highest worth."""
    rows = [row for row in history if row.get("kept")]
    return rows[-1] if rows else max(history, key=lambda row: (float(row["worth"]), row["epoch"]))


def loss_facts(loss: Loss) -> dict[str, str]:
    """What tells a loss of the user's from another: its name and a digest of its code."""
    name = getattr(loss, "__qualname__", type(loss).__qualname__)
    return {"name": name, "code": code_digest(loss)}
