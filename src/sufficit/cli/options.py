"""Options that several commands share."""

from enum import StrEnum
from pathlib import Path
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


# The help of an option that commands share is written once, here.
MODEL = typer.Option(
    help="torchvision:NAME, timm:NAME, transformers:NAME, a saved classifier's folder, or your own"
    " python:FILE.py:FUNCTION."
)
DATA = typer.Option(
    help="Folder of images; class folders give labels. Or tar shards, as in 'web/{000..012}.tar'."
)
ModelOption = Annotated[str, MODEL]
ModelOrNoneOption = Annotated[str | None, MODEL]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
DevicesOption = Annotated[
    int, typer.Option(help="Share the images among so many GPUs, or processes.", min=1)
]
NodesOption = Annotated[
    int, typer.Option("--num-nodes", help="And among so many machines; see docs/scale.md.", min=1)
]
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
DataOption = Annotated[Path, DATA]
DataOrNoneOption = Annotated[Path | None, DATA]
OutOption = Annotated[Path, typer.Option("--out", help="Where results go.")]
MethodOption = Annotated[
    str,
    typer.Option(
        "--method",
        "-m",
        help="Methods by name, as in gradcam,layercam, or the folder of a trained LAX adapter.",
    ),
]
AlphaOption = Annotated[str, typer.Option(help="A number in 0..1, or search.")]
ScoreOption = Annotated[Score, typer.Option(help="What a masked image scores.")]
FillOption = Annotated[str, typer.Option(help="black, mean, blur, noise, or an image file.")]
HeldOutFillOption = Annotated[
    str | None, typer.Option(help="Score MSI with this fill as well; named as for --fill.")
]
TargetsOption = Annotated[Targets, typer.Option(help="auto: labels where there are any.")]
ValueStepOption = Annotated[float, typer.Option(help="Step of the pixel-value curves.")]
PercentStepOption = Annotated[float, typer.Option(help="Step of the percentage curves.")]
BatchOption = Annotated[int | None, typer.Option(help="Masked images a model call.", min=1)]
PrecisionOption = Annotated[Precision, typer.Option(help="Of weights and inputs.")]
OnErrorOption = Annotated[OnError, typer.Option(help="For unreadable images.")]
SeedOption = Annotated[int, typer.Option(help="Of all that is random.", min=0)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the summary as JSON only.")]
OverwriteOption = Annotated[bool, typer.Option(help="Replace an earlier run in --out.")]


def was_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line, and does not have its usual value by itself."""
    return getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
