"""The page and the list of endpoints as HTML, and the picture to begin with."""

import io
from collections import Counter
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from torchvision.transforms.v2.functional import to_pil_image

from sufficit.data.digits import synthetic_digits
from sufficit.perturbation.fills import FILLS
from sufficit.report.html import asset, environment, look_and_feel
from sufficit.report.viewer_data import script_safe
from sufficit.web.limits import Limits
from sufficit.web.studio import Studio
from sufficit.web.uploads import NAMES, check_picture, decode

HOME = "sufficit.web"
STEPS = (0.01, 0.02, 0.05, 0.1)
EXAMPLE_SEED = 20  # a digit on which methods differ


@dataclass(frozen=True)
class Page:
    """HTML, and what it may load and run."""

    text: str
    policy: str


def page(studio: Studio, limits: Limits) -> Page:
    """The page of a model."""
    feel, options = look_and_feel(HOME), _options(studio)
    limit = {"bytes": limits.bytes, "megabytes": limits.megabytes}
    numbers = {option: number for number, option in enumerate(options)}
    text = _template("page.html").render(
        studio=studio,
        limits=limits,
        kinds=NAMES,
        fills=list(FILLS),
        steps=sorted({*STEPS, studio.value_step}),
        options=options,
        data=Markup(script_safe(limit | {"targets": numbers})),
        more=Markup(asset("live.css", HOME)),
        **feel,
    )
    policy = (
        "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; connect-src 'self';"
        f" script-src 'sha256-{feel['script_digest']}'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
    return Page(text, policy)


def endpoints(schema: dict[str, Any]) -> Page:
    """What the schema says, for people."""
    feel = look_and_feel(HOME)
    listed = [
        (f"{verb.upper()} {path}", entry["description"], _fields(entry), _answers(entry))
        for path, verbs in schema["paths"].items()
        for verb, entry in verbs.items()
    ]
    text = _template("endpoints.html").render(
        listed=listed,
        parts=schema["components"]["schemas"],
        about=schema["info"]["description"],
        style=feel["style"],
        dark=feel["dark"],
    )
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; frame-ancestors 'none'"
    return Page(text, policy)


def _fields(entry: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """(name, what it is, what may be chosen) of the fields of a form."""
    if "requestBody" not in entry:
        return []
    form = entry["requestBody"]["content"]["multipart/form-data"]["schema"]
    found = []
    for name, field in form["properties"].items():
        told = [field.get("description", "")]
        told += ["Required."] if name in form["required"] else []
        told += [f"Default {field['default']}."] if field.get("default") else []
        found.append((name, " ".join(told), field.get("items", field).get("enum", [])))
    return found


def _answers(entry: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(status, what it means, the name of what it holds) of the answers of an endpoint."""
    found = []
    for status, answer in entry["responses"].items():
        holds = answer.get("content", {}).get("application/json", {}).get("schema", {})
        found.append((status, answer["description"], holds.get("$ref", "").rpartition("/")[2]))
    return found


def _template(name: str) -> Any:
    return environment(HOME).get_template(name)


def _options(studio: Studio) -> list[str]:
    """The classes as they can be chosen, each in words of its own."""
    names = [studio.class_name(number) for number in range(studio.n_classes)]
    count = Counter(names)
    return [f"{name} ({i})" if count[name] > 1 else name for i, name in enumerate(names)]


def example_picture(seed: int = EXAMPLE_SEED) -> bytes:
    """A digit in noise, as the package makes them, as PNG."""
    file = io.BytesIO()
    to_pil_image(synthetic_digits(1, seed=seed).images[0]).save(file, "png")
    return file.getvalue()


def as_png(content: bytes, limits: Limits) -> bytes:
    """Any picture within the limits as PNG, at its own size."""
    check_picture(content, limits)
    file = io.BytesIO()
    to_pil_image(decode(content, None, limits)[0]).save(file, "png")
    return file.getvalue()
