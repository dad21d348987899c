"""The four tables of tables.toml: data, network, training, and the numbers as printed."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_FILE = tomllib.loads(Path(__file__).with_name("tables.toml").read_text())
COLUMNS: dict[str, str] = _FILE.pop("columns")  # column -> what a table calls it
PAPERS_NETWORKS: dict[str, str] = _FILE.pop("networks")
TITLES: dict[str, str] = _FILE.pop("titles")  # method -> what a table calls it, in order
CAMS = ("gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam")


@dataclass(frozen=True)
class ClassifierTraining:
    """How the classifier is trained: one cycle of the learning rate."""

    epochs: int
    batch_size: int
    lr: float
    fine_lr: float  # from trained weights
    optimizer: Literal["sgd", "adamw"] = "sgd"
    weight_decay: float = 5e-4
    augment: bool = True  # flips and crops


@dataclass(frozen=True)
class AdapterTraining:
    """How adapters are trained; `lr`, `entropy` and `upsample` are those of the recipe `paper`."""

    epochs: int
    batch_size: int
    lr: float
    entropy: float
    upsample: int = 1
    images: int | None = None  # per epoch; None: all
    augment: bool = True


@dataclass(frozen=True)
class StandIn:
    """A network whose first weights are in a file, or random."""

    network: str
    weights: str = "none"


@dataclass(frozen=True)
class Table:
    """One table of the paper."""

    title: str
    data: str
    network: str
    side: int  # of the network's input
    alpha_min: float
    training: ClassifierTraining
    adapter: AdapterTraining
    printed: Mapping[str, Mapping[str, float]]  # the paper's numbers: method -> column -> value
    stand_in: StandIn
    step: float = 0.01  # of the pixel-value curves
    quick_network: str = "small-net"
    quick_side: int = 64

    def printed_row(self, method: str) -> Mapping[str, float] | None:
        """Return the paper's numbers for a method; its LAX is the recipe `paper`."""
        return self.printed.get("lax" if method == "lax-paper" else method)


def read_table(given: dict[str, Any]) -> Table:
    """Make a table of its section in the file."""
    training = ClassifierTraining(**given.pop("training"))
    adapter = AdapterTraining(**given.pop("adapter"))
    stand_in = StandIn(**given.pop("stand_in"))
    rows = given.pop("rows")
    printed = {method: dict(zip(COLUMNS, row, strict=True)) for method, row in rows.items()}
    return Table(training=training, adapter=adapter, printed=printed, stand_in=stand_in, **given)


TABLES = {name: read_table(section) for name, section in _FILE.items()}
