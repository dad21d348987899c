"""All that decides a comparison, as flags and RUN.toml name it. Imports no torch."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sufficit.comparing.toml import as_toml
from sufficit.errors import UserError, unknown
from sufficit.files import writing

METHODS = ("gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam")
CONTROLS = ("random", "center")
LEAST = {"seed": 0, "donors": 1, "batch_size": 1, "num_classes": 2}
MOST = {"seed": 2**63 - 1, "donors": 10**6, "batch_size": 10**9, "num_classes": 10**7}
MOST_BYTES = 2**20  # of a RUN.toml


@dataclass(frozen=True)
class Settings:
    """A comparison: the model, the images, the methods, and how they are scored."""

    model: str
    data: str
    methods: tuple[str, ...] = METHODS
    lax: tuple[str, ...] = ()
    controls: bool = True
    targets: Literal["auto", "label", "prediction"] = "auto"
    alpha_min: float | Literal["search"] = 0.5
    score: Literal["accuracy", "confidence"] = "accuracy"
    fill: str = "black"
    held_out_fill: str | None = None
    value_step: float = 0.01
    percent_step: float = 0.02
    alpha_curve: bool = True
    leak: bool = True
    donors: int = 16
    layer: str | None = None
    size: str | None = None
    weights: str = "default"
    num_classes: int | None = None
    device: str = "auto"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    batch_size: int | None = None
    on_error: Literal["skip", "stop"] = "skip"
    save_heatmaps: bool = False
    seed: int = 0


def settings_from(values: Mapping[str, Any]) -> Settings:
    """Settings from plain values by name; what is left out has its default."""
    hints = get_type_hints(Settings)
    for name in values:
        if name not in hints:
            raise unknown("setting", name, hints)
    known = {name: fitting(name, value, hints[name]) for name, value in values.items()}
    for field in fields(Settings):
        if field.name not in known and field.default is MISSING:
            raise UserError(f"give --{field.name}, or {field.name} in a --config RUN.toml")
    return Settings(**known)


def read_run(path: Path) -> dict[str, Any]:
    """What a RUN.toml sets, each of it known and of the right kind."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "it is no file")
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"no settings at {path}: {error.strerror}") from error
    if len(text) > MOST_BYTES:
        raise UserError(f"{path} is no RUN.toml: it has more than {MOST_BYTES} bytes")
    try:
        content = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:  # of broken TOML, text or numbers
        raise UserError(f"{path} is not TOML: {error}") from error
    hints = get_type_hints(Settings)
    for name in content:
        if name not in hints:
            raise unknown(f"setting in {path.name}", name, hints)
    return {name: fitting(name, value, hints[name]) for name, value in content.items()}


def write_run(path: Path, settings: Settings) -> None:
    """Write the RUN.toml that repeats a run."""
    with writing(path) as part:
        part.write_text(as_toml(asdict(settings)), encoding="utf-8")


def fitting(name: str, value: Any, hint: Any) -> Any:
    """The value as its kind, or an error that names the kind."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if (found := _as(value, kind)) is not None:
            return _within(name, found)
    words = [word for kind in kinds for word in _words(kind)]
    if isinstance(value, str) and get_origin(hint) is Literal:
        raise unknown(name, value, words)
    raise UserError(f"{name} must be {' or '.join(words)}, got {_shown(value)}")


def _shown(value: Any) -> str:
    """A value in an error, however large or deep it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "what is too large to be shown"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _within(name: str, value: Any) -> Any:
    if name in LEAST and value < LEAST[name]:
        raise UserError(f"{name} must be {LEAST[name]} or more, got {value}")
    if name in MOST and value > MOST[name]:
        raise UserError(f"{name} must be {MOST[name]} or less, got {value:.3g}")
    return value


def _as(value: Any, kind: Any) -> Any:
    """The value as this kind, None where it is of another."""
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else None
    if get_origin(kind) is tuple:
        listed = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        return tuple(value) if listed else None
    if isinstance(value, bool) and kind is not bool:
        return None
    if isinstance(value, int) and abs(value) >= 2**64:
        return None
    if kind is float and isinstance(value, int):
        return float(value)
    return value if isinstance(value, kind) else None


def _words(kind: Any) -> tuple[str, ...]:
    """What a kind is called."""
    if get_origin(kind) is Literal:
        return tuple(get_args(kind))
    if get_origin(kind) is tuple:
        return ('a list of names, as in ["gradcam"]',)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return (names[kind],) if kind in names else ()
