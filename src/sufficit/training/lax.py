"""`train_lax`: a classifier and images in, an adapter that explains it out."""

import copy
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn

from sufficit.classifier.classifier import Classifier, check_classifier
from sufficit.classifier.fingerprint import digest
from sufficit.errors import NotFiniteError as NoNumbersError
from sufficit.errors import UserError
from sufficit.explainers.lax import CONFIG, WEIGHTS, Lax
from sufficit.files import CHECKPOINT
from sufficit.progress import Progress, Tick, bar
from sufficit.results import surroundings
from sufficit.training.feeding import (
    Feed,
    Loader,
    Target,
    feed_of,
    first_images,
    keeping_randomness,
    mixed_seed,
)
from sufficit.training.recipes import LaxRecipe, recipe_of
from sufficit.training.runs import State, best_of, open_run, save_run, weights_of
from sufficit.training.steps import take_step
from sufficit.training.telling import NotFiniteError, Told
from sufficit.training.validation import Examination, examination_of

if TYPE_CHECKING:
    from lightning.fabric import Fabric

VALIDATION_IMAGES = 256
PATIENCE = 5


class TrainingError(UserError):
    """Training stopped; `lax` is the last good adapter, if there is one."""

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
    validation: Loader | None = None,
    validation_images: int = VALIDATION_IMAGES,
    net: nn.Module | None = None,
    alpha_min: float | None = None,
    patience: int | None = PATIENCE,
    overwrite: bool = False,
    fabric: "Fabric | None" = None,
    about: Mapping[str, Any] | None = None,
    progress: bool | Progress | None = None,
) -> Lax:
    """Train an adapter that draws the classifier's heatmap in its own forward pass.

    `loader` gives batches of (images in 0..1, labels), or images alone with target="prediction". It
    is run through once an epoch; the first `validation_images` of `validation`, or of `loader` if
    there is none, decide which epoch was best. `out` holds a checkpoint of every epoch and the best
    adapter: the same call goes on where it was stopped. `area` is what the mean of a heatmap should
    be. `patience` is how many epochs without progress end the training, None for all epochs
    whatever comes; `net` takes the place of the convnet. `fabric` brings several devices or
    bfloat16. `about` is kept with the adapter, and as the other settings must be the same for a run
    to be gone on with. The classifier is the same after as before.
    """
    check_classifier(classifier)
    chosen = recipe_of(recipe, epochs, area, alpha_min)
    fabric = fabric or one_device(classifier)
    out = None if out is None else Path(out)
    _check_counts(patience, validation_images, seed)
    with _recording(), keeping_randomness(), _lent(classifier, fabric):
        feed = feed_of(classifier, loader, target, seed, fabric)
        exam = _exam(classifier, feed, validation, validation_images)
        lax = _new(classifier, exam.images, chosen, net, seed)
        settings = _settings(chosen, feed, exam, lax, fabric, dict(about or {}))
        run = _Run(classifier, feed, exam, chosen, lax, fabric, out, settings)
        first = fabric.is_global_zero
        run.resume(fabric.broadcast(open_run(out, settings, overwrite) if first else None))
        with bar("training", progress if fabric.is_global_zero else False) as tick:
            while not run.over(patience):
                run.epoch(tick)
        run.keep()
        return run.result()


def _check_counts(patience: int | None, validation_images: int, seed: int) -> None:
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UserError(f"seed must be a whole number, 0 or more, got {seed!r}")
    if patience is not None and patience < 1:
        raise UserError(f"patience must be 1 epoch or more, or None for no end, got {patience}")
    if validation_images < 2:
        raise UserError(f"validation_images must be 2 or more, got {validation_images}")


@contextmanager
def _recording() -> Iterator[None]:
    """Gradients are recorded inside, whatever the caller has turned off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def one_device(classifier: Classifier) -> "Fabric":
    """Fabric on the classifier's own device."""
    from lightning.fabric import Fabric

    device = classifier.device
    devices = [device.index or 0] if device.type == "cuda" else 1
    return Fabric(accelerator=device.type, devices=devices)


@contextmanager
def _lent(classifier: Classifier, fabric: "Fabric") -> Iterator[None]:
    """The classifier frozen, in eval mode and on this process's device; afterwards as before."""
    device = classifier.device
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    learning = [p for p in classifier.model.parameters() if p.requires_grad]
    try:
        if fabric.device != device:
            classifier.to(fabric.device)
        for parameter in learning:
            parameter.requires_grad_(False)
        with classifier.in_eval_mode():
            yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
        classifier.to(device)
        if current is not None:
            torch.cuda.set_device(current)


def _exam(
    classifier: Classifier, feed: Feed, validation: Loader | None, images: int
) -> Examination:
    source = feed if validation is None else Feed(classifier, validation, feed.target, feed.seed)
    return examination_of(classifier, *first_images(source, images))


def _new(
    classifier: Classifier, images: Tensor, recipe: LaxRecipe, net: nn.Module | None, seed: int
) -> Lax:
    """An adapter that has learned nothing yet, for the classifier's features."""
    with torch.no_grad():
        features, _ = classifier.features(images[:2])
    _, channels, h, w = features.shape
    if h * w < 2:
        raise UserError(
            f"the features of layer {classifier.layer!r} are {h} x {w}: there is no place to draw"
            " on; give Classifier an earlier layer"
        )
    torch.manual_seed(seed)
    own = copy.deepcopy(net)  # the caller's stays as it is
    lax = Lax(channels, upsample=recipe.upsample, bias=recipe.bias, net=own)
    lax.belong_to(classifier, str(classifier.layer))
    return lax


def _settings(
    recipe: LaxRecipe,
    feed: Feed,
    exam: Examination,
    lax: Lax,
    fabric: "Fabric",
    about: dict[str, Any],
) -> dict[str, Any]:
    """What must be the same for a run to be gone on with."""
    return {
        "recipe": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(recipe).items()},
        "target": feed.target,
        "seed": feed.seed,
        "batches": len(feed),
        "processes": fabric.world_size,
        "about": about,
        "validation": digest(exam.images),
        "adapter": {k: v for k, v in lax.config.items() if k != "trained"},
    }


def _in_words(error: Exception) -> Exception:
    if isinstance(error, NotFiniteError):
        return error
    if isinstance(error, NoNumbersError):
        return UserError(
            "the adapter, or the classifier under its masks, gives NaN after an epoch's last batch:"
            " look at its images, or lower the learning rate"
        )
    return UserError("out of memory: give a loader with smaller batches")


@contextmanager
def _fitting(out: Path | None) -> Iterator[None]:
    """Say in words where a checkpoint is not of this run."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"the {CHECKPOINT} in {out} does not fit ({' '.join(str(error).split())[:200]}): remove"
            " it, or begin anew with overwrite"
        ) from error


@dataclass
class _Run:
    """One training run in this process."""

    classifier: Classifier
    feed: Feed
    exam: Examination
    recipe: LaxRecipe
    lax: Lax
    fabric: "Fabric"
    out: Path | None
    settings: dict[str, Any]

    def resume(self, saved: dict[str, Any] | None) -> None:
        """Begin, or go on from what an earlier start saved."""
        self.state = State(**saved["state"]) if saved else State()
        if saved:
            with _fitting(self.out):
                self.lax.load_state_dict(self.state.best or saved["lax"])
                self.lax.load_state_dict(saved["lax"])
        self.lax.train()
        optimizer = torch.optim.Adam(self.lax.parameters(), lr=self.recipe.lr)
        self.module, self.optimizer = self.fabric.setup(self.lax, optimizer)
        if saved:
            with _fitting(self.out):
                self.optimizer.load_state_dict(saved["optimizer"])

    def over(self, patience: int | None) -> bool:
        """Whether all epochs are done, or nothing has become better for too long."""
        tired = patience is not None and self.state.stale >= patience
        return self.state.epoch >= self.recipe.epochs or tired

    def epoch(self, tick: Tick | None) -> None:
        """Train for an epoch, judge the adapter, keep it if it is the best, save."""
        begun = time.monotonic()
        try:
            means = self._train(tick)
            report = self.fabric.broadcast(self._judge())
        except (NotFiniteError, NoNumbersError, torch.OutOfMemoryError) as error:
            raise self.stopped(_in_words(error)) from error
        if math.isnan(report.worth):
            raise self.stopped(
                UserError("the classifier answers NaN for hidden images: no adapter can be judged")
            )
        state = self.state
        state.epoch += 1
        state.stale = 0 if report.worth > state.best_worth else state.stale + 1
        better = report.worth >= state.best_worth  # of equals the one that has learned longer
        row = {"epoch": state.epoch, **means, **report.plain(), "worth": report.worth}
        state.history.append(row | {"seconds": time.monotonic() - begun})
        if better:
            state.best_worth, state.best = report.worth, weights_of(self.lax)
            state.made = surroundings(self.fabric.device, self.classifier.dtype)
        self._save(better)

    def _judge(self) -> Any:
        """The first process judges for all."""
        if not self.fabric.is_global_zero:
            return None
        self.lax.eval()
        try:
            return self.exam.report(self.classifier, self.lax, self.recipe.alpha_min)
        finally:
            self.lax.train()

    def _train(self, tick: Tick | None) -> dict[str, float]:
        epoch, total = self.state.epoch, len(self.feed)
        seed = mixed_seed(self.feed.seed, epoch, self.fabric.global_rank)
        generator = Generator(self.fabric.device).manual_seed(seed)
        told = Told(epoch, total, self.recipe.epochs, tick)
        for number, batch in enumerate(self.feed.batches(epoch)):
            done = (epoch + (number / total if total else 0)) / self.recipe.epochs
            self._set_rate(done)
            with self.fabric.autocast():
                step = take_step(self.classifier, self.module, batch, self.recipe, generator, done)
            self.optimizer.zero_grad()
            self.fabric.backward(step.loss)
            self.optimizer.step()
            told.add(step)
        return told.means()

    def _set_rate(self, done: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(done)

    def _save(self, better: bool) -> None:
        self.keep(better)
        if self.fabric.is_global_zero:
            save_run(self.out, self.settings, self.state, self.lax, self.optimizer)
        self.fabric.barrier()

    def keep(self, better: bool = False) -> None:
        """Write the best adapter where it is a new one, or where its folder has lost it."""
        if self.out is not None and self.fabric.is_global_zero:
            lost = not all((self.out / name).exists() for name in (WEIGHTS, CONFIG))
            if better or lost:
                self.result().save_pretrained(self.out)
        self.fabric.barrier()

    def result(self) -> Lax:
        """The best adapter so far, with the story of its training."""
        best = copy.deepcopy(self.lax)
        best.load_state_dict(self.state.best or {})
        keys = ("recipe", "target", "seed", "batches", "processes", "about")
        best.trained = {key: self.settings[key] for key in keys}
        best.trained |= {**self.state.made, "history": list(self.state.history)}
        return best.to(self.fabric.device).eval()

    def stopped(self, reason: Exception) -> TrainingError:
        """An error that says what is left of the run."""
        kept = "no epoch was finished"
        error = TrainingError(str(reason))
        if self.state.best is not None:
            error.lax = self.result()
            epoch = best_of(self.state.history)["epoch"]
            kept = f"the adapter of epoch {epoch} is kept " + (
                f"in {self.out}" if self.out else "in this error's .lax"
            )
        error.args = (f"{reason}; {kept}",)
        return error
