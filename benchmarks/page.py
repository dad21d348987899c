"""A soak of the page: many requests, bad ones among them, and what the server's memory does.

    python benchmarks/page.py --requests 2000 --clients 8 --out benchmarks/results/page-cpu.json

Errors of ours are answers that no such request should get, and connections that end without one.
Memory is looked at after every part of the requests, at once and after REST seconds; the first
part warms the server up. It is flat where at rest the later half of the other parts has no more
than FLAT MB over the earlier half on average: 2,000 requests that leave 60 kB each would show. With
MALLOC_ARENA_MAX=2 in the environment the C library keeps less freed memory for itself.
"""

import argparse
import http.client
import io
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from PIL import Image

from sufficit.provenance import provenance

BOUNDARY = "soak"
PARTS = 8  # after each the memory is looked at
FLAT = 60.0  # MB: glibc's default arenas kept 48 MB of freed memory in 2,000 requests
REST = 2.5
PHOTOS = 12


def picture(seed: int) -> bytes:
    """A PNG of noise, another one for each seed."""
    side, file = random.Random(seed).randrange(40, 400), io.BytesIO()
    Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side * side)).save(
        file, "png"
    )
    return file.getvalue()


@cache
def photo(number: int) -> bytes:
    """A smooth picture of up to 18 million pixels, as JPEG or PNG of up to 10 MB."""
    chance, file = random.Random(number), io.BytesIO()
    size = chance.randrange(1000, 4500), chance.randrange(700, 4000)
    noise = Image.frombytes("RGB", (64, 64), chance.randbytes(3 * 64 * 64))
    noise.resize(size, Image.Resampling.BILINEAR).save(file, chance.choice(["jpeg", "png"]))
    return file.getvalue()


def form(file: bytes | None, **fields: str) -> bytes:
    parts = []
    for name, value in fields.items():
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
        parts.append(f"{head}{value}\r\n".encode())
    if file is not None:
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
        parts.append(head.encode() + file + b"\r\n")
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


class Client:
    """Asks a server of this machine."""

    def __init__(self, port: int) -> None:
        self.port = port

    def post(self, path: str, content: bytes, **headers: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
            connection.request("POST", path, content, kind | headers)
            answer = connection.getresponse()
            found = json.loads(answer.read())
            assert answer.status == 200 or list(found) == ["error"], found
            return answer.status
        finally:
            connection.close()

    def health(self) -> dict[str, int]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/api/health")
        found: dict[str, int] = json.loads(connection.getresponse().read())
        connection.close()
        return found

    def vanish(self, content: bytes, share: float) -> int:
        """Send a part of a request, or all of it, and go away without reading the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as line:
            head = (
                f"POST /api/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
                f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n"
            )
            line.sendall(head.encode() + content[: int(share * len(content))])
            time.sleep(0.02)
        return 0


Ask = Callable[[Client, int], int]
KINDS: dict[str, tuple[Ask, int, int]] = {  # how to ask, the answer wanted, how often
    "explain": (lambda c, i: c.post("/api/explain", form(picture(i))), 200, 30),
    "score": (lambda c, i: c.post("/api/score", form(picture(i), method="gradcam")), 200, 30),
    "photo": (lambda c, i: c.post("/api/explain", form(photo(i % PHOTOS))), 200, 15),
    "scored photo": (
        lambda c, i: c.post("/api/score", form(photo(i % PHOTOS), method="layercam")),
        200,
        10,
    ),
    "not an image": (lambda c, i: c.post("/api/explain", form(b"hello" * (i + 1))), 415, 6),
    "cut off": (lambda c, i: c.post("/api/explain", form(picture(i)[:-900])), 400, 6),
    "too large": (lambda c, i: c.post("/api/explain", form(bytes(11_000_000))), 413, 4),
    "empty": (lambda c, i: c.post("/api/explain", form(b"")), 400, 4),
    "no file": (lambda c, i: c.post("/api/explain", form(None)), 422, 4),
    "wrong field": (lambda c, i: c.post("/api/score", form(picture(i), method="?")), 422, 4),
    "NaN": (lambda c, i: c.post("/api/explain", form(picture(i), alpha_min="nan")), 422, 4),
    "another host": (lambda c, i: c.post("/api/explain", form(b"x"), Host="evil.example"), 400, 2),
    "vanished half-way": (lambda c, i: c.vanish(form(picture(i), method="gradcam"), 0.5), 0, 3),
    "vanished": (lambda c, i: c.vanish(form(picture(i), method="gradcam"), 1), 0, 3),
}


def soak(client: Client, requests: int, clients: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Ask so often from so many threads; what was asked, and the errors of ours."""
    chance = random.Random(seed)
    names = chance.choices(list(KINDS), [often for _, _, often in KINDS.values()], k=requests)
    work = list(enumerate(names))
    errors: list[str] = []

    def run() -> None:
        while work:
            try:
                number, name = work.pop()
            except IndexError:
                return
            ask, wanted, _ = KINDS[name]
            try:
                came = ask(client, number)
            except Exception as error:
                errors.append(f"{name}: {type(error).__name__}: {error}")
                continue
            if came != wanted:
                errors.append(f"{name}: {came}, not {wanted}")

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Counter(names), errors


def burst(client: Client, n: int) -> Counter[int]:
    """So many at once, more than there are places."""
    content, answers = form(picture(0), method="gradcam", value_step="0.01"), Counter[int]()

    def run() -> None:
        answers[client.post("/api/score", content)] += 1

    threads = [threading.Thread(target=run) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def megabytes(pid: int) -> float:
    """The memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) / 1024


@dataclass(frozen=True)
class Found:
    """What a soak showed."""

    asked: dict[str, int]
    errors: list[str]
    seconds: float
    at_the_start: float  # MB, as are the next
    after_each_part: list[float]
    at_rest: list[float]  # after that
    at_once: dict[int, int]  # answers to 40 requests at once
    after_that: float
    places_still_taken: int

    @property
    def growth(self) -> float:
        """Of the memory at rest, once the server is warm."""
        return growth(self.at_rest[1:])

    @property
    def flat(self) -> bool:
        """Whether memory stays."""
        return self.growth <= FLAT


def growth(points: list[float]) -> float:
    """The mean of the later half over that of the earlier one.

    >>> growth([900.0, 902.0, 903.0, 905.0])
    3.0
    """
    half = len(points) // 2
    return statistics.mean(points[-half:]) - statistics.mean(points[:half])


def look(pid: int, client: Client, requests: int, clients: int) -> Found:
    """Soak a server, and look at its memory now and then."""
    for number in range(PHOTOS):
        photo(number)
    asked, errors, busy, rest, seconds = Counter[str](), list[str](), list[float](), [], 0.0
    start = megabytes(pid)
    print(f"at the start   {start:7.0f} MB")
    for part in range(PARTS):
        begun = time.perf_counter()
        names, wrong = soak(client, requests // PARTS, clients, seed=part)
        seconds += time.perf_counter() - begun
        asked.update(names)
        errors += wrong
        busy.append(megabytes(pid))
        rest.append(rested(pid))
        print(f"after {asked.total():8} {busy[-1]:7.0f} MB, at rest {rest[-1]:.0f}", flush=True)
    answers = dict(burst(client, 40))
    after, taken = rested(pid), client.health()["taken"]
    return Found(dict(asked), errors, seconds, start, busy, rest, answers, after, taken)


def rested(pid: int) -> float:
    """The memory of a process that has had nothing to do for a while."""
    time.sleep(REST)
    return megabytes(pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--model", default="sufficit:digits")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    command = [sys.executable, "-m", "sufficit.cli", "serve", "--port", "0"]
    server = subprocess.Popen(
        [*command, "--model", options.model], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(re.findall(r":(\d+);", server.stdout.readline())[0])
        found = look(server.pid, Client(port), options.requests, options.clients)
    finally:
        server.terminate()
    report(found, options.clients)
    if options.out:
        arenas = os.environ.get("MALLOC_ARENA_MAX", "glibc's default")
        config = {"argv": sys.argv[1:], "MALLOC_ARENA_MAX": arenas, "cores": os.cpu_count()}
        facts = provenance(config, torch.device("cpu"), torch.float32)
        content = facts | {"results": asdict(found) | {"growth": found.growth, "flat": found.flat}}
        options.out.write_text(json.dumps(content, indent=2) + "\n")
    sys.exit(0 if found.flat and not found.errors else 1)


def report(found: Found, clients: int) -> None:
    n = sum(found.asked.values())
    rate = f"{n / found.seconds:.1f} a second"
    print(f"{n} requests from {clients} clients in {found.seconds:.1f} s: {rate}")
    print(", ".join(f"{name} {n}" for name, n in sorted(found.asked.items())))
    print(f"errors of ours: {len(found.errors)}")
    for error in found.errors[:10]:
        print("  ", error)
    print(f"40 at once: {found.at_once}, then {found.after_that:.0f} MB")
    print(f"places still taken: {found.places_still_taken}")
    verdict = "flat" if found.flat else "NOT flat"
    print(f"memory is {verdict}: the later half has {found.growth:+.1f} MB over the earlier")


if __name__ == "__main__":
    main()
