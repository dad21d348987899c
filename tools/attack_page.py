"""The page under attack: bad, slow, dead and hostile clients, and a stop in the middle."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from attack_files import bad_images, picture

ANSWERS = {200, 400, 403, 404, 405, 408, 413, 415, 422, 503}  # that the page documents
WAITING = 10  # requests at the stop
STEPS = {"value_step": "0.5"}
WRONG = {"target": "-1", "alpha_min": "nan", "fill": "x", "methods": "\x1b", "z": "1"}
UPLOAD = b"POST /api/explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999999999999\r\n"
RAW = (
    b"GET / HTTP/1.1\r\nHost: evil\r\n\r\n",
    b"\0" * 99 + b"\r\n\r\n",
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
    UPLOAD + b"Content-Type: multipart/form-data; boundary=b\r\n\r\n",
)


class Page:
    """`sufficit serve` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.log = (folder / "page.log").open("wb")
        words = ["serve", "--model", "sufficit:digits", "--port", "0", "--no-open"]
        command = [sys.executable, "-m", "sufficit.cli", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log)
        assert self.process.stdout is not None
        found = re.search(rb"http://127.0.0.1:(\d+)", self.process.stdout.readline())
        assert found is not None
        self.port = int(found[1])

    def ask(self, content: bytes, *, read: bool = True) -> int | None:
        """The status that a raw request is answered with."""
        with socket.create_connection(("127.0.0.1", self.port), 60) as one:
            one.sendall(content)
            answer = one.recv(2**16) if read else b""
        return int(answer.split()[1]) if answer else None


def form(path: str, fields: dict[str, str], file: bytes) -> bytes:
    """A raw request with a form."""
    parts = [
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    body = "".join(parts).encode("utf-8", "replace")
    body += b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + file
    body += b"\r\n--b--\r\n"
    lines = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return f"{lines}Content-Type: multipart/form-data; boundary=b\r\n\r\n".encode() + body


def one_request(served: Page, rng: random.Random, bad: list[bytes], digit: bytes) -> object:
    """One of ten kinds of request: its status, or what kind of client it was."""
    kind, explain = rng.randrange(10), "/api/explain"
    asked = {
        3: form("/api/score", STEPS | {"method": "gradcam"}, digit),
        4: form(explain, STEPS, rng.choice(bad)),
        5: form(explain, STEPS, rng.choice(bad)),
        6: form(explain, dict([rng.choice([*WRONG.items()])]), digit),
        7: rng.choice(RAW),
    }
    whole = form(explain, STEPS, digit)
    if kind < 8:
        return served.ask(asked.get(kind, whole))
    if kind == 8:  # it leaves in the middle
        served.ask(whole[: rng.randrange(len(whole))], read=False)
        return "dead"
    with socket.create_connection(("127.0.0.1", served.port), 60) as slow, suppress(OSError):
        for start in range(0, 60, 6):
            slow.sendall(whole[start : start + 6])
            time.sleep(0.05)
    return "slow"


def attack_page(
    folder: Path, counts: Counter[str], broken: list[str], requests: int, clients: int = 8
) -> None:
    """Requests of several clients, slow and dead ones among them, then a stop with some waiting."""
    served, digit = Page(folder), picture("png", (64, 64))
    bad, left, lock = [one for _, one in bad_images()], iter(range(requests)), threading.Lock()

    def client(seed: int) -> None:
        rng = random.Random(seed)
        while next(left, None) is not None:
            try:
                found = one_request(served, rng, bad, digit)
            except OSError as error:
                found = f"closed ({type(error).__name__})"
            with lock:
                counts[str(found)] += 1
                if isinstance(found, int) and found not in ANSWERS:
                    broken.append(f"page: status {found}")

    silent = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(300)]
    _together([threading.Thread(target=client, args=(seed,)) for seed in range(clients)])
    for one in silent:
        one.close()
    if served.ask(b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n") != 200:
        broken.append("page: it does not answer any more")
    answers = _stopped(served, form("/api/score", {"method": "kpca-cam"}, digit))
    counts["answered at the stop"] = len(answers)
    if len(answers) < WAITING or not set(answers) <= {200, 503}:
        broken.append(f"page: at the stop, {answers}")
    if b"Traceback" in (folder / "page.log").read_bytes():
        broken.append(f"page: a traceback in {folder / 'page.log'}")


def _stopped(served: Page, request: bytes) -> list[int | None]:
    """The answers to requests that are there when the server is told to stop."""
    answers = list[int | None]()

    def last() -> None:
        with suppress(OSError):
            answers.append(served.ask(request))

    def stop() -> None:
        time.sleep(0.5)
        os.kill(served.process.pid, signal.SIGTERM)

    _together([threading.Thread(target=one) for one in (*[last] * WAITING, stop)])
    served.process.communicate(timeout=60)
    served.log.close()
    return answers


def _together(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
