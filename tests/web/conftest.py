"""A model, its app, and images to send to it."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fastapi import FastAPI
from PIL import Image
from starlette.testclient import TestClient
from torch import Tensor

from sufficit import Classifier
from sufficit.data.digits import synthetic_digits
from sufficit.data.images import read_image
from sufficit.web import Limits, Service, make_app, open_service

HOME = "http://127.0.0.1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "browser: needs Chromium and playwright")
    config.addinivalue_line("markers", "processes: starts Python processes")


def as_bytes(image: Tensor, kind: str = "png") -> bytes:
    """An image [3,H,W] in 0..1 as a file of some format."""
    file = io.BytesIO()
    pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="session")
def encode() -> Callable[..., bytes]:
    return as_bytes


@pytest.fixture(scope="session")
def digit() -> bytes:
    """A 5 in noise, as PNG."""
    return as_bytes(synthetic_digits(1, seed=20).images[0])


@pytest.fixture(scope="session")
def digit_file(digit: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "five.png"
    path.write_bytes(digit)
    return path


@pytest.fixture(scope="session")
def service() -> Service:
    return open_service(Classifier.load("sufficit:digits"), "sufficit:digits")


@pytest.fixture(scope="session")
def images(service: Service, digit_file: Path) -> torch.Tensor:
    """The digit as the model's input: [1,3,64,64]."""
    return read_image(digit_file, service.classifier.view)[None]


@pytest.fixture(scope="session")
def app(service: Service) -> FastAPI:
    return make_app(service, Limits(bytes=500_000, pixels=1_000_000))


@pytest.fixture(scope="session")
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, base_url=HOME) as found:
        yield found


@pytest.fixture
def client_of() -> Iterator[Callable[..., TestClient]]:
    """A client of any service, closed at the end of the test."""
    opened: list[TestClient] = []

    def make(service: Service, **options: object) -> TestClient:
        found = TestClient(make_app(service, **options), HOME, raise_server_exceptions=False)
        opened.append(found.__enter__())
        return found

    yield make
    for found in opened:
        found.__exit__(None, None, None)
