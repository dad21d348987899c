"""The endpoints keep to their own schema, whatever is sent to them."""

import io
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from sufficit import Classifier
from sufficit.web import Limits, make_app, open_studio

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]
bounded = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def picture() -> bytes:
    file = io.BytesIO()
    Image.effect_noise((20, 20), 60).convert("RGB").save(file, "png")
    return file.getvalue()


PICTURE = picture()


@pytest.fixture(scope="module")
def schema() -> Any:
    studio = open_studio(Classifier.load("sufficit:digits"), "sufficit:digits", value_step=0.1)
    app = make_app(studio, Limits(megabytes=0.2), names=["testserver"])
    return schemathesis.openapi.from_asgi("/openapi.json", app)


MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
WANTED = {
    "/api/health": {200},
    "/api/model": {200},
    "/api/example": {200},
    "/api/explain": {200, 415, 422},
    "/api/score": {200, 415, 422},
}


@pytest.mark.parametrize("path", WANTED)
def test_answers_are_those_of_the_schema(schema: Any, path: str) -> None:
    (operation,) = schema[path].values()
    answers: Counter[int] = Counter()

    def ask(case: Any, real: bool) -> None:
        if real and isinstance(case.body, dict) and "file" in case.body:
            case.body["file"] = PICTURE
        response = case.call()
        answers[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    for mode in MODES if operation.body else MODES[:1]:
        cases = operation.as_strategy(generation_mode=mode)
        bounded(given(cases, st.booleans())(ask))()
    assert set(answers) >= WANTED[path], answers


def test_the_schema_names_every_path(schema: Any) -> None:
    assert set(schema) == set(WANTED)
