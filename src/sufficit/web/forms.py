"""What requests hold, and how much of it."""

from dataclasses import dataclass

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field

from sufficit.perturbation.predictions import ScoreKind
from sufficit.runs.config import RunConfig

LEAST_STEP = RunConfig.value_step  # a smaller one would keep the server busy for too long


@dataclass(frozen=True)
class Limits:
    """What a request may send; `sufficit serve` has the same defaults, in cli/serve.py."""

    bytes: int = 10_000_000
    pixels: int = 25_000_000  # of the image, before it is resized


class ImageForm(BaseModel):
    """The fields of every request with an image."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    file: UploadFile = Field(description="The image.", json_schema_extra={"format": "binary"})
    target: str = Field(
        "", max_length=200, description="A class by number or name; empty: the model's prediction."
    )


class CurveForm(ImageForm):
    """A request for what depends on a threshold and a fill."""

    alpha_min: float = Field(
        float(RunConfig.alpha_min), ge=0, le=1, description="Pixels above it count as marked."
    )
    fill: str = Field(RunConfig.fills[0], description="Replaces hidden pixels.")
    value_step: float | None = Field(
        None,
        ge=LEAST_STEP,
        le=0.5,
        description=f"Step of the curves; the tables of the package use {LEAST_STEP:g}.",
    )


class ExplainForm(CurveForm):
    """A request for heatmaps."""

    methods: list[str] = Field(
        [], max_length=20, description="One field per method; none: the usual ones."
    )


class ScoreForm(CurveForm):
    """A request for the scores of one method."""

    method: str = Field(max_length=200)
    score: ScoreKind = Field("accuracy", description="What a masked image scores.")


class RegionForm(ImageForm):
    """A request for the region that is enough, or for what the model says at one size."""

    method: str = Field(max_length=200)
    size: float | None = Field(
        None, gt=0, le=1, description="Share of the image; none: the model is asked for it."
    )
