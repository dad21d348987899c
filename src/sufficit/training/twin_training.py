"""`train_twin`: a copy of a classifier that is used to hidden pixels, to score explanations with.

It is tuned on images under random masks and never sees an explanation. It trains in eval mode:
batch norms keep the statistics of the original (their scale and shift learn) and dropout is off, so
that whole and masked images, in training and afterwards, go through one and the same function.
"""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from sufficit.classifier.checkpoint import DESCRIPTION, check_saving
from sufficit.classifier.classifier import Classifier, check_has_classes, check_range
from sufficit.classifier.fingerprint import digest, fingerprint
from sufficit.declared import TwinOptions
from sufficit.errors import UserError
from sufficit.files import check_output, place
from sufficit.perturbation.bands import ranks
from sufficit.progress import Progress
from sufficit.provenance import plain, provenance, save_json
from sufficit.training.feed import Feed, Loader, feed_of, keeping_randomness, mixed_seed
from sufficit.training.lax_training import best_of
from sufficit.training.processes import fabric_for, frozen
from sufficit.training.recipes import one_cycle, random_fills
from sufficit.training.trainer import LossError, Patience, Trainer

if TYPE_CHECKING:
    from lightning.fabric import Fabric

TwinTarget = Literal["model", "label"]
EPOCHS, LR = TwinOptions.epochs, TwinOptions.lr
WHOLE = 0.25  # share of the images that stay whole
GRIDS = (3, 5, 9, 17)  # cells per side of random maps; one map in five is noise, pixel by pixel
VIEWS = 4  # random masks per validation image
FROM_ITSELF = ("black", "colour")  # not its own blur: the twin would learn to read through it
FROM_ANOTHER = ("colour", "noise", "blurred", "other")
RUN = "run.json"


def train_twin(
    classifier: Classifier,
    loader: Loader,
    *,
    target: TwinTarget = "model",
    epochs: int = EPOCHS,
    lr: float = LR,
    seed: int = 0,
    out: str | Path | None = None,
    validation: Loader | None = None,
    validation_images: int = 256,
    patience: Patience = "auto",
    overwrite: bool = False,
    fabric: "Fabric | None" = None,
    about: Mapping[str, Any] | None = None,
    progress: bool | Progress | None = None,
) -> Classifier:
    """Tune a copy of the classifier on images under random masks; the classifier does not change.

    - `classifier`: the original.
    - `loader`: batches of (images in 0..1, labels), or of images; it starts again at each epoch.
    - `target`: "model": the original's probabilities for the whole image; "label": the label.
    - `epochs`, `lr`: epochs at most, and the learning rate.
    - `seed`: of the masks and of everything else that is random.
    - `out`: a folder for a checkpoint per epoch, the twin as `Classifier.load` takes it, and
      run.json with the accuracy of both. The same call resumes an interrupted run.
    - `validation`: a loader of the images that select the epoch; by default those of `loader`.
    - `validation_images`: how many of them, from the first on.
    - `patience`: epochs without improvement that end the training; None for no limit.
    - `overwrite`: delete what an earlier training left in `out`.
    - `fabric`: a lightning Fabric for several devices or bfloat16.
    - `about`: settings that are stored, and must be the same on resume.
    - `progress`: a bar; by default when the work takes long in a terminal.
    """
    check_has_classes(classifier)
    _check(target, epochs, lr, seed, validation_images)
    folder = None if out is None else place(out)
    if folder is not None:
        check_saving(classifier)
    fabric = fabric or fabric_for(classifier.device)
    home = classifier.device
    grad = torch.enable_grad()  # also if the caller has turned gradients off
    with torch.inference_mode(False), grad, keeping_randomness(), frozen(classifier, fabric):
        feed = feed_of(classifier, loader, target, seed, fabric)
        source = feed if validation is None else Feed(classifier, validation, target, seed)
        checks = TwinValidation.of(
            classifier, *source.first_images(validation_images), target, seed
        )
        if folder is not None and fabric.is_global_zero:
            check_output(folder)
        trainer = TwinTrainer(
            feed,
            checks,
            epochs,
            lr,
            fabric,
            about or {},
            out=folder,
            overwrite=overwrite,
            patience=patience,
        )
        trainer.fit("training the twin", progress)
        trainer.keep(last=True)
        twin = trainer.result()
    return twin.to(home, classifier.dtype)


def _check(target: str, epochs: int, lr: float, seed: int, validation_images: int) -> None:
    if target not in ("model", "label"):
        raise UserError(f'target must be "model" or "label", got {target!r}: give one of them')
    for name, value, least in (
        ("epochs", epochs, 1), ("seed", seed, 0), ("validation_images", validation_images, 2)
    ):  # fmt: skip
        if not isinstance(value, int) or not least <= value < 2**63:
            raise UserError(f"{name} must be a whole number, {least} or more, got {value!r}")
    if not 0 < lr < math.inf:
        raise UserError(f"lr must be a number above 0, got {lr!r}: the default is {LR}")


def copied(classifier: Classifier) -> Classifier:
    """A copy that shares nothing with the classifier: float32, in eval mode, all weights free."""
    with torch.inference_mode(False):
        model = copy.deepcopy(classifier.bare).float().eval()
    model.zero_grad(set_to_none=True)
    for weights in model.parameters():
        weights.requires_grad_(True)
    return classifier.over(model)


def random_masks(images: Tensor, generator: Generator) -> Tensor:
    """Bands of random maps that are kept: [N,C,H,W] -> bool [N,H,W].

    A map is noise on a grid of some size, enlarged to blobs, or in each pixel. A band keeps the
    pixels up to a random rank, those from a random rank on, or those between two. A quarter of the
    images stay whole.
    """
    (n, _, h, w), device = images.shape, images.device

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    maps = torch.empty(n, h, w, device=device)
    order = torch.randperm(n, generator=generator, device=device)
    for cells, some in zip((*GRIDS, None), order.tensor_split(len(GRIDS) + 1), strict=True):
        if len(some):
            grid = rand(len(some), 1, cells or h, cells or w)
            maps[some] = F.interpolate(grid, size=(h, w), mode="bilinear", align_corners=True)[:, 0]
    first, second = rand(2, n)
    kind = torch.randint(0, 3, (n,), generator=generator, device=device)
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    low = torch.where(kind == 0, 0.0, torch.where(kind == 1, first, low))  # 0: up to a rank
    high = torch.where(kind == 0, first, torch.where(kind == 1, 1.0, high))  # 1: from a rank on
    whole = rand(n) < WHOLE
    shares = ranks(maps) / (h * w)
    masks = (shares >= low[:, None, None]) & (shares < high[:, None, None])
    return masks | whole[:, None, None]


def random_views(images: Tensor, generator: Generator) -> Tensor:
    """Images under random masks, hidden pixels filled at random: [N,C,H,W] -> [N,C,H,W].

    Fills: black; the image's own mean colour; another image of the batch, blurred, its mean colour,
    its pixels in random order; uniform noise. None tells more of the hidden pixels than their mean.
    """
    n, device = len(images), images.device
    # The image before one rolled back is the image itself.
    itself = random_fills(images.roll(-1, 0), FROM_ITSELF, generator)
    another = random_fills(images, FROM_ANOTHER, generator)
    uniform = torch.rand(images.shape, generator=generator, device=device)
    kind = torch.randint(0, 5, (n, 1, 1, 1), generator=generator, device=device)
    fills = torch.where(kind < 2, itself, torch.where(kind < 4, another, uniform))
    return torch.where(random_masks(images, generator)[:, None], images, fills)


@dataclass(frozen=True)
class TwinValidation:
    """Validation images, whole and under fixed random masks."""

    images: Tensor  # [N,C,H,W]
    views: Tensor  # [VN,C,H,W]
    goals: Tensor  # [N,C]
    targets: Tensor  # [N] labels, or the original's predictions
    labelled: bool

    @classmethod
    def of(
        cls, classifier: Classifier, images: Tensor, labels: Tensor | None, target: str, seed: int
    ) -> "TwinValidation":
        """The views are drawn by the seed."""
        generator = Generator().manual_seed(mixed_seed(seed, -1, 1))
        views = torch.cat([random_views(images, generator) for _ in range(VIEWS)])
        goals = _logits(classifier, images).softmax(1)
        if labels is not None:
            check_range(labels, goals.shape[1])
        targets = goals.argmax(1) if labels is None else labels
        if target == "label":
            goals = F.one_hot(targets, goals.shape[1]).float()
        return cls(images, views, goals, targets, labels is not None)

    def score(self, classifier: Classifier) -> dict[str, float]:
        """Accuracy on whole and masked images, and the loss over all of them."""
        logits = _logits(classifier, torch.cat([self.images, self.views]))
        right = (logits.argmax(1) == self.targets.repeat(1 + VIEWS)).double()
        whole, masked = right.split([len(self.images), len(self.views)])
        return {
            "whole_accuracy": whole.mean().item(),
            "masked_accuracy": masked.mean().item(),
            "validation_loss": F.cross_entropy(logits, self.goals.repeat(1 + VIEWS, 1)).item(),
        }


def _logits(classifier: Classifier, images: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([classifier(some).float().cpu() for some in images.split(64)])


class TwinTrainer(Trainer):
    """Tunes a copy of the feed's classifier and keeps that of the best epoch."""

    # The options of `train_twin` that only a trainer needs.
    def __init__(
        self,
        feed: Feed,
        validation: TwinValidation,
        epochs: int,
        lr: float,
        fabric: "Fabric",
        about: Mapping[str, Any],
        *,
        out: Path | None,
        overwrite: bool,
        patience: Patience,
    ) -> None:
        self.feed, self.validation, self.original = feed, validation, feed.classifier
        self.twin = twin = copied(self.original)
        if fabric.device.type == "cuda":
            twin.to(memory_format=torch.channels_last)
        facts = {
            "target": feed.target,
            "seed": feed.seed,
            "epochs": epochs,
            "lr": lr,
            "whole": WHOLE,
            "batches": len(feed),
            "processes": fabric.world_size,
            "about": about,
            "twin_of": fingerprint(self.original),
        }
        self.facts = plain(facts)
        self.before = validation.score(self.original)
        settings = self.facts | {"validation": digest(validation.images, validation.targets)}
        super().__init__(
            twin.model,
            torch.optim.Adam(twin.model.parameters(), lr=lr),
            fabric,
            self._batches,
            self._step,
            total=len(feed),
            epochs=epochs,
            rate=lambda done: lr * one_cycle(done),
            out=out,
            settings=settings,
            overwrite=overwrite,
            patience=patience,
        )
        self.shown = twin.over(self.module)

    def start(self) -> None:
        """In eval mode: see the module's docstring."""
        self.module.eval()

    def _batches(self, epoch: int) -> Iterable[tuple[Tensor, Tensor | None]]:
        seed = mixed_seed(self.feed.seed, epoch, self.fabric.global_rank)
        self._generator = Generator(self.fabric.device).manual_seed(seed)
        return self.feed.pairs(epoch)

    def _step(self, batch: tuple[Tensor, Tensor | None], done: float) -> dict[str, Tensor]:
        images, labels = batch
        with torch.no_grad():
            goals = self.original(images).float().softmax(1)
        if self.feed.target == "label" and labels is not None:
            goals = F.one_hot(labels, goals.shape[1]).float()
        inputs = self.twin.normalize(random_views(images, self._generator))
        inputs = inputs.contiguous(memory_format=self.twin.memory_format)
        logits = self.shown.logits_of(inputs).float()
        right = (logits.detach().argmax(1) == goals.argmax(1)).float().mean()
        return {"loss": F.cross_entropy(logits, goals), "accuracy": right}

    def validate(self) -> dict[str, Any]:
        """The twin's accuracy on whole and masked images; the first process computes it."""
        row: dict[str, Any] = {}
        if self.fabric.is_global_zero:
            row = self.validation.score(self.twin)
            row["worth"] = -row["validation_loss"]
        row = self.fabric.broadcast(row)
        if not math.isfinite(row["worth"]):
            raise LossError("the twin gives NaN after an epoch: lower the learning rate")
        self.select(row["worth"], self.original.dtype)
        return row

    def keep(self, *, last: bool = False) -> None:
        """Write the best twin to `out` if it is new or not there; at the end run.json."""
        if self.out is not None and self.fabric.is_global_zero:
            if (self.better and not last) or not (self.out / DESCRIPTION).exists():
                self.result().save(self.out)
            if last:
                save_json(self.out / RUN, self.record())
        self.fabric.barrier()

    def record(self) -> dict[str, Any]:
        """What is known of the twin: settings, accuracies, history, provenance."""
        best = best_of(self.state.history)
        known = provenance(self.facts, self.fabric.device, self.original.dtype)
        kind = "labels" if self.validation.labelled else "the original's predictions"
        return known | {
            **self.state.made,
            "best_epoch": best["epoch"],
            "n_validated_on": len(self.validation.images),
            "accuracy_of": kind,
            "original": self.before,
            "twin": {name: best[name] for name in self.before},
            "twin_of": self.facts["twin_of"],
            "history": list(self.state.history),
        }

    def result(self) -> Classifier:
        """The twin of the best epoch, in eval mode."""
        best = copied(self.twin)
        best.model.load_state_dict(self.state.best or {})
        return best
