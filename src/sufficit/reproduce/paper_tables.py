"""The tables of paper.toml: data, network, training, printed numbers. Imports no torch."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sufficit.declared import asked
from sufficit.errors import unknown

PAPER_CAMS = ("gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam")


@dataclass(frozen=True)
class NetTraining:
    """How the classifier is trained."""

    epochs: int
    batch_size: int
    lr: float
    fine_lr: float  # from trained weights
    optimizer: Literal["sgd", "adamw"] = "sgd"
    weight_decay: float = 5e-4
    augment: bool = True  # flips and crops


@dataclass(frozen=True)
class AdapterTraining:
    """How adapters are trained; lr, entropy and upsample are those of the recipe `paper`."""

    epochs: int
    batch_size: int
    lr: float
    entropy: float
    upsample: int = 1
    images: int | None = None  # per epoch; None: all
    augment: bool = True


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
    printed: Mapping[str, Mapping[str, float]]  # the paper's numbers: method -> column -> value
    quick_model: str = "small-net"
    quick_side: int = 64

    def printed_row(self, method: str) -> Mapping[str, float] | None:
        """The paper's numbers for a method; its LAX is the recipe `paper`."""
        return self.printed.get("lax" if method == "lax-paper" else method)


@dataclass(frozen=True)
class PlanOptions:
    """What can be asked of a table; where it is not, table, size and device decide."""

    images: int = asked("Test images to score; 2000 by default.", 2, 10**9)
    search_images: int = asked("Images to search alpha_min on; 500 by default.", 1, 10**6)
    train_images: int | None = asked("Training images; all by default.", 20, 10**9)
    test_images: int | None = asked("Test images to draw from; all by default.", 2, 10**9)
    seeds: int = asked("Adapters per recipe; 3 by default.", 0, 1000)
    recipes: tuple[str, ...] = asked(
        "Recipes of LAX: paper, robust, crisp; by default the first two."
    )
    epochs: int = asked("Epochs of the classifier.", 1, 10**6)
    lax_epochs: int = asked("Epochs of each adapter.", 1, 10**6)
    model: str = asked("Another architecture than the paper's.")
    weights: str = asked("Initial weights: default (ImageNet), none, or a .safetensors file.")
    classes: tuple[str, ...] = asked(
        "Classes of CUB-200, comma-separated; twenty drawn by the seed."
    )
    precision: str = asked("fp32 or bf16; bf16 on a GPU by default.")
    batch_size: int | None = asked("Masked images per forward pass.", 1, 10**9)
    seed: int = asked("Seed of everything random.", 0, 2**63 - 1001)
    step: float = asked("Step of the pixel-value curves, 0.01; the percentage curves have 2x.")


def _table(rows: Mapping[str, list[float]], **table: Any) -> PaperTable:
    table["training"] = NetTraining(**table["training"])
    table["adapter"] = AdapterTraining(**table["adapter"])
    printed = {method: dict(zip(COLUMNS, row, strict=True)) for method, row in rows.items()}
    return PaperTable(printed=printed, **table)


_FOUND: dict[str, Any] = tomllib.loads(Path(__file__).with_name("paper.toml").read_text())
COLUMNS: list[str] = _FOUND.pop("columns")  # of the paper's tables
TITLES: dict[str, str] = _FOUND.pop("titles")  # of the methods, in the order of a table's rows
TABLES = {name: _table(table.pop("rows", {}), **table) for name, table in _FOUND.items()}


def table_named(name: str) -> PaperTable:
    """A table by its name on the command line."""
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    return TABLES[name]
