"""The one training loop: epochs, batches, learning rate, checkpoints."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from sufficit.classifier.checkpoint import load_tensors
from sufficit.errors import UserError, cannot_resume
from sufficit.files import CHECKPOINT, make_folder, writing
from sufficit.lock import locked
from sufficit.loggers import log_numbers
from sufficit.progress import Progress, Tick, bar
from sufficit.provenance import resume_command, surroundings

if TYPE_CHECKING:
    from lightning.fabric import Fabric

EVERY = 20  # steps between two looks at the loss: a look makes a GPU wait
Patience = int | Literal["auto"] | None
PATIENCE, STALE_STEPS = 5, 750  # epochs and steps without a better epoch that "auto" allows


class LossError(UserError):
    """A loss is NaN or infinite; the message names the batch."""


@dataclass
class TrainingState:
    """What a checkpoint holds besides weights."""

    epoch: int = 0  # finished epochs
    history: list[dict[str, Any]] = field(default_factory=list)  # a row per epoch
    stale: int = 0  # epochs since the best one
    best_worth: float = float("-inf")
    best_values: Tensor | None = None  # per validation image, of the epoch with that worth
    best: dict[str, Tensor] | None = None  # weights of the epoch that is kept
    made: dict[str, Any] = field(default_factory=dict)  # where and with what the best was made


class Trainer:
    """Trains a module in place on `batches(epoch)` by the loss that `step(batch, done)` returns.

    `step` returns "loss", with its gradient, and other numbers to average; `done` is the finished
    share of the training. `total` is the number of batches per epoch, 0 if unknown. With `out` each
    epoch writes a checkpoint, from which the same settings resume. `patience` is how many epochs
    without a better one end the training; "auto" is as many as 750 steps take, but at least 5.
    Every process calls the same methods; the first one writes.
    """

    # It serves LAX and twins: what they do differently comes in as arguments.
    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        fabric: "Fabric",
        batches: Callable[[int], Iterable[Any]],
        step: Callable[[Any, float], dict[str, Tensor]],
        *,
        total: int,
        epochs: int,
        rate: Callable[[float], float],
        out: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        patience: Patience = None,
    ) -> None:
        if patience == "auto":
            patience = max(PATIENCE, math.ceil(STALE_STEPS / total) if total else 0)
        if patience is not None and (not isinstance(patience, int) or patience < 1):
            raise UserError(
                "patience must be 1 epoch or more, None for no limit, or auto, got"
                f" {patience!r}: leave it out for auto"
            )
        self.bare, self.fabric, self.batches, self.step = module, fabric, batches, step
        self.total, self.epochs, self.rate, self.patience = total, epochs, rate, patience
        self.better = False  # whether the weights of the last epoch are kept
        self.out, self.settings, self.state = out, dict(settings or {}), TrainingState()
        saved = None
        if fabric.is_global_zero and out is not None and not overwrite:
            saved = read_checkpoint(out, self.settings)
        saved = fabric.broadcast(saved)
        self.module, self.optimizer = fabric.setup(module, optimizer)
        if saved:
            state = TrainingState(**saved["state"])
            with _in_words(f"The {CHECKPOINT} in {out} does not fit"):
                for weights in (state.best, saved["model"]):
                    if weights is not None:
                        module.load_state_dict(weights)
                self.optimizer.load_state_dict(saved["optimizer"])
            self.state = state

    def start(self) -> None:
        """Called before each epoch."""
        self.module.train()

    def learn(self, batch: Any, done: float) -> dict[str, Tensor]:
        """The numbers of a step, whose gradients are in the weights afterwards."""
        with self.fabric.autocast():
            numbers = self.step(batch, done)
        self.fabric.backward(numbers["loss"])
        return numbers

    def validate(self) -> dict[str, Any]:
        """Numbers of the module after an epoch, for the history."""
        return {}

    def keep(self) -> None:
        """Called after each epoch, before the checkpoint is written."""

    def select(self, worth: float, dtype: torch.dtype, values: Tensor | None = None) -> None:
        """Note what an epoch is worth, and keep the weights of the best, of equals the later.

        With `values`, one per validation image, epochs are equal within a standard error of their
        mean difference: a high learning rate and a few images make some early epoch look best.
        """
        state, error = self.state, 0.0
        state.stale = 0 if worth > state.best_worth else state.stale + 1
        if values is not None and state.best_values is not None:
            apart = values - state.best_values
            apart = apart[apart.isfinite()]  # NaN has no score
            error = float(apart.std()) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
        self.better = worth >= state.best_worth - error
        if worth >= state.best_worth:
            state.best_worth, state.best_values = worth, values
        if self.better:
            state.best, state.made = weights_of(self.bare), surroundings(self.fabric.device, dtype)

    def over(self) -> bool:
        """Whether all epochs are done, or `patience` epochs brought no improvement."""
        stale = self.patience is not None and self.state.stale >= self.patience
        return self.state.epoch >= self.epochs or stale

    def fit(self, title: str, progress: bool | Progress | None = None) -> None:
        """Train until it is over."""
        for row in self.state.history:  # of an earlier run
            self.log(row)
        # Of several processes, the one that starts the others owns the folder.
        alone = self.out if self.fabric.world_size == 1 else None
        owned = nullcontext() if alone is None else locked(alone)
        try:
            with owned, bar(title, progress if self.fabric.is_global_zero else False) as tick:
                while not self.over():
                    self.run_epoch(tick)
        except torch.OutOfMemoryError as error:
            raise UserError("Out of memory: use smaller batches") from error

    def log(self, row: Mapping[str, Any]) -> None:
        """Send an epoch's numbers to the Fabric's logger, if it has one."""
        for logger in self.fabric.loggers if self.fabric.is_global_zero else ():
            log_numbers(logger, row, row["epoch"])

    def run_epoch(self, tick: Tick | None) -> None:
        """Train for one epoch, validate, save."""
        start = time.monotonic()
        self.start()
        row = {"epoch": self.state.epoch + 1, **self._train(tick), **self.validate()}
        self.state.epoch += 1
        self.state.history.append(row | {"seconds": time.monotonic() - start})
        self.log(self.state.history[-1])
        self.keep()
        if self.out is not None and self.fabric.is_global_zero:
            content = {
                "settings": self.settings,
                "state": vars(self.state),
                "model": weights_of(self.bare),
                "optimizer": self.optimizer.state_dict(),
                "course": {"epochs": self.epochs, "is_over": self.over()},
                "command": resume_command(),
            }
            # Not Fabric.save: its temporary folder may be on another disk, so a killed process
            # leaves half a copy. Not torch.save to a file: it hides that a disk is full.
            written = BytesIO()
            torch.save(content, written)
            with writing(make_folder(self.out) / CHECKPOINT) as part:
                part.write_bytes(written.getvalue())
        self.fabric.barrier()

    def _train(self, tick: Tick | None) -> dict[str, float]:
        epoch, total = self.state.epoch, self.total
        means = EpochMeans(epoch, total)
        for number, batch in enumerate(self.batches(epoch)):
            done = (epoch + (number / total if total else 0)) / self.epochs
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(done)
            self.optimizer.zero_grad()
            numbers = self.learn(batch, done)
            self.optimizer.step()
            means.add(numbers)
            if tick:
                whole = total or number + 1
                tick(epoch * whole + number + 1, self.epochs * whole, means.note)
        return means.mean()


class EpochMeans:
    """The means of an epoch's numbers; raises LossError for a loss that is not finite.

    Numbers stay on the device for some steps. torchmetrics.MeanMetric can't name the bad batch.
    """

    def __init__(self, epoch: int, total: int) -> None:
        self.epoch, self.total, self.note = epoch, total, ""
        self._names: list[str] = []
        self._waiting: list[Tensor] = []  # each [numbers]
        self._seen: list[list[float]] = []  # a row per step

    def add(self, numbers: Mapping[str, Tensor]) -> None:
        """Add the numbers of one step."""
        self._names = list(numbers)
        self._waiting.append(torch.stack([value.detach().float() for value in numbers.values()]))
        if len(self._waiting) >= EVERY:
            self._look()

    def mean(self) -> dict[str, float]:
        """The mean of each number; nothing if there was no step."""
        if self._waiting:
            self._look()
        return dict(zip(self._names, map(fmean, zip(*self._seen, strict=True)), strict=True))

    def _look(self) -> None:
        for row in torch.stack(self._waiting).tolist():
            self._seen.append(row)
            loss = row[self._names.index("loss")]
            if not math.isfinite(loss):
                batch = f"{len(self._seen)}" + (f" of {self.total}" if self.total else "")
                raise LossError(
                    f"the loss became {loss:g} in epoch {self.epoch + 1}, batch {batch}: check its"
                    " images, the precision and the learning rate"
                )
        self._waiting.clear()
        last = zip(self._names, self._seen[-1], strict=True)
        self.note = ", ".join(f"{name} {value:.2f}" for name, value in last)


def read_checkpoint(out: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The checkpoint in a folder, or None; raise unless it has the same settings.

    Only tensors and plain values are read, so an untrusted file runs no code.
    """
    path = out / CHECKPOINT
    if not path.exists():
        return None
    with _in_words(f"Cannot read {path}"):
        saved: dict[str, Any] = load_tensors(path)
        before, state = dict(saved["settings"]), TrainingState(**saved["state"])
        epochs = [row["epoch"] for row in state.history]
        if len(epochs) != state.epoch or epochs != [*range(1, len(epochs) + 1)]:
            raise ValueError(f"{len(epochs)} rows for {state.epoch} epochs")
        worths = [float(row["worth"]) for row in state.history if "worth" in row]
        if state.stale < 0 or (worths and state.best is None):
            raise ValueError("its best epoch is missing")
        float(state.best_worth)
    _check_same(out, before, settings)
    return saved


def read_progress(out: Path) -> dict[str, Any]:
    """How far the training in a folder is, by its checkpoint, and the command that resumes it."""
    with _in_words(f"Cannot read {out / CHECKPOINT}"):
        saved = load_tensors(out / CHECKPOINT)
        done = int(saved["state"]["epoch"])
        course = dict(saved["course"])
    return {"done": done, **course, "command": saved["command"]}


def _check_same(out: Path, before: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> None:
    """Raise for the first setting that differs; `at` is the name of what holds these settings."""
    for key in sorted({**before, **now}, key=lambda key: key != "loss"):  # the version first
        known, value = before.get(key), now.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            _check_same(out, known, value, f"{at}{key}.")
        elif known != value and key == "loss":  # no setting of the user's
            raise UserError(
                f"Cannot resume {out}: another version of Sufficit started it, with other formulas."
                " Use another --out for a new training, or --overwrite to delete this one."
            )
        elif known != value:
            raise cannot_resume(out, f"{at}{key}", known, value)


@contextmanager
def _in_words(failure: str) -> Iterator[None]:
    """Any error inside becomes a UserError that names the remedy."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        words = f"{failure} ({reason}): remove it, or start again with overwrite"
        raise UserError(words) from error


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's weights, on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
