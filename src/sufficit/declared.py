"""Options as fields, each declared once: flags, files and Python read it here. Imports no torch."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from sufficit.training.recipes import LaxRecipe, OrderRecipe


def option(
    default: Any,
    text: str,
    *flags: str,
    least: float | None = None,
    most: float | None = None,
    panel: str | None = None,
    shown: str = "all",
    **more: Any,
) -> Any:
    """A field with what the command line says of it and the bounds of its value.

    The flag is --NAME, unless `flags` are given; `kind` is its type, if not that of the field.
    `shown` says where: by --help (first), by --help-all (all), or in a RUN.toml alone (toml).
    """
    about = {
        "help": text,
        "flags": flags,
        "least": least,
        "most": most,
        "panel": panel,
        "shown": shown,
    }
    return field(default=default, metadata=about | more)


@dataclass(frozen=True)
class ReadingOptions:
    """How the images of a folder are read, and what every training has."""

    batch_size: int = option(32, "Images per step and process.", least=1)
    patience: int | Literal["auto"] | None = option(
        "auto",
        "Epochs without improvement that end training; default: as many as 750 steps take, but at"
        " least 5; 0: no limit.",
        least=0,
        kind=int | None,
    )
    validation_share: float = option(
        0.1, "Share of images held out for validation; at most 256 images."
    )
    workers: int = option(0, "Workers that read images.", least=0)
    overwrite: bool = option(False, "Start again in --out.")
    image_column: str | None = None  # of parquet files
    label_column: str | None = None
    on_error: Literal["skip", "stop"] = "skip"
    seed: int = 0
    progress: bool | None = None


@dataclass(frozen=True)
class FolderOptions(ReadingOptions):
    """How to train an adapter on a folder: the options of `train_lax`, and how files are read."""

    batch_size: int | None = option(  # type: ignore[assignment]  # None: by recipe and device
        None,
        "Images per step and process. Default: 192 with robust on a GPU, else 32.",
        least=1,
    )
    recipe: "str | LaxRecipe | OrderRecipe" = option(  # noqa: RUF009  # a field
        "robust",
        "robust, crisp, paper or l1.",
        kind=str,
    )
    target: Literal["auto", "label", "prediction"] = option(
        "auto", "Same as --targets.", hidden=True
    )
    epochs: int | None = option(
        None,
        "Default: 400 steps with robust, else 1,500, but at least the epochs of the recipe.",
        least=1,
    )
    area: float | None = option(
        None, "Share of the image that heatmaps mark, such as 0.1; by default found."
    )
    alpha_min: float | None = option(None, "Value above which a heatmap marks; default 0.5.")
    class_free: bool = option(
        False,
        "Draw one map per image, whichever class is asked for; not with robust.",
        "--class-free",
    )
    layers: tuple[str, ...] | None = option(
        None, "Layers to read, as A,B,C, the coarsest last; else found."
    )
    deterministic: bool = option(
        False, "Same adapter twice on a GPU; 15 % slower.", "--deterministic"
    )
    cache: bool = option(
        False,
        "Compute features once; keeps all images in memory; not with robust.",
        "--cache-features",
    )


@dataclass(frozen=True)
class TwinOptions(ReadingOptions):
    """How to train a twin on a folder: the options of `train_twin`, and how files are read."""

    target: Literal["model", "label"] = option(
        "model", "What it learns: the model's probabilities for whole images, or labels."
    )
    epochs: int = option(5, "Number of epochs.", least=1)
    lr: float = option(3e-4, "Learning rate.")


@dataclass(frozen=True)
class Processes:
    """Where a training runs."""

    devices: int = option(1, "Number of GPUs, or of CPU processes.", least=1)
    num_nodes: int = option(1, "Number of machines.", least=1)
    precision: Literal["fp32", "bf16"] = option(
        "fp32", "bf16 is mixed precision: weights stay fp32."
    )
