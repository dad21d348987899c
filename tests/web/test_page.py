"""The page's endpoints, as clients good and bad use them."""

import asyncio
import io
import re
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from PIL import Image
from starlette.testclient import TestClient
from torch import nn

from report_content import HOSTILE, decoded
from sufficit import Classifier, Lax, View, evaluate, explain
from sufficit.data.digits import synthetic_digits
from sufficit.data.images import read_image
from sufficit.errors import UserError
from sufficit.web import Limits, Studio, make_app, open_studio
from sufficit.web.guard import Guard
from sufficit.web.line import Line
from sufficit.web.pages import as_png
from sufficit.web.refusals import MEANINGS, GoneError, RefusedError

HOME = "http://127.0.0.1"


def as_bytes(image: torch.Tensor, kind: str = "png") -> bytes:
    file = io.BytesIO()
    pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def picture() -> bytes:
    return as_bytes(synthetic_digits(1, seed=20).images[0])


@pytest.fixture(scope="module")
def studio() -> Studio:
    return open_studio(Classifier.load("sufficit:digits"), "sufficit:digits")


@pytest.fixture(scope="module")
def app(studio: Studio) -> FastAPI:
    return make_app(studio, Limits(megabytes=0.5, megapixels=1))


@pytest.fixture(scope="module")
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, base_url=HOME) as found:
        yield found


def seen(studio: Studio, picture: bytes, folder: Path) -> torch.Tensor:
    path = folder / "picture.png"
    path.write_bytes(picture)
    return read_image(path, studio.classifier.view)[None]


def test_scores_are_those_of_evaluate(
    client: TestClient, studio: Studio, picture: bytes, tmp_path: Path
) -> None:
    images = seen(studio, picture, tmp_path)
    cases: list[dict[str, Any]] = [
        {},
        {"alpha_min": 0.33, "fill": "mean", "score": "confidence", "value_step": 0.1},
        {"target": "3", "fill": "blur"},
    ]
    for case in cases:
        answer = client.post(
            "/api/score", files={"file": picture}, data={"method": "layercam"} | case
        )
        found = answer.json()
        assert answer.status_code == 200, found
        target = torch.tensor([int(case.get("target", 5))])
        heatmaps = explain(studio.classifier, images, target, method="layercam")
        options = {"value_step": 0.05} | {k: v for k, v in case.items() if k != "target"}
        scores = evaluate(studio.classifier, images, heatmaps, target, **options)
        for column in ("msi", "base_score", "mask_penalty", "insertion_pixel", "deletion_pixel"):
            assert found[column] == scores[column].item(), (case, column)
        assert found["target"]["number"] == target.item()
        curves = scores.curves()
        start = found["start"]
        assert found["grid"][start] == found["alpha_min"] == options.get("alpha_min", 0.5)
        for view, name in (("kept", "show"), ("hidden", "hide")):
            expected = curves[name].confidence[0].tolist()
            assert found["curves"][view][start:] == pytest.approx(expected, abs=5e-5)
            hits = "".join(str(int(hit)) for hit in curves[name].accuracy[0])
            assert found["curves"][f"{view}_hits"][start:] == hits


def test_heatmaps_and_prediction_are_those_of_the_package(
    client: TestClient, studio: Studio, picture: bytes, tmp_path: Path
) -> None:
    images = seen(studio, picture, tmp_path)
    names = ["gradcam", "center", "random"]
    found = client.post("/api/explain", files={"file": picture}, data={"methods": names}).json()
    probabilities = studio.classifier(images).softmax(1)[0]
    for one in found["prediction"]:
        assert one["probability"] == pytest.approx(probabilities[one["number"]].item(), abs=5e-5)
        assert one["name"] == str(one["number"])
    order = [one["number"] for one in found["prediction"]]
    assert order == probabilities.argsort(descending=True)[:5].tolist()
    assert found["target"]["number"] == order[0] == 5
    assert np.array_equal(decoded(found["image"]), np.asarray(Image.open(io.BytesIO(picture))))
    assert [one["method"] for one in found["maps"]] == names
    for one in found["maps"]:
        heatmap = explain(studio.classifier, images, method=one["method"])[0]
        coded = decoded(one["map"])
        for step, alpha in enumerate(found["grid"]):
            above = heatmap > torch.tensor(alpha, dtype=torch.float32)
            assert np.array_equal(coded > step, above.numpy())
            assert one["shares"][step] == pytest.approx(above.double().mean().item(), abs=5e-5)
        assert one["mask_penalty"] == (heatmap >= 0.5).double().mean().item()
        assert not one["empty"]


def test_without_methods_the_usual_ones_are_drawn(client: TestClient, picture: bytes) -> None:
    found = client.post("/api/explain", files={"file": picture}).json()
    usual = [one["name"] for one in client.get("/api/model").json()["methods"] if one["usual"]]
    assert [one["method"] for one in found["maps"]] == usual
    assert "rollout" not in usual  # this net has no attention
    assert "center" not in usual


class Bright(nn.Module):
    """Class 1 where the picture is bright, class 0 where it is dark."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 1, 1, bias=False)
        nn.init.ones_(self.features.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        light = self.features(images).mean((2, 3))
        return torch.cat([-light, light], 1)


def test_a_method_that_finds_nothing_says_so(picture: bytes) -> None:
    classifier = Classifier(Bright(), "features", view=View(crop=(16, 16)))
    with TestClient(make_app(open_studio(classifier, "bright")), base_url=HOME) as client:
        for target, empty in (("0", True), ("1", False)):
            data = {"target": target, "methods": "gradcam"}
            found = client.post("/api/explain", files={"file": picture}, data=data).json()
            assert [one["empty"] for one in found["maps"]] == [empty]
            assert found["target"]["name"] == f"class {target}"


def test_the_model_is_described(client: TestClient) -> None:
    found = client.get("/api/model").json()
    assert found["classes"] == list("0123456789")
    assert (found["height"], found["width"], found["n_classes"]) == (64, 64, 10)
    assert found["limits"] == {"bytes": 500_000, "pixels": 1_000_000, "places": 17, "seconds": 30}
    assert client.get("/api/health").json() == {"status": "ok", "taken": 0, "places": 17}


def test_adapters_are_methods_too(picture: bytes) -> None:
    classifier = Classifier.load("sufficit:digits")
    channels = classifier.features(torch.zeros(1, 3, 64, 64))[0].shape[1]
    lax = Lax(channels)
    lax.belong_to(classifier, classifier.layer or "")
    studio = open_studio(classifier, "digits", {"mine": lax})
    assert studio.usual[0] == "mine"
    with TestClient(make_app(studio), base_url=HOME) as client:
        data = {"methods": "mine"}
        found = client.post("/api/explain", files={"file": picture}, data=data).json()
        assert client.post(
            "/api/score", files={"file": picture}, data={"method": "mine"}
        ).is_success
    expected = explain(classifier, torch.zeros(1, 3, 64, 64), method=lax).shape
    assert decoded(found["maps"][0]["map"]).shape == expected[1:]
    other = Classifier(nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    other.view = View(crop=(8, 8))
    with pytest.raises(UserError, match="another classifier"):
        open_studio(other, "other", {"mine": lax})


def large_png(side: int) -> bytes:
    """A black square of so many pixels in few bytes."""

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
    "a kind that is never decoded": (icon(), 415, "send PNG, JPEG"),
    "empty": (b"", 400, "the file is empty"),
    "a bare beginning": (b"\x89PNG\r\n\x1a\n", 415, "not an image"),
    "too many bytes": (bytes(600_000), 413, "the limit is 0.5 MB"),
    "too many pixels": (large_png(2000), 413, "of 2000 x 2000 is too large"),
    "a bomb": (large_png(20_000), 413, "too large"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_get_a_plain_sentence(client: TestClient, case: str) -> None:
    content, status, sentence = BAD[case]
    answer = client.post("/api/explain", files={"file": ("x.png", content, "image/png")})
    assert answer.status_code == status, answer.text
    assert sentence in answer.json()["error"]
    assert list(answer.json()) == ["error"]


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif", "bmp", "tiff"])
def test_files_that_end_too_early_get_a_plain_sentence(client: TestClient, kind: str) -> None:
    whole = as_bytes(synthetic_digits(1, seed=1).images[0], kind)
    assert client.post("/api/explain", files={"file": whole}).status_code == 200
    for part in (0.7, 0.3):
        cut = client.post("/api/explain", files={"file": whole[: int(len(whole) * part)]})
        assert cut.status_code in (400, 415)
        assert "damaged" in cut.json()["error"] or "not an image" in cut.json()["error"]
        assert "0x" not in cut.json()["error"]  # nothing of Python's own


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"alpha_min": "nan"}, "alpha_min: Input should be a finite number"),
        ({"alpha_min": "inf"}, "alpha_min"),
        ({"alpha_min": "1.5"}, "less than or equal to 1, got '1.5'"),
        ({"alpha_min": "-1e-9"}, "greater than or equal to 0"),
        ({"alpha_min": ["0.1", "0.2"]}, "must be given once, got 2"),
        ({"value_step": "0.0001"}, "value_step: Input should be greater than or equal to 0.01"),
        ({"fill": "../../etc/passwd"}, "fill: Input should be 'black'"),
        ({"score": "both"}, "score: Input should be"),
        ({"method": "gradcm"}, "Unknown method 'gradcm'. Did you mean 'gradcam'?"),
        ({"method": "../gradcam"}, "Unknown method"),
        ({"target": "ten"}, "Unknown class 'ten'"),
        ({"target": "10"}, "0..9, got 10"),
        ({"target": "9" * 150}, "0..9, got 999"),
        ({"target": "x" * 300}, "target: String should have at most 200 characters"),
        ({"owner": "me"}, "there is no field 'owner'"),
        ({"target": HOSTILE[:190]}, "Unknown class"),
    ],
)
def test_wrong_fields_get_a_plain_sentence(
    client: TestClient, picture: bytes, fields: dict[str, Any], sentence: str
) -> None:
    answer = client.post("/api/score", files={"file": picture}, data={"method": "gradcam"} | fields)
    assert answer.status_code == 422
    assert sentence in answer.json()["error"]
    assert answer.headers["content-type"] == "application/json"


def test_forms_that_ask_too_much_are_refused(client: TestClient, picture: bytes) -> None:
    many = {f"field{i}": "x" for i in range(100)}
    assert client.post("/api/explain", files={"file": picture}, data=many).status_code == 400
    long = client.post("/api/explain", files={"file": picture}, data={"target": "x" * 100_000})
    assert long.status_code == 400
    twice = [("file", picture), ("file", picture)]
    assert client.post("/api/explain", files=twice).status_code == 400
    as_file = client.post("/api/explain", files={"file": picture, "target": b"3"})
    assert as_file.status_code == 400
    assert client.post("/api/explain", files={"target": b"3"}).status_code == 422
    as_text = client.post("/api/explain", data={"file": "x"}, files={"x": b""})
    assert as_text.status_code == 422
    assert client.post("/api/explain", data={"methods": "gradcam"}).status_code == 415
    assert client.post("/api/explain", content=b"{}").status_code == 415
    names = ["gradcam"] * 21
    assert client.post("/api/explain", files={"file": picture}, data={"methods": names}).is_error
    damaged = {"content-type": "multipart/form-data; boundary=x"}
    for content in (b"", b"--x\r\n", b"\r\n--x\r\nContent-Disposition: x\r\n\r\ny\r\n--x--"):
        answer = client.post("/api/explain", content=content, headers=damaged)
        assert answer.status_code in (400, 422), answer.text
    for bad in ("multipart/form-data", "multipart/form-data; boundary=x; charset=\x01rot13"):
        answer = client.post("/api/explain", content=b"--x--", headers={"content-type": bad})
        assert answer.status_code in (400, 422), answer.text


def test_file_names_are_never_used(client: TestClient, picture: bytes) -> None:
    for name in ("../../../etc/passwd", "\\\\host\\share", HOSTILE, "x" * 2000, "\u202egnp.exe"):
        answer = client.post("/api/explain", files={"file": (name, picture)})
        assert answer.status_code == 200
        assert name not in answer.text


class Wire:
    """A request as ASGI sends it, chunk by chunk, and what was answered."""

    def __init__(self, chunks: list[bytes], path: str = "/api/score", ends: str = "whole") -> None:
        self.chunks, self.path, self.ends = list(chunks), path, ends
        self.read = 0
        self.gone = asyncio.Event()
        self.status: int | None = None

    async def receive(self) -> dict[str, Any]:
        if self.chunks:
            chunk = self.chunks.pop(0)
            self.read += len(chunk)
            more = bool(self.chunks) or self.ends != "whole"
            return {"type": "http.request", "body": chunk, "more_body": more}
        if self.ends == "vanishes":
            return {"type": "http.disconnect"}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)

    async def ask(self, app: FastAPI) -> None:
        headers = [(b"host", b"localhost"), (b"content-type", b"multipart/form-data; boundary=x")]
        scope = {"type": "http", "method": "POST", "path": self.path, "headers": headers}
        scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http"}
        await app(scope, self.receive, self.send)


def body(picture: bytes, method: str = "gradcam") -> bytes:
    head = b'--x\r\nContent-Disposition: form-data; name="method"\r\n\r\n' + method.encode()
    file = b'\r\n--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return head + file + picture + b"\r\n--x--\r\n"


def test_an_endless_upload_is_cut_off_at_the_limit(app: FastAPI) -> None:
    wire = Wire([body(b"")[:-8], *[bytes(100_000)] * 100])
    asyncio.run(wire.ask(app))
    assert wire.status == 413
    assert wire.read < 700_000  # of ten million


def test_a_trickle_is_ended(studio: Studio, picture: bytes) -> None:
    wire = Wire([body(picture)[:50]], ends="stalls")
    begun = time.monotonic()
    asyncio.run(wire.ask(make_app(studio, Limits(seconds=0.2))))
    assert wire.status == 408
    assert time.monotonic() - begun < 2


class Gate(nn.Module):
    """A model that waits at a gate, and counts who came through."""

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


def gated(gate: Gate, waiting: int) -> FastAPI:
    classifier = Classifier(gate, "features", view=View(crop=(16, 16)))
    studio = open_studio(classifier, "gate")
    gate.open.clear()
    return make_app(studio, Limits(waiting=waiting))


def until(true: Any) -> None:
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < 10, "it never came true"
        time.sleep(0.01)


def test_beyond_the_places_requests_are_sent_away_and_none_is_lost(
    gate: Gate, picture: bytes
) -> None:
    with TestClient(gated(gate, waiting=2), base_url=HOME) as client:
        answers: list[int] = []

        def ask() -> None:
            data = {"methods": "center"}
            found = client.post("/api/explain", files={"file": picture}, data=data)
            answers.append(found.status_code)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: client.get("/api/health").json()["taken"] == 3)
        for _ in range(10):
            refused = client.post("/api/explain", files={"file": picture})
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "5"
            assert "3 requests wait here already" in refused.json()["error"]
        gate.open.set()
        for thread in threads:
            thread.join(20)
        assert answers == [200, 200, 200]
        assert client.get("/api/health").json()["taken"] == 0
        assert client.post("/api/explain", files={"file": picture}).status_code == 200


def test_whoever_goes_away_frees_the_place(gate: Gate, picture: bytes) -> None:
    app = gated(gate, waiting=1)
    before = gate.calls

    async def story() -> tuple[Wire, Wire]:
        first, second = Wire([body(picture)]), Wire([body(picture)])
        tasks = [asyncio.ensure_future(wire.ask(app)) for wire in (first, second)]
        while gate.calls == before:
            await asyncio.sleep(0.01)
        second.gone.set()
        await tasks[1]  # it waited, and leaves at once
        assert gate.calls == before + 1
        third = Wire([body(picture)])
        tasks.append(asyncio.ensure_future(third.ask(app)))
        await asyncio.sleep(0.05)
        assert third.status is None  # there was a place for it
        first.gone.set()
        gate.open.set()
        await asyncio.gather(*tasks)
        return first, third

    first, third = asyncio.run(story())
    assert first.status == 408  # to nobody: it was stopped half-way
    assert third.status == 200
    half = Wire([body(picture)[:50]], ends="vanishes")
    asyncio.run(half.ask(app))
    assert half.status == 408


def test_a_running_job_is_stopped_when_nobody_waits_for_it() -> None:
    line, ticks = Line(1), []

    def job(progress: Any) -> None:
        for i in range(1000):
            progress(i, 1000)
            ticks.append(i)
            time.sleep(0.005)

    async def story() -> None:
        with pytest.raises(GoneError):
            await line.work(job, asyncio.sleep(0.05))

    asyncio.run(story())
    assert 1 <= len(ticks) < 100
    with line.place(), pytest.raises(RefusedError, match="try again"), line.place():
        pass
    assert line.taken == 0


HOSTS = {
    "localhost": True, "localhost:8000": True, "LOCALHOST": True, "127.0.0.1": True,
    "127.0.0.1:8000": True, "127.9.9.9": True, "[::1]:8000": True, "[::1]": True,
    "evil.example": False, "127.0.0.1.evil.example": False, "192.168.0.9": False, "": False,
    "localhost@evil.example": False, "localhost:port": False, "localhost/x": False, "[::1": False,
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_only_this_machine_is_a_host(client: TestClient, host: str) -> None:
    answer = client.get("/api/health", headers={"host": host})
    assert answer.status_code == (200 if HOSTS[host] else 400)
    assert "access-control-allow-origin" not in answer.headers


def test_elsewhere_addresses_and_names_given_are_hosts_too() -> None:
    guard = Guard(FastAPI(), ["Studio.example"], loopback=False)
    assert all(map(guard.known, ["192.168.0.9:8000", "studio.example", "localhost"]))
    assert not guard.known("evil.example")


def test_pages_of_other_sites_may_not_ask(client: TestClient, picture: bytes) -> None:
    for headers, status in (
        ({"origin": HOME}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ):
        answer = client.post("/api/explain", files={"file": picture}, headers=headers)
        assert answer.status_code == status, headers


def test_answers_carry_what_browsers_guard_with(client: TestClient) -> None:
    for path in ("/", "/docs", "/api/model", "/nowhere"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "default-src 'none'" in headers["content-security-policy"]
    assert client.get("/nowhere").json() == {"error": "Not Found"}
    assert client.get("/api/score").status_code == 405


def test_the_docs_name_every_status() -> None:
    text = (Path(__file__).parents[2] / "docs" / "page.md").read_text()
    told = text[text.index("Every failure is") : text.index("## Limits")]
    assert {int(found) for found in re.findall(r"\b[45]\d\d\b", told)} == {*MEANINGS, 404, 405}


def test_pages_ask_nothing_of_other_machines(client: TestClient) -> None:
    for path in ("/", "/docs"):
        text = client.get(path).text
        assert "//" not in text.replace("http://www.w3.org", "").replace("https://", "!!")
        assert "https://" not in text
    listed = client.get("/docs").text
    for path in client.get("/openapi.json").json()["paths"]:
        assert path in listed


def test_class_names_stay_text() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    classifier = Classifier(model, "0", classes=[HOSTILE, HOSTILE], view=View(crop=(8, 8)))
    with TestClient(make_app(open_studio(classifier, HOSTILE)), base_url=HOME) as client:
        text = client.get("/").text
        assert "<script>window" not in text
        assert "<img src=x" not in text
        assert text.count("</script>") == 2
        assert client.get("/api/model").json()["classes"] == [HOSTILE, HOSTILE]


class Broken(nn.Module):
    """Works on the grey picture it is tried with, and on nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.std() > 0.01:
            raise RuntimeError("a secret path: /home/me")
        return self.features(images).mean((2, 3))


def test_a_model_that_fails_is_told_without_its_traceback(picture: bytes) -> None:
    studio = open_studio(Classifier(Broken(), "features", view=View(crop=(16, 16))), "broken")
    with TestClient(make_app(studio), base_url=HOME, raise_server_exceptions=False) as client:
        answer = client.post("/api/explain", files={"file": picture})
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert "the terminal" in answer.json()["error"]
        assert client.get("/api/health").json()["taken"] == 0


def test_a_model_that_says_nan_is_told(picture: bytes) -> None:
    class Nothing(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.mean((2, 3)) * torch.nan

    classifier = Classifier(nn.Sequential(nn.Conv2d(3, 3, 1), Nothing()), view=View(crop=(16, 16)))
    with TestClient(make_app(open_studio(classifier, "nan")), base_url=HOME) as client:
        data = {"methods": "center"}
        found = client.post("/api/explain", files={"file": picture}, data=data).json()
        assert [one["probability"] for one in found["prediction"]] == [None] * 3
        scored = client.post("/api/score", files={"file": picture}, data={"method": "center"})
        assert scored.json()["msi"] is None


def test_a_model_without_a_size_is_refused() -> None:
    classifier = Classifier(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Flatten()))
    with pytest.raises(UserError, match="--size 224"):
        open_studio(classifier, "mine")


def test_an_example_of_ones_own_is_shown(studio: Studio, picture: bytes) -> None:
    own = as_png(as_bytes(torch.full((3, 40, 30), 0.2), "bmp"), Limits())
    with TestClient(make_app(studio, example=own), base_url=HOME) as client:
        answer = client.get("/api/example")
        assert answer.headers["content-type"] == "image/png"
        with Image.open(io.BytesIO(answer.content)) as opened:
            assert opened.size == (30, 40)
            assert opened.getpixel((0, 0)) == (51, 51, 51)


def test_the_example_at_hand_is_what_the_package_draws(client: TestClient, picture: bytes) -> None:
    with Image.open(io.BytesIO(client.get("/api/example").content)) as opened:
        wanted = np.asarray(Image.open(io.BytesIO(picture))).astype(int)
        assert np.abs(np.asarray(opened).astype(int) - wanted).max() <= 1


def test_the_model_is_left_as_it_was(studio: Studio, client: TestClient, picture: bytes) -> None:
    before = {name: value.clone() for name, value in studio.classifier.model.state_dict().items()}
    client.post("/api/score", files={"file": picture}, data={"method": "gradcam"})
    after = studio.classifier.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in studio.classifier.model.parameters())
