"""The endpoints answer valid and invalid requests with the statuses of their own schema."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sufficit.web import Limits, Service, make_app

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_headers_conformance,
    status_code_conformance,
    unsupported_method,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    unsupported_method,
]
bounded = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def schema(service: Service) -> Any:
    coarse = replace(service, value_step=0.5)
    app = make_app(coarse, Limits(bytes=200_000), names=["testserver"])
    return schemathesis.openapi.from_asgi("/openapi.json", app)


MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
EXPECTED = {
    "/api/model": {200},
    "/api/examples/{number}": {200},
    "/api/explain": {200, 415, 422},
    "/api/score": {200, 415, 422},
    "/api/region": {200, 415, 422},
}


@pytest.mark.parametrize("path", EXPECTED)
def test_answers_conform_to_the_schema(schema: Any, digit: bytes, path: str) -> None:
    (operation,) = schema[path].values()
    answers: Counter[int] = Counter()

    def ask(case: Any, real: bool) -> None:
        if real and isinstance(case.body, dict) and "file" in case.body:
            case.body["file"] = digit
        response = case.call()
        answers[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    for mode in MODES if operation.body else MODES[:1]:
        cases = operation.as_strategy(generation_mode=mode)
        bounded(given(cases, st.booleans())(ask))()
    assert set(answers) >= EXPECTED[path], answers


def test_the_schema_lists_every_endpoint(schema: Any) -> None:
    assert set(schema) == set(EXPECTED)
