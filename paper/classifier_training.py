"""Train a classifier with cross-entropy; a checkpoint per epoch, from which it resumes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from image_sets import Batches, ImageSet, as_seen
from sufficit import Classifier
from tables import ClassifierTraining

RISE = 0.2  # share of the training in which the learning rate rises
HISTORY = dict[str, float]  # of an epoch: loss and accuracy on the training images


@dataclass(frozen=True)
class Training:
    """What decides the trained weights, besides the images."""

    recipe: ClassifierTraining
    epochs: int
    lr: float
    seed: int

    def rate(self, done: float) -> float:
        """Return the learning rate after a share of the training: half a cosine up, half down."""
        if done < RISE:
            return self.lr * (0.04 + 0.48 * (1 - math.cos(math.pi * done / RISE)))
        return self.lr * 0.5 * (1 + math.cos(math.pi * (done - RISE) / (1 - RISE)))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW, or SGD with Nesterov momentum."""
        decay = self.recipe.weight_decay
        if self.recipe.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=decay)
        return torch.optim.SGD(
            model.parameters(), lr=self.lr, momentum=0.9, weight_decay=decay, nesterov=True
        )


def train_classifier(
    classifier: Classifier,
    batches: Batches,
    training: Training,
    checkpoint: Path,
    after_epoch: Callable[[], None] = lambda: None,
) -> list[HISTORY]:
    """Train the classifier's model in place; return loss and accuracy of every epoch.

    Call it again with the same arguments to resume after an interruption.
    """
    model = classifier.model
    optimizer = training.optimizer(model)
    history: list[HISTORY] = []
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device_of(model), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        history = state["history"]
    for epoch in range(len(history), training.epochs):
        # Each epoch has a seed of its own, so that a resumed training draws the same batches.
        torch.manual_seed(1_000_003 * training.seed + epoch)
        history.append(train_epoch(classifier, batches, training, optimizer, epoch))
        shown = ", ".join(f"{name} {value:.3f}" for name, value in history[-1].items())
        print(f"  epoch {epoch + 1} of {training.epochs}: {shown}", flush=True)
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "history": history,
        }
        part = checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(checkpoint)
        after_epoch()
    model.eval()
    return history


def train_epoch(
    classifier: Classifier,
    batches: Batches,
    training: Training,
    optimizer: torch.optim.Optimizer,
    epoch: int,
) -> HISTORY:
    """Train for one epoch."""
    model = classifier.model.train()
    device = device_of(model)
    sums = torch.zeros(3, device=device)  # loss, right answers, images
    for step, (images, labels) in enumerate(batches):
        if step and len(labels) < batches.batch_size:
            break  # batch norm needs more than the last few images
        rate = training.rate((epoch + step / len(batches)) / training.epochs)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(normalized(classifier, images))
        loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = (logits.detach().argmax(1) == labels).sum()
        sums += torch.stack([loss.detach() * len(labels), right, right.new_tensor(len(labels))])
    loss_sum, right_sum, n = sums.tolist()
    return {"loss": loss_sum / n, "accuracy": right_sum / n}


def normalized(classifier: Classifier, images: Tensor) -> Tensor:
    """Bring images from 0..1 to the classifier's mean and spread."""
    mean = images.new_tensor(classifier.mean)[:, None, None]
    std = images.new_tensor(classifier.std)[:, None, None]
    return (images - mean) / std


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's weights."""
    return next(model.parameters()).device


@torch.no_grad()
def accuracy(classifier: Classifier, images: ImageSet, side: int) -> float:
    """Return the share of images that the classifier gets right."""
    right = 0
    for rows in torch.arange(len(images)).split(500):
        some = images.only(rows).to(device_of(classifier.model))
        right += int((classifier(as_seen(some.pixels, side)).argmax(1) == some.labels).sum())
    return right / len(images)
