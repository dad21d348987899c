"""Train a classifier plainly: cross-entropy on whole pictures, with flips and crops or without."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sufficit.classifier.classifier import Classifier, constant
from sufficit.data.splits import Split, seen
from sufficit.errors import UserError
from sufficit.files import CHECKPOINT, make_folder, writing
from sufficit.progress import Progress, Tick, bar
from sufficit.training.feeding import keeping_randomness, mixed_seed
from sufficit.training.loaders import Shuffled

if TYPE_CHECKING:
    from lightning.fabric import Fabric

SHIFT = 8  # pictures without room move by up to an eighth of their side, over two


@dataclass(frozen=True)
class ClassifierRecipe:
    """How a classifier learns: one cycle of the learning rate, up and down again."""

    epochs: int = 10
    batch_size: int = 512
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.4
    weight_decay: float = 5e-4
    augment: bool = True  # flips and crops
    rise: float = 0.2  # share of the training in which the rate goes up

    def rate(self, done: float) -> float:
        """The learning rate when a share of the training is done: half a cosine up, half down."""
        if done < self.rise:
            return self.lr * (0.04 + 0.96 * 0.5 * (1 - math.cos(math.pi * done / self.rise)))
        left = (done - self.rise) / (1 - self.rise)
        return self.lr * 0.5 * (1 + math.cos(math.pi * left))


@dataclass
class _State:
    """How far a training is."""

    epoch: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


def train_classifier(
    model: nn.Module,
    split: Split,
    recipe: ClassifierRecipe,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    fabric: "Fabric",
    out: Path,
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
    progress: bool | Progress | None = None,
) -> list[dict[str, float]]:
    """Train a model in place; `out` keeps a checkpoint of every epoch, from which the same call
    goes on. Returns a row an epoch.
    """
    settings = {"recipe": asdict(recipe), "seed": seed, "images": len(split), **(about or {})}
    on_gpu = fabric.device.type == "cuda"
    model.to(memory_format=torch.channels_last if on_gpu else torch.contiguous_format)
    optimizer = _optimizer(model, recipe)
    wrapped, optimizer = fabric.setup(model, optimizer)
    state = _resume(out / CHECKPOINT, settings, model, optimizer)
    run = _Run(wrapped, optimizer, split, recipe, mean, std, fabric, seed)
    with keeping_randomness(), bar("training the classifier", progress) as tick:
        while state.epoch < recipe.epochs:
            state.history.append(run.epoch(state.epoch, tick))
            state.epoch += 1
            _save(out / CHECKPOINT, settings, model, optimizer, state)
    model.eval()
    return state.history


@dataclass(frozen=True)
class _Run:
    module: Any
    optimizer: Any
    split: Split
    recipe: ClassifierRecipe
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fabric: "Fabric"
    seed: int

    def epoch(self, number: int, tick: Tick | None) -> dict[str, float]:
        """Once through the pictures, in an order that seed and epoch alone decide."""
        begun, recipe, n = time.monotonic(), self.recipe, len(self.split)
        torch.manual_seed(mixed_seed(self.seed, number, 0))
        size = min(recipe.batch_size, n)
        batches = torch.randperm(n).to(self.split.labels.device).split(size)
        batches = batches[:-1] if len(batches[-1]) < size else batches
        self.module.train()
        losses, right = [], []
        for k, rows in enumerate(batches):
            done = (number + k / len(batches)) / recipe.epochs
            for group in self.optimizer.param_groups:
                group["lr"] = recipe.rate(done)
            loss, hits = self._step(rows)
            losses.append(loss)
            right.append(hits)
            if tick:
                tick(number * len(batches) + k + 1, recipe.epochs * len(batches))
        mean = torch.stack(losses).mean().item()
        if not math.isfinite(mean):
            raise UserError(f"the classifier's loss became {mean} in epoch {number + 1}: lower lr")
        accuracy = torch.stack(right).mean().item()
        seconds = time.monotonic() - begun
        return {"epoch": number + 1, "loss": mean, "accuracy": accuracy, "seconds": seconds}

    def _step(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """One step on some pictures: its loss, and the share that was right."""
        images, labels = self.split.images[rows], self.split.labels[rows]
        side = self.split.side
        shown = seen(augmented(images, side) if self.recipe.augment else images, side)
        mean, std = (constant(v, shown.device, shown.dtype) for v in (self.mean, self.std))
        inputs = (shown - mean) / std
        if inputs.is_cuda:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        logits = self.module(inputs)
        loss = F.cross_entropy(logits.float(), labels)
        self.optimizer.zero_grad()
        self.fabric.backward(loss)
        self.optimizer.step()
        return loss.detach(), (logits.detach().argmax(1) == labels).float().mean()


def augmented(images: Tensor, side: int) -> Tensor:
    """Flipped by chance, and cropped at a place drawn by chance: [N,3,h,w] bytes.

    A picture with room around what is seen is cropped from it; another one is moved, over black.
    """
    n, _, h, _ = images.shape
    here = images.device  # where all is drawn: a GPU would wait for what is brought to it
    flip = torch.rand(n, device=here) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(3), images)
    kept = min(side, h)
    pad = 0 if h > side else max(1, h // SHIFT)
    padded = F.pad(images, (pad,) * 4)
    room = h + 2 * pad - kept
    tops, lefts = (torch.randint(0, room + 1, (n, 1), device=here) for _ in range(2))
    line = torch.arange(kept, device=here)
    rows, columns = tops + line, lefts + line
    index = torch.arange(n, device=here)[:, None, None]
    taken = padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]]
    return taken.permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Augmented(Shuffled):
    """The same pictures as a classifier is trained on: flipped and cropped anew each time."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        side = self.split.side
        for rows in self._rows():
            yield seen(augmented(self.split.images[rows], side), side), self.split.labels[rows]


def accuracy(classifier: Classifier, split: Split, batch_size: int = 500) -> float:
    """Share of a split that the classifier gets right."""
    right = 0
    with torch.no_grad():
        for start in range(0, len(split), batch_size):
            images, labels = split.part(slice(start, start + batch_size))
            right += int((classifier(images).argmax(1) == labels).sum())
    return right / len(split)


def _optimizer(model: nn.Module, recipe: ClassifierRecipe) -> torch.optim.Optimizer:
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    return torch.optim.SGD(
        model.parameters(),
        lr=recipe.lr,
        momentum=0.9,
        weight_decay=recipe.weight_decay,
        nesterov=True,
    )


def _resume(path: Path, settings: dict[str, Any], model: nn.Module, optimizer: Any) -> _State:
    """Put back what an earlier start of the same training left, if there is any."""
    if not path.exists():
        return _State()
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        before = dict(saved["settings"])
        state = _State(**saved["state"])
        if len(state.history) != state.epoch:
            raise ValueError(f"{len(state.history)} epochs are told of {state.epoch}")
    except Exception as error:
        raise UserError(f"{path} can't be read ({error}): remove it to begin anew") from error
    if before != settings:
        differing = [k for k in {**before, **settings} if before.get(k) != settings.get(k)]
        raise UserError(
            f"{path.parent} holds a training with another {differing[0]}"
            f" ({before.get(differing[0])}, now {settings.get(differing[0])}): choose another --out"
        )
    try:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    except Exception as error:
        raise UserError(f"{path} does not fit ({error}): remove it to begin anew") from error
    return state


def _save(
    path: Path, settings: dict[str, Any], model: nn.Module, optimizer: Any, state: _State
) -> None:
    content = {
        "settings": settings,
        "model": {name: value.detach().cpu() for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "state": vars(state),
    }
    make_folder(path.parent)
    with writing(path) as part:
        written = BytesIO()
        torch.save(content, written)
        part.write_bytes(written.getvalue())
