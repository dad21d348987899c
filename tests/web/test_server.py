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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from fastapi import FastAPI
from PIL import Image
from starlette.testclient import TestClient

from sufficit import Lax
from sufficit.classifier.classifier import Classifier
from sufficit.web.server import bind, serve

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
        "--max-mb", 2, "--max-waiting", 3, "--max-megapixels", 4, "--value-step", 0.1, "--size", 32,
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
    assert facts["limits"] | {"seconds": 0} == {
        "bytes": 2_000_000, "pixels": 4_000_000, "places": 4, "seconds": 0, "decode_seconds": 10
    }  # fmt: skip
    assert (facts["width"], facts["value_step"]) == (32, 0.1)
    assert [one["name"] for one in facts["methods"] if one["usual"]] == ["mine", "layercam"]
    assert len(facts["methods"]) >= 8
    (tmp_path / "example.png").write_bytes(example)
    with Image.open(tmp_path / "example.png") as opened:
        assert opened.size == (9, 7)


def test_a_port_open_to_the_network_prints_a_warning(sufficit, served: dict[str, Any]) -> None:
    run = sufficit(*DIGITS, "--host", "0.0.0.0", "--open")
    assert run.code == 0
    assert "anyone who can reach this port can use it" in run.err
    assert served["open"]
    with TestClient(served["app"], base_url="http://10.0.0.1") as client:
        assert client.get("/api/health").status_code == 200
        assert client.get("/api/health", headers={"host": "evil.example"}).status_code == 400


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
        (("--value-step", "0.001"), "value_step must be 0.01 or more, got 0.001: raise it"),
        (("--value-step", "nan"), "a step must lie in 0..1"),
        (("--workers", "2"), "No such option: --workers"),
        (("--port", "70000"), "Invalid value"),
    ):
        run = sufficit(*DIGITS, *words)
        assert run.code == 2, words
        assert sentence in run.err
        assert "Traceback" not in run.err
    assert served == {}


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
        with urlopen(f"{address}/api/health", timeout=20) as answer:
            assert json.load(answer)["status"] == "ok"
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "Traceback" not in rest
    finally:
        process.kill()


class Page:
    """A page in a thread, with limits short enough for a test."""

    def __init__(self, app: FastAPI) -> None:
        self.listening, self.servers = bind("127.0.0.1", 0), list[Any]()
        self.made = list[socket.socket]()
        self.port = self.listening.getsockname()[1]
        run = {"target": serve, "args": (app, self.listening)}
        self.thread = threading.Thread(**run, kwargs={"ready": self.servers.append})
        self.thread.start()

    def connect(self, content: bytes = b"", address: str = "127.0.0.1") -> socket.socket:
        found = socket.create_connection(("127.0.0.1", self.port), 20, source_address=(address, 0))
        self.made.append(found)
        found.sendall(content)
        return found

    def get(self, path: str = "/api/health", address: str = "127.0.0.1") -> tuple[int, bytes]:
        with self.connect(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), address
        ) as one:
            answer = one.recv(2**16)
        return int(answer.split()[1]), answer

    def stop(self) -> None:
        self.servers[0].should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.listening.close()


@pytest.fixture
def page(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    monkeypatch.setattr("sufficit.web.server.REQUEST_SECONDS", 0.6)
    found = Page(app)
    app.state.queue.closed = False
    yield found
    for one in found.made:
        one.close()
    if found.thread.is_alive():
        found.stop()
    app.state.queue.closed = False


HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow:"


def ends(one: socket.socket, seconds: float = 10) -> bool:
    """Whether the server closes a connection."""
    one.settimeout(seconds)
    with suppress(ConnectionResetError):
        while one.recv(2**16):  # what is left of an earlier answer
            pass
    return True


def test_connections_without_a_request_are_closed(page: Page) -> None:
    silent, half = page.connect(), page.connect(HALF)
    dribbling = page.connect(HALF)
    started = time.monotonic()
    with suppress(OSError):
        while time.monotonic() - started < 10:
            dribbling.sendall(b"x")
            time.sleep(0.1)
    assert time.monotonic() - started < 10
    assert all(ends(one) for one in (silent, half))
    again = page.connect(b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert again.recv(2**16).startswith(b"HTTP/1.1 200")
    again.sendall(HALF)  # the second request of a connection has a limit too
    assert ends(again)


def test_a_body_that_nobody_reads_does_not_hold_its_connection(page: Page) -> None:
    one = page.connect(
        b"GET /api/health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n"
    )
    started = time.monotonic()
    assert one.recv(2**16).startswith(b"HTTP/1.1 200")
    with suppress(OSError):
        while time.monotonic() - started < 10:
            one.sendall(b"x")
            time.sleep(0.1)
    assert time.monotonic() - started < 10


def test_half_open_connections_shut_nobody_out(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sufficit.web.server.REQUEST_SECONDS", 60)
    for _ in range(300):
        page.connect(HALF)
    started = time.monotonic()
    assert page.get()[0] == 200
    assert page.get(address="127.0.0.2")[0] == 200
    assert time.monotonic() - started < 5
    assert len(page.servers[0].server_state.connections) <= 65  # of one address
    for k in range(1, 255):
        page.connect(HALF, f"127.0.{k}.3")
    assert page.get(address="127.0.0.9")[0] == 200
    assert len(page.servers[0].server_state.connections) <= 256


def test_a_client_that_reads_nothing_is_let_go(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sufficit.web.server.READ_SECONDS", 0.3)
    monkeypatch.setattr("sufficit.web.server.REQUEST_SECONDS", 60)
    assert page.get()[0] == 200  # it is ready
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.connect(("127.0.0.1", page.port))
        with suppress(OSError):  # more answers than any buffer holds
            for _ in range(200):
                deaf.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        started = time.monotonic()
        while page.servers[0].server_state.connections and time.monotonic() - started < 10:
            time.sleep(0.05)
        assert not page.servers[0].server_state.connections


def test_a_server_that_stops_answers_all_requests(
    page: Page, digit: bytes, app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that run end; those that wait or upload get 503; no traceback is logged."""
    head = "POST /api/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n"
    head += "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    fields = {"method": "gradcam", "value_step": "0.01"}
    body = b"".join(
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    )
    file = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
    body += file + digit + b"\r\n--b--\r\n"
    whole = head.format(len(body)).encode() + body
    asking = [page.connect(whole) for _ in range(6)]
    uploading = page.connect(whole[:-100])
    started = time.monotonic()
    while app.state.queue.taken < 7 and time.monotonic() - started < 20:
        time.sleep(0.01)
    page.stop()
    answers = []
    for one in (*asking, uploading):
        one.settimeout(10)
        answers.append(one.recv(2**16))
    codes = [int(answer.split()[1]) for answer in answers]
    assert set(codes) <= {200, 503}
    assert codes.count(503) >= 4
    for code, answer in zip(codes, answers, strict=True):
        assert code == 200 or (b"retry-after: 5" in answer.lower() and b"server stops" in answer)
    assert codes[-1] == 503
    assert not caplog.records
