"""The page's memory: few arenas for all threads, and what is free given back at rest."""

import asyncio
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sufficit.errors import UserError
from sufficit.web import line as lines
from sufficit.web import memory
from sufficit.web.line import Line

ON_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
SOURCE = Path(memory.__file__).read_text()
ARENAS = """
import tempfile, threading
def arenas():
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    with tempfile.NamedTemporaryFile() as found:
        file = ctypes.c_void_p(libc.fopen(found.name.encode(), b"w"))
        libc.malloc_info(0, file)
        libc.fclose(file)
        return found.read().decode().count("<heap nr=")
together = threading.Barrier(6)
def hold():
    kept = [bytearray(5000) for _ in range(50)]
    together.wait()
threads = [threading.Thread(target=hold) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(arenas())
"""


def arenas_of_six_threads(before: str, **environment: str) -> int:
    """How many arenas a new process has whose threads hold memory at the same time."""
    script = f"{SOURCE}\n{before}\n{ARENAS}"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    return int(run.stdout)


@ON_GLIBC
def test_threads_share_two_arenas() -> None:
    assert arenas_of_six_threads("assert share_arenas()") <= 2
    assert arenas_of_six_threads("") > 2, "or nothing is shown by the line before"


@ON_GLIBC
def test_who_starts_the_process_may_choose_the_arenas() -> None:
    found = arenas_of_six_threads("assert not share_arenas()", MALLOC_ARENA_MAX="4")
    assert 2 < found <= 4


def resident() -> float:
    text = Path("/proc/self/statm").read_text()
    return int(text.split()[1]) * 4096 / 1e6


@ON_GLIBC
def test_what_is_free_goes_back_to_the_system() -> None:
    held = [bytearray(50_000) for _ in range(1000)]  # 50 MB in small blocks
    last = bytearray(50_000)  # above them, so that they do not go back by themselves
    full = resident()
    del held
    assert memory.give_back()
    assert resident() < full - 40
    assert len(last) == 50_000


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("there is no such library"))
    assert not memory.share_arenas()
    assert not memory.give_back()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When memory was given back; it is, a fifth of a second after the last request."""
    times: list[float] = []
    monkeypatch.setattr(lines, "REST", 0.2)
    monkeypatch.setattr(lines, "give_back", lambda: times.append(time.monotonic()))
    return times


def test_memory_is_given_back_once_after_the_last_request(given: list[float]) -> None:
    async def ask() -> float:
        line = Line(3)
        for _ in range(4):
            with line.place():
                pass
            line.rest()
            await asyncio.sleep(0)
        ended = time.monotonic()
        await asyncio.sleep(0.6)
        return ended

    ended = asyncio.run(ask())
    assert len(given) == 1
    assert given[0] - ended > 0.1


def test_memory_is_kept_while_a_place_is_taken(given: list[float]) -> None:
    async def ask() -> None:
        line = Line(3)
        with line.place():
            line.rest()
            await asyncio.sleep(0.4)
            assert given == []
        line.rest()
        await asyncio.sleep(0.4)

    asyncio.run(ask())
    assert len(given) == 1


def test_every_request_ends_in_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.testclient import TestClient

    from sufficit import Classifier
    from sufficit.web import Limits, make_app, open_studio

    rests: list[int] = []
    monkeypatch.setattr(Line, "rest", lambda line: rests.append(line.taken))
    studio = open_studio(Classifier.load("sufficit:digits"), "digits")
    app = make_app(studio, Limits(waiting=0))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        example = client.get("/api/example").content
        assert client.post("/api/explain", files={"file": example}).status_code == 200
        assert rests == [0]
        assert client.post("/api/explain", files={"file": b"no image"}).status_code == 415
        assert rests == [0, 0]


def test_the_command_bounds_the_arenas_before_the_model_is_loaded(
    sufficit, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(memory, "share_arenas", lambda: order.append("arenas"))

    def load(*_: object) -> None:
        order.append("model")
        raise UserError("enough")

    monkeypatch.setattr("sufficit.parsing.classifier_from", load)
    assert sufficit("serve", "--model", "sufficit:digits", "--port", "0").code == 2
    assert order == ["arenas", "model"]
