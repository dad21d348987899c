"""`sufficit serve`: its options, its messages, and a server in a process of its own."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import uvicorn
from PIL import Image
from starlette.testclient import TestClient
from torch import Tensor

from sufficit import Lax
from sufficit.classifier.classifier import Classifier
from sufficit.progress import Progress
from sufficit.web import Service, make_app
from sufficit.web.forms import ScoreForm
from sufficit.web.server import bind, serve
from sufficit.web.service import Answer

DIGITS = ("serve", "--model", "sufficit:digits", "--port", "0")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The app and the address that the command would serve."""
    found: dict[str, Any] = {}

    def serve(app: Any, listening: Any) -> None:
        found.update(app=app, name=listening.getsockname())

    def show(page: str, wanted: bool | None) -> None:
        found.update(page=page, open=wanted)

    monkeypatch.setattr("sufficit.web.serve", serve)
    monkeypatch.setattr("sufficit.cli.serve.show_page", show)
    return found


def test_flags_reach_the_page(sufficit, served: dict[str, Any], tmp_path: Path) -> None:
    Image.new("RGB", (9, 7), (1, 2, 3)).save(tmp_path / "own.bmp")
    classifier = Classifier.load("sufficit:digits")
    lax = Lax(96)
    lax.belong_to(classifier, "features")
    lax.save_pretrained(tmp_path / "mine")
    run = sufficit(
        *DIGITS, "--methods", f"{tmp_path / 'mine'},layercam", "--example", tmp_path / "own.bmp",
        "--max-mb", 2, "--max-megapixels", 4, "--value-step", 0.1, "--size", 32,
        "--allow-host", "models.example", "--title", "<b>Digits",
    )  # fmt: skip
    assert run.code == 0, run.err
    assert served["name"][0] == "127.0.0.1"
    assert f"sufficit:digits at http://127.0.0.1:{served['name'][1]}" in run.words
    assert "password" not in run.err
    assert served["open"] is None
    assert served["page"] == f"http://127.0.0.1:{served['name'][1]}"
    with TestClient(served["app"], base_url="http://models.example") as client:
        facts = client.get("/api/model").json()
        example = client.get("/api/examples/0").content
        assert client.get("/api/model", headers={"host": "10.0.0.1"}).status_code == 400
        assert "<title>&lt;b&gt;Digits</title>" in client.get("/").text
    assert facts["limits"] == {"bytes": 2_000_000, "pixels": 4_000_000}
    assert (facts["width"], facts["value_step"]) == (32, 0.1)
    assert [one["name"] for one in facts["methods"] if one["usual"]] == ["mine", "layercam"]
    assert len(facts["methods"]) >= 8
    (tmp_path / "example.png").write_bytes(example)
    with Image.open(tmp_path / "example.png") as opened:
        assert opened.size == (9, 7)


def test_a_port_open_to_the_network_prints_a_warning(sufficit, served: dict[str, Any]) -> None:
    run = sufficit(*DIGITS, "--host", "0.0.0.0", "--allow-host", "10.0.0.1", "--open")
    assert run.code == 0
    assert "the page has no password: anyone who can reach this port can use it" in run.err
    assert "behind a proxy" in " ".join(run.err.split())
    assert served["open"]
    with TestClient(served["app"], base_url="http://10.0.0.1") as client:
        for host in ("10.0.0.1", "localhost", socket.gethostname()):
            assert client.get("/api/model", headers={"host": host}).status_code == 200
        assert client.get("/api/model", headers={"host": "evil.example"}).status_code == 400


def test_without_the_extra_an_error_names_what_to_install(
    sufficit, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "sufficit.cli.serve.find_spec", lambda name: None if name == "uvicorn" else real(name)
    )
    run = sufficit(*DIGITS)
    assert run.code == 2
    assert run.err == "Error: the page needs uvicorn: pip install '.[web]'"


def test_wrong_options_get_one_clear_line(sufficit, served: dict[str, Any], tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        run = sufficit("serve", "--model", "sufficit:digits", "--port", port)
        assert run.code == 2
        assert f"cannot listen at 127.0.0.1 port {port}" in run.err
    (tmp_path / "bad.png").write_text("no image")
    for words, sentence in (
        (("--host", "no such host"), "cannot listen at"),
        (("--example", tmp_path / "bad.png"), "not a readable image"),
        (("--example", tmp_path / "absent.png"), "No such file"),
        (("--methods", tmp_path / "absent"), "no LAX adapter or heatmap file at"),
        (("--value-step", "2"), "a step must lie in 0..1"),
        (("--value-step", "0.001"), "value_step must be 0.01 or more, got 0.001"),
        (("--value-step", "nan"), "a step must lie in 0..1"),
        (("--workers", "2"), "No such option: --workers"),
        (("--port", "70000"), "Invalid value"),
    ):
        run = sufficit(*DIGITS, *words)
        assert run.code == 2, words
        assert sentence in run.err
        assert "Traceback" not in run.err
    assert served == {}


@pytest.mark.slow
@pytest.mark.processes
def test_it_answers_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "sufficit.cli", *DIGITS]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address = re.findall(r"http://\S+\d", process.stdout.readline())[0]
        with urlopen(f"{address}/api/model", timeout=20) as answer:
            assert json.load(answer)["name"] == "sufficit:digits"
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "Traceback" not in rest
    finally:
        process.kill()


HEAD = (
    "POST /api/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n"
    "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
)


def request(digit: bytes, step: str) -> bytes:
    """A score of Grad-CAM, as it goes over the wire."""
    body = b"".join(
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in (("method", "gradcam"), ("value_step", step))
    )
    body += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
    body += digit + b"\r\n--b--\r\n"
    return HEAD.format(len(body)).encode() + body


def test_the_work_for_a_browser_that_left_is_not_done(
    service: Service, digit: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two requests, one runs and one waits; both leave. The third is answered soon."""
    asked, going, go_on = list[str](), threading.Event(), threading.Event()

    def score(self: Service, images: Tensor, form: ScoreForm, progress: Progress) -> Answer:
        asked.append(f"{form.value_step:g}")
        going.set()
        assert go_on.wait(20)
        for done in range(100):
            progress(done, 100)
            time.sleep(0.01)
        asked.append("done")
        return {}

    monkeypatch.setattr(Service, "score", score)
    with bind("127.0.0.1", 0) as listening:
        servers = list[uvicorn.Server]()
        thread = threading.Thread(
            target=serve, args=(make_app(service), listening), kwargs={"ready": servers.append}
        )
        thread.start()
        made = []
        for step in ("0.1", "0.2", "0.3"):
            one = socket.create_connection(listening.getsockname()[:2], 20)
            one.sendall(request(digit, step))
            made.append(one)
            assert going.wait(20)
            time.sleep(0.1)  # the next request waits for its turn
        made[0].close()
        made[1].close()
        time.sleep(0.1)
        go_on.set()
        answer = made[2].recv(2**16)
        servers[0].should_exit = True
        thread.join(20)
        made[2].close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert asked == ["0.1", "0.3", "done"]
