"""The paper's four tables and one for any image folder: data, network, training, printed numbers.

Imports no torch.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sufficit.errors import unknown

CNN_METHODS = ("gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam")
TITLES = {  # in the order of a table's rows
    "gradcam": "Grad-CAM",
    "gradcam++": "Grad-CAM++",
    "layercam": "Layer-CAM",
    "kpca-cam": "KPCA-CAM",
    "finer-cam": "Finer-CAM",
    "rollout": "Attention rollout",
    "lax-paper": "LAX, paper's recipe",
    "lax-robust": "LAX, robust recipe",
    "random": "random (control)",
    "center": "center (control)",
}


@dataclass(frozen=True)
class NetTraining:
    """How the classifier is trained; `fine_lr` is the rate from trained weights."""

    epochs: int
    batch_size: int
    lr: float
    fine_lr: float
    optimizer: Literal["sgd", "adamw"] = "sgd"
    weight_decay: float = 5e-4
    augment: bool = True


@dataclass(frozen=True)
class AdapterTraining:
    """The paper's recipe for this data, with fewer epochs."""

    entropy: float
    upsample: int
    epochs: int
    batch_size: int
    lr: float = 1e-3
    images: int | None = None  # per epoch; None: all
    augment: bool = True  # flips and crops, as for the classifier


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper."""

    title: str
    data: str
    model: str
    side: int  # of the model's input
    alpha_min: float
    training: NetTraining
    adapter: AdapterTraining
    quick_model: str = "small-net"
    quick_side: int = 64


TABLES: dict[str, PaperTable] = {
    "synthetic-mnist": PaperTable(
        "Synthetic MNIST, CNN",
        "synthetic-mnist",
        "resnet18",
        side=64,
        alpha_min=0.5,
        training=NetTraining(6, 512, lr=0.4, fine_lr=0.1, augment=False),
        adapter=AdapterTraining(entropy=5, upsample=1, epochs=6, batch_size=128, augment=False),
    ),
    "cub200": PaperTable(
        "CUB-200 (20 classes), CNN",
        "cub200",
        "resnet18",
        side=224,
        alpha_min=0.5,
        training=NetTraining(30, 32, lr=0.05, fine_lr=0.01, weight_decay=1e-4),
        adapter=AdapterTraining(entropy=5, upsample=1, epochs=80, batch_size=32, lr=1e-4),
    ),
    "cifar10": PaperTable(
        "CIFAR-10, CNN",
        "cifar10",
        "resnet18",
        side=32,
        alpha_min=0.4,
        training=NetTraining(24, 512, lr=0.4, fine_lr=0.1),
        adapter=AdapterTraining(entropy=2, upsample=2, epochs=10, batch_size=128),
        quick_side=32,
    ),
    "cifar10-vit": PaperTable(
        "CIFAR-10, ViT",
        "cifar10",
        "vit-b-16",
        side=224,
        alpha_min=0.5,
        training=NetTraining(3, 256, lr=1e-3, fine_lr=2e-4, optimizer="adamw", weight_decay=0.05),
        adapter=AdapterTraining(entropy=2, upsample=1, epochs=8, batch_size=64, images=10_000),
        quick_model="tiny-vit",
        quick_side=32,
    ),
    "folder": PaperTable(
        "An image folder, CNN",
        "folder",
        "resnet18",
        side=224,
        alpha_min=0.5,
        training=NetTraining(30, 32, lr=0.05, fine_lr=0.01, weight_decay=1e-4),
        adapter=AdapterTraining(entropy=5, upsample=1, epochs=20, batch_size=32),
    ),
}


def table_named(name: str) -> PaperTable:
    """A table by its name on the command line."""
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    return TABLES[name]


def printed_rows(table: str) -> dict[str, dict[str, float]]:
    """The numbers that the paper prints for a table: method -> column -> value; none for others."""
    content = tomllib.loads((Path(__file__).parent / "paper.toml").read_text())
    rows = content.get(table, {"rows": {}})["rows"]
    return {name: dict(zip(content["columns"], row, strict=True)) for name, row in rows.items()}


def printed_row(table: str, method: str) -> dict[str, float] | None:
    """The paper's row for one of our methods; its LAX is the recipe `paper`."""
    return printed_rows(table).get("lax" if method == "lax-paper" else method)
