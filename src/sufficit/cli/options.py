"""Options that several commands share."""

from enum import StrEnum
from typing import Annotated

import typer


class Score(StrEnum):
    """What a masked image scores."""

    accuracy = "accuracy"
    confidence = "confidence"


class Precision(StrEnum):
    """The dtype of the model's weights and inputs."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Targets(StrEnum):
    """Which class an image is scored for."""

    auto = "auto"
    label = "label"
    prediction = "prediction"


class OnError(StrEnum):
    """What an image that can't be scored does."""

    skip = "skip"
    stop = "stop"


METHOD_HELP = "Methods by name, as in gradcam,layercam, or the folder of a trained LAX adapter."
ModelOption = Annotated[
    str,
    typer.Option(
        help="torchvision:NAME, timm:NAME, transformers:NAME, a saved classifier's folder, or your"
        " own python:FILE.py:FUNCTION."
    ),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
WeightsOption = Annotated[
    str,
    typer.Option(help="default (published), none (random), or a .safetensors, .pt or .pth file."),
]
ClassesOption = Annotated[
    int | None,
    typer.Option("--num-classes", help="Number of classes, for weights of your own.", min=2),
]
LayerOption = Annotated[
    str | None, typer.Option(help="Feature layer by name; found by itself for most models.")
]
SizeOption = Annotated[
    str | None, typer.Option(help="What the model sees: 224 or 224x320 (height x width).")
]
