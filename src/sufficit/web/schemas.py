"""What the endpoints take and give."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PICTURES = "image/png, image/jpeg, image/webp, image/gif, image/bmp, image/tiff"
Fill = Literal["black", "mean", "blur", "noise"]
Name = Field(max_length=200)


class Failure(BaseModel):
    """Why a request was not served."""

    error: str = Field(description="One sentence: what was wanted, what came, what to do.")


class Health(BaseModel):
    """That the server lives, and how busy it is."""

    status: Literal["ok"] = "ok"
    taken: int = Field(description="Requests that are worked on, wait or arrive.")
    places: int = Field(description="How many there may be; more are answered with 503.")


class MethodFacts(BaseModel):
    """An explanation method."""

    name: str
    about: str
    usual: bool = Field(description="Whether it is drawn where no methods are named.")


class LimitFacts(BaseModel):
    """What a request may bring."""

    bytes: int
    pixels: int
    places: int
    seconds: float


class ModelFacts(BaseModel):
    """The model, and what can be asked of it."""

    name: str
    classes: list[str] | None = Field(description="Null where the model names none.")
    n_classes: int
    height: int = Field(description="Of what the model sees.")
    width: int
    channels: int
    device: str
    methods: list[MethodFacts]
    fills: list[str]
    value_step: float = Field(description="The step of the curves where none is asked for.")
    limits: LimitFacts


class Settings(BaseModel):
    """What both forms hold."""

    model_config = ConfigDict(extra="forbid")

    target: str = Field(
        "", max_length=200, description="A class by number or name; empty: the model's prediction."
    )
    alpha_min: float = Field(0.5, ge=0, le=1, allow_inf_nan=False)
    fill: Fill = Field("black", description="What stands in for hidden pixels.")
    value_step: float | None = Field(
        None,
        ge=0.01,
        le=0.5,
        allow_inf_nan=False,
        description="Of the curves; the tables of the package have 0.01.",
    )


class ExplainForm(Settings):
    """Fields beside the file."""

    methods: list[str] = Field(
        [], max_length=20, description="Repeated, one a method; none: the usual ones."
    )


class ScoreForm(Settings):
    """Fields beside the file."""

    method: str = Field(max_length=200)
    score: Literal["accuracy", "confidence"] = "accuracy"


class ClassFacts(BaseModel):
    """A class, and how likely the model finds it on the whole image."""

    number: int
    name: str
    probability: float | None = Field(description="Null where the model says NaN.")


class Map(BaseModel):
    """A method's heatmap M."""

    method: str
    map: str = Field(description="PNG as a data address; M > grid[i] where a pixel is above i.")
    shares: list[float] = Field(description="Share of the pixels above each alpha of the grid.")
    mask_penalty: float = Field(description="Share of the pixels at or above alpha_min.")
    empty: bool = Field(description="Whether the method found nothing for the class.")


class Explained(BaseModel):
    """An image as the model sees it, what the model says of it, and the heatmaps."""

    width: int
    height: int
    image: str = Field(description="What the model sees, as a data address.")
    fill: str = Field(description="What stands in for hidden pixels: a colour or a data address.")
    prediction: list[ClassFacts] = Field(description="The likeliest classes, five at most.")
    target: ClassFacts
    alpha_min: float
    value_step: float
    grid: list[float] = Field(description="The alphas, alpha_min among them.")
    start: int = Field(description="Where in the grid alpha_min is.")
    maps: list[Map]
    seconds: float


class Curves(BaseModel):
    """The model's answers along the grid: probabilities of the target, and where it came first."""

    kept: list[float | None] = Field(description="With M > alpha alone; null: not asked.")
    hidden: list[float | None] = Field(description="With alpha_min < M <= alpha alone.")
    rest: list[float | None] = Field(description="With M <= alpha alone.")
    kept_hits: str = Field(description="A character an alpha: 1, 0, or ? for not asked.")
    hidden_hits: str
    rest_hits: str
    kept_said: list[int | None] = Field(
        description="The number of the class that came first, where it is not the target."
    )
    hidden_said: list[int | None]
    rest_said: list[int | None]


class Scored(BaseModel):
    """One method's scores on one image; null where the model said NaN."""

    method: str
    target: ClassFacts
    score: str
    fill: str
    alpha_min: float
    value_step: float
    grid: list[float]
    start: int
    msi: float | None
    base_score: float | None
    mask_penalty: float | None
    insertion_pixel: float | None
    deletion_pixel: float | None
    curves: Curves
    classes: dict[int, str] = Field(description="Names of the classes in the curves.")
    calls: int = Field(description="How often the model was asked.")
    seconds: float


def form_body(form: type[BaseModel], methods: list[str]) -> dict[str, Any]:
    """The form as OpenAPI describes a request's body, with the methods that there are."""
    schema = form.model_json_schema()
    fields = schema["properties"]
    named = fields["methods"]["items"] if "methods" in fields else fields["method"]
    named["enum"] = methods
    schema["properties"] = {"file": {"type": "string", "format": "binary"}, **fields}
    schema["required"] = ["file", *schema.get("required", [])]
    content = {"schema": schema, "encoding": {"file": {"contentType": PICTURES}}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": content}}}
