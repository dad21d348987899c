"""Train a classifier with cross-entropy on whole images, with or without flips and crops."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sufficit.classifier.classifier import Classifier
from sufficit.data.splits import Split, seen
from sufficit.progress import Progress
from sufficit.training.feed import Shuffled, keeping_randomness, mixed_seed
from sufficit.training.trainer import Trainer

if TYPE_CHECKING:
    from lightning.fabric import Fabric


@dataclass(frozen=True)
class ClassifierRecipe:
    """How a classifier is trained: one cycle of the learning rate, up and down."""

    epochs: int = 10
    batch_size: int = 512
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.4
    weight_decay: float = 5e-4
    augment: bool = True  # flips and crops
    rise: float = 0.2  # share of the training in which the rate rises

    def rate(self, done: float) -> float:
        """The learning rate after a share `done` of the training: half a cosine up, half down.

        torch's OneCycleLR ends each half one step earlier, so its rates differ.
        """
        if done < self.rise:
            return self.lr * (0.04 + 0.96 * 0.5 * (1 - math.cos(math.pi * done / self.rise)))
        left = (done - self.rise) / (1 - self.rise)
        return self.lr * 0.5 * (1 + math.cos(math.pi * left))

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW, or SGD with Nesterov momentum."""
        weights, lr, decay = model.parameters(), self.lr, self.weight_decay
        if self.optimizer == "adamw":
            return torch.optim.AdamW(weights, lr=lr, weight_decay=decay)
        return torch.optim.SGD(weights, lr=lr, momentum=0.9, weight_decay=decay, nesterov=True)


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
    progress: bool | Progress | None = None,
) -> list[dict[str, float]]:
    """Train a model in place and return a row per epoch.

    `out` gets a checkpoint per epoch, from which the same call resumes.
    """
    settings = {"recipe": asdict(recipe), "seed": seed, "images": len(split)}
    on_gpu = fabric.device.type == "cuda"
    layout = torch.channels_last if on_gpu else torch.contiguous_format
    whole = Classifier(model.to(memory_format=layout), mean=mean, std=std)
    size, side = min(recipe.batch_size, len(split)), split.side
    total = len(split) // size  # a smaller last batch is dropped

    def batches(epoch: int) -> Sequence[Tensor]:
        torch.manual_seed(mixed_seed(seed, epoch, 0))
        order = torch.randperm(len(split)).to(split.labels.device)
        return order.split(size)[:total]  # type: ignore[no-any-return]  # torch has no type for it

    def step(rows: Tensor, done: float) -> dict[str, Tensor]:
        images, labels = split.images[rows], split.labels[rows]
        shown = seen(augmented(images, side) if recipe.augment else images, side)
        inputs = whole.normalize(shown).contiguous(memory_format=layout)
        logits = trainer.module(inputs).float()
        right = (logits.detach().argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(logits, labels), "accuracy": right}

    course: Any = {"total": total, "epochs": recipe.epochs, "rate": recipe.rate}
    course |= {"out": out, "settings": settings}
    trainer = Trainer(model, recipe.optimizer_of(model), fabric, batches, step, **course)
    with keeping_randomness():
        trainer.fit("training the classifier", progress)
    model.eval()
    return trainer.state.history


def augmented(images: Tensor, side: int) -> Tensor:
    """Images flipped and cropped at random: [N,3,h,w] bytes -> [N,3,s,s].

    An image larger than `side` is cropped within itself, another one is shifted over black by up to
    an eighth of its side.
    """
    n, _, h, _ = images.shape
    here = images.device  # random numbers from the CPU would make a GPU wait
    flip = torch.rand(n, device=here) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(3), images)
    kept = min(side, h)
    pad = 0 if h > side else max(1, h // 8)
    padded = F.pad(images, (pad,) * 4)
    room = h + 2 * pad - kept
    tops, lefts = (torch.randint(0, room + 1, (n, 1), device=here) for _ in range(2))
    line = torch.arange(kept, device=here)
    rows, columns = tops + line, lefts + line
    index = torch.arange(n, device=here)[:, None, None]
    taken = padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]]
    return taken.permute(0, 3, 1, 2)


def augmented_loader(split: Split, batch_size: int, limit: int | None = None) -> Shuffled:
    """Batches of randomly flipped and cropped images, as the classifier is trained on."""

    def take(rows: Tensor) -> tuple[Tensor, Tensor]:
        return seen(augmented(split.images[rows], split.side), split.side), split.labels[rows]

    return Shuffled(take, len(split), split.labels.device, batch_size, limit)


def accuracy(classifier: Classifier, split: Split, batch_size: int = 500) -> float:
    """Share of a split that the classifier gets right."""
    right = 0
    with torch.no_grad():
        for start in range(0, len(split), batch_size):
            images, labels = split.part(slice(start, start + batch_size))
            right += int((classifier(images).argmax(1) == labels).sum())
    return right / len(split)
