"""The paper's four tables, and the same for any image folder: data, model, training, scoring.

Imports no torch.
"""

from dataclasses import dataclass
from typing import Literal

from sufficit.errors import unknown

CNN_METHODS = ("gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam")
VIT_METHODS = (*CNN_METHODS, "rollout")


@dataclass(frozen=True)
class Training:
    """How the classifier is trained; a smaller rate where it begins from trained weights."""

    epochs: int
    batch_size: int
    lr: float
    fine_lr: float
    optimizer: Literal["sgd", "adamw"] = "sgd"
    weight_decay: float = 5e-4
    augment: bool = True


@dataclass(frozen=True)
class Adapter:
    """What the paper's recipe is on this data, made short, and how long adapters learn."""

    entropy: float
    upsample: int
    epochs: int
    batch_size: int
    lr: float = 1e-3
    images: int | None = None  # of an epoch, all by default
    augment: bool = True  # flips and crops, as the classifier had them


@dataclass(frozen=True)
class Table:
    """One table of the paper."""

    title: str
    data: str
    model: str
    side: int  # of what the model sees
    alpha_min: float
    training: Training
    adapter: Adapter
    methods: tuple[str, ...] = CNN_METHODS
    quick_model: str = "small-net"
    quick_side: int = 64


TABLES: dict[str, Table] = {
    "synthetic-mnist": Table(
        "Synthetic MNIST, CNN",
        "synthetic-mnist",
        "resnet18",
        side=64,
        alpha_min=0.5,
        training=Training(6, 512, lr=0.4, fine_lr=0.1, augment=False),
        adapter=Adapter(entropy=5, upsample=1, epochs=6, batch_size=128, augment=False),
    ),
    "cub200": Table(
        "CUB-200 (20 classes), CNN",
        "cub200",
        "resnet18",
        side=224,
        alpha_min=0.5,
        training=Training(30, 32, lr=0.05, fine_lr=0.01, weight_decay=1e-4),
        adapter=Adapter(entropy=5, upsample=1, epochs=80, batch_size=32, lr=1e-4),
    ),
    "cifar10": Table(
        "CIFAR-10, CNN",
        "cifar10",
        "resnet18",
        side=32,
        alpha_min=0.4,
        training=Training(24, 512, lr=0.4, fine_lr=0.1),
        adapter=Adapter(entropy=2, upsample=2, epochs=10, batch_size=128),
        quick_side=32,
    ),
    "cifar10-vit": Table(
        "CIFAR-10, ViT",
        "cifar10",
        "vit-b-16",
        side=224,
        alpha_min=0.5,
        training=Training(3, 256, lr=1e-3, fine_lr=2e-4, optimizer="adamw", weight_decay=0.05),
        adapter=Adapter(entropy=2, upsample=1, epochs=8, batch_size=64, images=10_000),
        methods=VIT_METHODS,
        quick_model="tiny-vit",
        quick_side=32,
    ),
    "folder": Table(
        "An image folder, CNN",
        "folder",
        "resnet18",
        side=224,
        alpha_min=0.5,
        training=Training(30, 32, lr=0.05, fine_lr=0.01, weight_decay=1e-4),
        adapter=Adapter(entropy=5, upsample=1, epochs=20, batch_size=32),
    ),
}


def table_of(name: str) -> Table:
    """A table by its name."""
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    return TABLES[name]
