"""The second test of Adebayo et al. (2018): do heatmaps depend on the labels a model has learned?

    found = random_labels(classifier, images, labels, ["gradcam", "center"], epochs=50)

A copy with random weights is trained on labels that are permuted among the images. A method whose
maps for the copy rank the pixels as those for the model do is insensitive to the labels. The first
test, random weights layer by layer, is `sufficit.sanity_check`.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sufficit import Classifier, agreement, explain_all

RATE = 1e-3  # Adam's


@dataclass(frozen=True)
class RandomLabels:
    """How alike each method's maps are, and how well the copy learned."""

    rank_correlation: dict[str, float]  # by method, mean over images
    accuracy: float  # of the copy on the permuted labels
    chance: float  # share of the most frequent label

    @property
    def learned(self) -> bool:
        """Whether the copy is at least halfway from chance to 1: else the test says nothing."""
        return self.accuracy >= (1 + self.chance) / 2


def random_labels(
    classifier: Classifier,
    images: Tensor,
    labels: Tensor,
    methods: list[str],
    *,
    epochs: int = 30,
    batch_size: int = 32,
    seed: int = 0,
) -> RandomLabels:
    """Compare each method's maps for the model with those for a copy that learned random labels.

    The maps are for the classes that the model predicts. The model itself does not change.
    """
    student, permuted = trained_copy(classifier, images, labels, epochs, batch_size, seed)
    with torch.no_grad():
        targets = torch.cat([classifier(some).argmax(1).cpu() for some in images.split(64)])
        said = torch.cat([student(some).argmax(1).cpu() for some in images.split(64)])
    before, after = (
        explain_all(model, images, targets, methods, seed=seed) for model in (classifier, student)
    )
    alike = {
        name: float(agreement([before[name], after[name]]).rank_correlation.nanmean())
        for name in methods
    }
    accuracy = float((said == permuted).double().mean())
    return RandomLabels(alike, accuracy, float(permuted.bincount().max()) / len(permuted))


def trained_copy(
    classifier: Classifier,
    images: Tensor,
    labels: Tensor,
    epochs: int,
    batch_size: int,
    seed: int,
) -> tuple[Classifier, Tensor]:
    """A copy with random weights, trained on permuted labels; and these labels [N]."""
    generator = torch.Generator().manual_seed(seed)
    permuted = labels[torch.randperm(len(labels), generator=generator)].cpu()
    student = classifier.over(copy.deepcopy(classifier.bare)).to(dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        student.bare.apply(reset)
        student.bare.train()
        optimizer = torch.optim.Adam(student.bare.requires_grad_().parameters(), lr=RATE)
        for _ in range(epochs):
            order = torch.randperm(len(permuted), generator=generator)
            for rows in order.split(batch_size):
                if len(rows) < 2:
                    continue  # batch norm needs two
                logits = student.logits_of(student.normalize(images[rows]))
                optimizer.zero_grad()
                F.cross_entropy(logits, permuted[rows].to(logits.device)).backward()
                optimizer.step()
    student.bare.eval().zero_grad()
    return student.to(dtype=classifier.dtype), permuted


def reset(module: nn.Module) -> None:
    """Give a module new random weights, where it knows how."""
    again = getattr(module, "reset_parameters", None)
    if callable(again):
        again()
