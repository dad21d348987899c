"""A soak of the page: many requests, bad ones among them, and what the server's memory does.

    python benchmarks/page.py --requests 500 --clients 8

Errors of ours are answers that no such request should get, and connections that end without one.
"""

import argparse
import http.client
import io
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from PIL import Image

BOUNDARY = "soak"
PARTS = 5  # after each the memory is looked at


def picture(seed: int) -> bytes:
    """A PNG of noise, another one for each seed."""
    side, file = random.Random(seed).randrange(40, 400), io.BytesIO()
    Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side * side)).save(
        file, "png"
    )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--model", default="sufficit:digits")
    options = parser.parse_args()
    command = [sys.executable, "-m", "sufficit.cli", "serve", "--port", "0"]
    server = subprocess.Popen(
        [*command, "--model", options.model], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(re.findall(r":(\d+);", server.stdout.readline())[0])
        client = Client(port)
        report(server.pid, client, options.requests, options.clients)
    finally:
        server.terminate()


def report(pid: int, client: Client, requests: int, clients: int) -> None:
    print(f"at the start      {megabytes(pid):7.0f} MB")
    _, errors = soak(client, 100, clients, seed=PARTS)
    print(f"after 100 to warm {megabytes(pid):7.0f} MB, errors of ours: {len(errors)}")
    begun, asked, errors = time.perf_counter(), Counter[str](), []
    for part in range(PARTS):
        names, wrong = soak(client, requests // PARTS, clients, seed=part)
        asked.update(names)
        errors += wrong
        print(f"after {requests // PARTS} more    {megabytes(pid):7.0f} MB")
    seconds = time.perf_counter() - begun
    rate = f"{requests / seconds:.1f} a second"
    print(f"{requests} requests from {clients} clients in {seconds:.1f} s: {rate}")
    print(", ".join(f"{name} {n}" for name, n in asked.most_common()))
    print(f"errors of ours: {len(errors)}")
    for error in errors[:10]:
        print("  ", error)
    print(f"40 at once: {dict(burst(client, 40))}")
    time.sleep(1)
    print(f"places still taken: {client.health()['taken']}, {megabytes(pid):.0f} MB")


if __name__ == "__main__":
    main()
