"""The endpoints: good and bad requests, limits, disconnects, and the pages."""

import gc
import io
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient
from torch import nn

from report_content import HOSTILE
from sufficit import Classifier, View
from sufficit.data.digits import synthetic_digits
from sufficit.web import Service, example_image, open_service


def large_png(side: int) -> bytes:
    """A black square of side x side pixels in few bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(side // 8 + 1) * side, 9)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def icon() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "ico")
    return file.getvalue()


BAD = {
    "text": (b"hello", 415, "not an image"),
    "markup": (b"<svg onload='alert(1)'></svg>", 415, "not an image"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 415, "not an image"),
    "a format that is never decoded": (icon(), 415, "send BMP, GIF"),
    "empty": (b"", 400, "the file is empty"),
    "only a signature": (b"\x89PNG\r\n\x1a\n", 415, "not an image"),
    "too many bytes": (bytes(600_000), 413, "the limit is 0.5 MB"),
    "too many pixels": (large_png(2000), 413, "(2000 x 2000, the limit is 1000000 pixels)"),
    "a decompression bomb": (large_png(20_000), 413, "too large"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_get_one_sentence(client: TestClient, case: str) -> None:
    content, status, sentence = BAD[case]
    answer = client.post("/api/explain", files={"file": ("x.png", content, "image/png")})
    assert answer.status_code == status, answer.text
    assert sentence in answer.json()["error"]
    assert list(answer.json()) == ["error"]


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif", "bmp", "tiff"])
def test_cut_off_files_get_one_sentence(
    client: TestClient, encode: Callable[..., bytes], kind: str
) -> None:
    whole = encode(synthetic_digits(1, seed=1).images[0], kind)
    data = {"methods": "center"}
    assert client.post("/api/explain", files={"file": whole}, data=data).status_code == 200
    for part in (0.7, 0.3):
        cut = client.post("/api/explain", files={"file": whole[: int(len(whole) * part)]})
        assert cut.status_code in (400, 415)
        assert "corrupt" in cut.json()["error"] or "not an image" in cut.json()["error"]
        assert "0x" not in cut.json()["error"], "a Python object leaks into the answer"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"alpha_min": "nan"}, "alpha_min: Input should be a finite number"),
        ({"alpha_min": "inf"}, "alpha_min"),
        ({"alpha_min": "1.5"}, "less than or equal to 1, got '1.5'"),
        ({"alpha_min": "-1e-9"}, "greater than or equal to 0"),
        ({"value_step": "0.0001"}, "value_step: Input should be greater than or equal to 0.01"),
        ({"fill": "../../etc/passwd"}, "Unknown fill for this model '../../etc/passwd'"),
        ({"fill": "blak"}, "Did you mean 'black'?"),
        ({"fill": "drop"}, "Unknown fill for this model 'drop'"),
        ({"score": "both"}, "score: Input should be"),
        ({"method": "gradcm"}, "Unknown method 'gradcm'. Did you mean 'gradcam'?"),
        ({"method": "../gradcam"}, "Unknown method"),
        ({"target": "ten"}, "Unknown class 'ten'"),
        ({"target": "10"}, "0..9, got 10"),
        ({"target": "9" * 150}, "must be a whole number, 0 or more, got '999"),
        ({"target": "-1"}, "must be a whole number, 0 or more, got '-1'"),
        ({"target": " +1"}, "must be a whole number, 0 or more, got '+1'"),
        ({"target": "1.0"}, "must be a whole number, 0 or more, got '1.0'"),
        ({"target": "x" * 300}, "target: String should have at most 200 characters"),
        ({"owner": "me"}, "owner: Extra inputs are not permitted, got 'me'"),
        ({"target": HOSTILE[:190]}, "Unknown class"),
    ],
)
def test_wrong_fields_get_one_sentence(
    client: TestClient, digit: bytes, fields: dict[str, Any], sentence: str
) -> None:
    answer = client.post("/api/score", files={"file": digit}, data={"method": "gradcam"} | fields)
    assert answer.status_code == 422
    assert sentence in answer.json()["error"]
    assert answer.headers["content-type"] == "application/json"


def test_malformed_forms_are_refused(client: TestClient, digit: bytes) -> None:
    def status(**sent: Any) -> int:
        answer = client.post("/api/explain", **sent)
        assert list(answer.json()) == ["error"]
        assert "0x" not in answer.text
        return answer.status_code

    file = {"file": digit}
    assert status(files=file, data={f"field{i}": "x" for i in range(100)}) == 422
    assert status(files=file, data={"target": "x" * 100_000}) == 422
    assert status(files={"file": digit, "target": b"3"}) == 422
    assert status(files={"target": b"3"}) == 422
    assert status(data={"file": "x"}, files={"x": b""}) == 422
    assert status(data={"methods": "gradcam"}) == 422
    assert status(content=b"{}") == 422
    assert status(files=file, data={"methods": ["gradcam"] * 21}) == 422
    damaged = {"content-type": "multipart/form-data; boundary=x"}
    for content in (b"", b"--x\r\n", b"\r\n--x\r\nContent-Disposition: x\r\n\r\ny\r\n--x--"):
        assert status(content=content, headers=damaged) in (400, 422)
    for bad in ("multipart/form-data", "multipart/form-data; boundary=x; charset=\x01rot13"):
        assert status(content=b"--x--", headers={"content-type": bad}) in (400, 422)


def test_file_names_are_never_used(client: TestClient, digit: bytes) -> None:
    for name in ("../../../etc/passwd", "\\\\host\\share", HOSTILE, "x" * 2000, "\u202egnp.exe"):
        data = {"methods": "center"}
        answer = client.post("/api/explain", files={"file": (name, digit)}, data=data)
        assert answer.status_code == 200
        assert name not in answer.text


def test_an_upload_that_announces_too_much_is_refused_unread(client: TestClient) -> None:
    def body() -> Iterator[bytes]:
        raise AssertionError("it was read")
        yield b""

    for announced, status in ((500_001, 413), (10**20, 413), (-1, 411), ("", 411)):
        headers = {"content-type": "multipart/form-data; boundary=x"}
        headers["content-length"] = str(announced)
        answer = client.post("/api/score", content=body(), headers=headers)
        assert answer.status_code == status, announced
        assert list(answer.json()) == ["error"]


def test_an_upload_without_a_length_is_refused(client: TestClient, digit: bytes) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    answer = client.post("/api/score", content=iter([digit]), headers=headers)
    assert answer.request.headers["transfer-encoding"] == "chunked"
    assert (answer.status_code, answer.json()["error"][:28]) == (
        411,
        "the request has no Content-L",
    )


class Gate(nn.Module):
    """A model that waits for an event, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3, padding=1)
        self.open = threading.Event()
        self.open.set()
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        assert self.open.wait(20)
        return self.features(images).mean((2, 3))


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    yield found
    found.open.set()


def gated(gate: Gate) -> Service:
    service = open_service(Classifier(gate, "features", view=View(crop=(16, 16))), "gate")
    gate.open.clear()
    return service


def until(true: Callable[[], bool]) -> None:
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < 10, "it never came true"
        time.sleep(0.01)


def test_one_image_at_a_time_reaches_the_model(
    gate: Gate, client_of: Callable[..., TestClient], digit: bytes
) -> None:
    client, answers = client_of(gated(gate)), list[int]()
    before = gate.calls

    def ask() -> None:
        data = {"methods": "center"}
        found = client.post("/api/explain", files={"file": digit}, data=data)
        answers.append(found.status_code)

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    until(lambda: gate.calls > before)
    time.sleep(0.2)
    assert gate.calls == before + 1
    assert client.get("/api/model").status_code == 200, "the server answers meanwhile"
    gate.open.set()
    for thread in threads:
        thread.join(20)
    assert answers == [200] * 5


@pytest.mark.slow
def test_requests_leave_no_tensors_behind(client: TestClient, digit: bytes) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    def ask() -> None:
        client.post("/api/explain", files={"file": digit}, data={"methods": "gradcam"})
        client.post("/api/score", files={"file": digit}, data={"method": "center"})
        client.post("/api/explain", files={"file": digit[:1000]})

    ask()
    before = tensors()
    for _ in range(5):
        ask()
    assert tensors() <= before


def test_the_model_and_the_limits_are_described(client: TestClient) -> None:
    found = client.get("/api/model").json()
    assert found["classes"] == list("0123456789")
    assert (found["height"], found["width"]) == (64, 64)
    assert found["limits"] == {"bytes": 500_000, "pixels": 1_000_000}


def test_pages_load_nothing_from_other_machines(client: TestClient) -> None:
    for path in ("/", "/docs"):
        text = client.get(path).text
        assert "//" not in text.replace("http://www.w3.org", "").replace("https://", "!!")
        assert "https://" not in text
    listed, schema = client.get("/docs").text, client.get("/openapi.json").json()
    for word in (*schema["paths"], *schema["components"]["schemas"], "kpca-cam", "Required."):
        assert word in listed, word


def test_hostile_class_names_stay_text(client_of: Callable[..., TestClient]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    classifier = Classifier(model, "0", classes=[HOSTILE, HOSTILE], view=View(crop=(8, 8)))
    client = client_of(open_service(classifier, HOSTILE))
    text = client.get("/").text
    assert "<script>window" not in text
    assert "<img src=x" not in text
    assert text.count("</script>") == 2
    assert client.get("/api/model").json()["classes"] == [HOSTILE, HOSTILE]


def test_an_example_of_your_own_replaces_the_digit(
    service: Service,
    client_of: Callable[..., TestClient],
    encode: Callable[..., bytes],
    tmp_path: Path,
) -> None:
    (tmp_path / "own.bmp").write_bytes(encode(torch.full((3, 40, 30), 0.2), "bmp"))
    own = example_image(tmp_path / "own.bmp")
    client = client_of(service, examples=[("own", own), ("other", b"PNG")])
    assert client.get("/api/examples/1").content == b"PNG"
    for number in ("2", "-1", "x"):
        assert client.get(f"/api/examples/{number}").status_code == 422
    answer = client.get("/api/examples/0")
    assert answer.headers["content-type"] == "image/png"
    with Image.open(io.BytesIO(answer.content)) as opened:
        assert opened.size == (30, 40)
        assert opened.getpixel((0, 0)) == (51, 51, 51)


def test_the_example_is_a_synthetic_digit(client: TestClient, digit: bytes) -> None:
    with Image.open(io.BytesIO(client.get("/api/examples/0").content)) as opened:
        expected = np.asarray(Image.open(io.BytesIO(digit))).astype(int)
        assert np.abs(np.asarray(opened).astype(int) - expected).max() <= 1
