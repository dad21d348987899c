"""The requests that the endpoints accept and the answers that they return, each field once."""

from typing import Annotated, Literal

from fastapi import UploadFile
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer

from sufficit.errors import unknown
from sufficit.perturbation.fills import FILLS
from sufficit.perturbation.predictions import ScoreKind
from sufficit.runs.config import RunConfig


class Limits(BaseModel):
    """What a request may send, and how many requests the server holds."""

    model_config = ConfigDict(frozen=True)

    bytes: int = Field(default=10_000_000, description="Largest request.")
    pixels: int = Field(default=25_000_000, description="Largest image, before it is resized.")
    places: int = Field(default=17, description="Requests that run, wait or upload at once.")
    seconds: float = Field(default=30.0, description="Longest time for a request to arrive.")
    decode_seconds: float = Field(default=10.0, description="Longest time to decode an image.")


class Failure(BaseModel):
    """Why a request failed."""

    error: str = Field(description="What failed, what was expected, what to do.")


class Health(BaseModel):
    """The server runs, and this is its load."""

    status: Literal["ok"] = "ok"
    taken: int = Field(description="Requests that run, wait or upload now.")
    places: int = Field(description="Their limit; further requests get 503.")


AGNOSTIC = "Whether it draws the same map for every class."


class MethodFacts(BaseModel):
    """An explanation method."""

    name: str
    about: str
    usual: bool = Field(description="Whether it runs if the request names no methods.")
    class_agnostic: bool = Field(description=AGNOSTIC)


class ModelFacts(BaseModel):
    """The model, and what a request can ask for."""

    name: str
    classes: list[str] | None = Field(description="Null if the model does not name its classes.")
    n_classes: int
    height: int = Field(description="Of the model's input.")
    width: int
    channels: int
    device: str
    methods: list[MethodFacts]
    fills: list[str]
    value_step: float = Field(description="Default step of the curves.")
    limits: Limits


def _known_fill(name: str) -> str:
    if name not in FILLS:
        raise unknown("fill", name, FILLS)
    return name


Fill = Annotated[str, AfterValidator(_known_fill), Field(json_schema_extra={"enum": list(FILLS)})]
LEAST_STEP = RunConfig.value_step  # a smaller one would keep the server busy for too long
STEP_HELP = f"Step of the curves; the tables of the package use {LEAST_STEP:g}."


class ImageForm(BaseModel):
    """The fields of every request with an image."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    file: UploadFile = Field(description="The image.", json_schema_extra={"format": "binary"})
    target: str = Field(
        "", max_length=200, description="A class by number or name; empty: the model's prediction."
    )
    alpha_min: float = Field(
        float(RunConfig.alpha_min), ge=0, le=1, description="Pixels above it count as marked."
    )
    fill: Fill = Field(RunConfig.fills[0], description="Replaces hidden pixels.")
    value_step: float | None = Field(None, ge=LEAST_STEP, le=0.5, description=STEP_HELP)


class ExplainForm(ImageForm):
    """A request for heatmaps."""

    methods: list[str] = Field(
        [], max_length=20, description="One field per method; none: the usual ones."
    )


class ScoreForm(ImageForm):
    """A request for the scores of one method."""

    method: str = Field(max_length=200)
    score: ScoreKind = Field("accuracy", description="What a masked image scores.")


class ClassFacts(BaseModel):
    """A class and its probability for the whole image."""

    number: int
    name: str
    probability: float | None = Field(description="Null if the model returns NaN.")


class Heatmap(BaseModel):
    """The heatmap M of one method."""

    method: str
    class_agnostic: bool = Field(description=AGNOSTIC)
    map: str = Field(description="PNG as a data URL; M > grid[i] where a pixel is above i.")
    values: str = Field(description="PNG as a data URL; 255 M, rounded.")
    shares: list[float] = Field(description="Share of the pixels above each alpha of the grid.")
    mask_penalty: float = Field(description="Share of the pixels at or above alpha_min.")
    empty: bool = Field(description="Whether the heatmap is 0 everywhere.")


Alpha = Annotated[float, PlainSerializer(lambda alpha: round(alpha, 4), return_type=float)]


class ImageAnswer(BaseModel):
    """What every answer about an image says."""

    target: ClassFacts
    alpha_min: float
    value_step: float
    grid: list[Alpha] = Field(description="The alphas of the curves, with alpha_min among them.")
    start: int = Field(description="The index of alpha_min in the grid.")
    seconds: float = Field(default=0.0, description="Computing time.")


class Explained(ImageAnswer):
    """The model's input, its prediction and the heatmaps."""

    width: int
    height: int
    image: str = Field(description="The model's input, as a data URL.")
    fill: str = Field(description="What replaces hidden pixels: a colour or a data URL.")
    prediction: list[ClassFacts] = Field(description="The most likely classes, at most five.")
    maps: list[Heatmap]


class Curves(BaseModel):
    """The model's predictions along the grid, for the pixels kept, hidden and left.

    Numbers are probabilities of the target, null where they are not computed. Hits have one
    character per alpha: 1 if the target is predicted, else 0; ? if unknown. What is said is the
    predicted class if it is not the target.
    """

    kept: list[float | None] = Field(description="With only M > alpha visible.")
    hidden: list[float | None] = Field(description="With alpha_min < M <= alpha visible.")
    rest: list[float | None] = Field(description="With M <= alpha visible.")
    kept_hits: str
    hidden_hits: str
    rest_hits: str
    kept_said: list[int | None]
    hidden_said: list[int | None]
    rest_said: list[int | None]


class Scored(ImageAnswer):
    """The scores of one method on one image; null if the model returns NaN."""

    method: str
    score: str
    fill: str
    msi: float | None
    base_score: float | None
    mask_penalty: float | None
    insertion_pixel: float | None
    deletion_pixel: float | None
    curves: Curves
    classes: dict[int, str] = Field(description="Names of the classes in the curves.")
    calls: int = Field(description="Number of masked images that the model classified.")
