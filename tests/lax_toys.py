"""A small classifier, images and a quick way to train an adapter on them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from small_models import Traces, mixed_modes
from sufficit import Classifier, Lax, train_lax
from sufficit.training import LaxRecipe

__all__ = [
    "QUICK",
    "Traces",
    "classifier_of",
    "data",
    "loader_of",
    "mixed_modes",
    "model",
    "small_net",
    "train",
    "weights",
]
QUICK = LaxRecipe(drop=1, donors=1, size=1, decide=1, fills=("black", "noise", "other"), epochs=3)


def model(seed: int = 0) -> nn.Module:
    """A net of random weights whose answers differ from image to image."""
    torch.manual_seed(seed)
    found = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, stride=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 9, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(9, 4),
    ).eval()
    with torch.no_grad():
        found[8].weight.mul_(30)
        found[8].bias.sub_(found((data()[0] - 0.5) / 0.25).mean(0))
    return found


def data(n: int = 24, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, 3, 8, 8, generator=generator), torch.arange(n) % 4


def loader_of(n: int = 24, batch: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data(n)), batch_size=batch, **{"shuffle": True} | options)


def classifier_of(seed: int = 0) -> Classifier:
    return Classifier(model(seed), layer="4", mean=(0.5,) * 3, std=(0.25,) * 3)


def train(loader: Any = None, classifier: Classifier | None = None, **options: Any) -> Lax:
    given = {"recipe": QUICK, "net": small_net(), "patience": None, "progress": False} | options
    loader = loader_of() if loader is None else loader
    return train_lax(classifier or classifier_of(), loader, **given)


def small_net() -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    net = nn.Sequential(nn.Conv2d(9, 8, 1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return net


def weights(lax: Lax) -> Tensor:
    return torch.cat([value.flatten() for value in lax.state_dict().values()])
