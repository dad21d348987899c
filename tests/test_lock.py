"""One run at a time owns a folder; whoever crashes gives it back."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from object_server import ObjectServer
from sufficit import lock
from sufficit.errors import UserError
from sufficit.files import place
from sufficit.lock import LOCK, _read, check_owned, owning

HOLD = """
import sys, time
from sufficit import lock
from sufficit.files import place
lock.RENEW = 0.2
with lock.owning(place(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""


def hold(folder: str) -> "subprocess.Popen[str]":
    """Another process that owns the folder."""
    source = str(Path(lock.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source}
    words = [sys.executable, "-c", HOLD, folder]
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "mine\n"
    return process


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, seconds in {"RENEW": 0.2, "LOOK": 0.05, "LOST": 1.5}.items():
        monkeypatch.setattr(lock, name, seconds)
    yield
    assert not lock._held
    assert not lock._lost


def test_a_folder_is_owned_once_at_a_time_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with owning(folder), owning(folder):  # by the same thread, as a command and its run
        assert json.loads((folder / LOCK).read_text())["process"] == os.getpid()
        found: list[str] = []

        def other() -> None:
            with pytest.raises(UserError) as error, owning(folder):
                pass
            found.append(str(error.value))

        thread = Thread(target=other)
        thread.start()
        thread.join()
        assert f"belongs to a run (process {os.getpid()} on " in found[0]
        assert ", since 2" in found[0]
        assert "wait for it, or choose another --out" in found[0]
        (folder / "kept").touch()
    assert [path.name for path in folder.iterdir()] == ["kept"]
    (folder / "kept").unlink()
    folder.rmdir()
    folder.parent.rmdir()
    with pytest.raises(UserError, match="stop"), owning(folder):
        raise UserError("stop")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.processes
def test_a_killed_process_gives_the_folder_back_at_once(tmp_path: Path) -> None:
    with hold(str(tmp_path)) as process:
        with pytest.raises(UserError, match=f"process {process.pid} on "), owning(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / LOCK).exists()
    with owning(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*waiting up to")
def test_on_object_storage_a_live_owner_is_named_and_a_dead_one_replaced(
    bucket: str, fast: None
) -> None:
    folder = place(f"{bucket}/run")
    with hold(str(folder)) as process:
        with pytest.raises(UserError, match=f"process {process.pid} on "), owning(folder):
            pass
        process.send_signal(signal.SIGKILL)
    start = time.monotonic()
    with owning(folder):  # at once, because the process of this machine has ended
        assert time.monotonic() - start < lock.LOST
        assert (_read(folder / LOCK) or {})["process"] == os.getpid()
        time.sleep(3 * lock.RENEW)
        check_owned(folder)
    assert _read(folder / LOCK) is None


def elsewhere(folder: Path) -> None:
    """The lock of a run on another machine, which nobody renews."""
    other = {"host": "node-7", "process": 1, "since": "2026-01-01 10:00:00 +0000"}
    lock._write(folder / LOCK, other | {"machine": "another", "token": "x"})


def test_an_owner_elsewhere_that_is_not_renewed_is_replaced_after_a_while(
    bucket: str, fast: None
) -> None:
    folder = place(f"{bucket}/run")
    elsewhere(folder)
    start = time.monotonic()
    warned = pytest.warns(UserWarning, match="process 1 on node-7.*waiting up to")
    with warned, owning(folder):
        assert time.monotonic() - start >= lock.LOST


@pytest.mark.filterwarnings("ignore:.*waiting up to")
def test_who_was_taken_for_dead_learns_that_it_lost_the_folder(bucket: str, fast: None) -> None:
    folder = place(f"{bucket}/run")
    with owning(folder):
        elsewhere(folder)
        time.sleep(4 * lock.RENEW)
        with pytest.raises(UserError, match="another run took over"):
            check_owned(folder)
    assert (_read(folder / LOCK) or {})["host"] == "node-7"  # that of the other is not deleted


def test_servers_that_know_no_conditions_serve_as_well(
    bucket: str, fast: None, object_server: ObjectServer
) -> None:
    body = b"<Error><Code>NotImplemented</Code><Message>A header.</Message></Error>"
    object_server.faults.append(
        lambda asked: ("501 Not Implemented", body) if "HTTP_IF_NONE_MATCH" in asked else None
    )
    with owning(place(f"{bucket}/run")):
        assert object_server.keys(f"{bucket}/run") == [LOCK]
    assert object_server.keys(f"{bucket}/run") == []


@pytest.mark.filterwarnings("ignore:.*waiting up to")
def test_a_disk_without_locks_is_owned_by_a_renewed_file(
    tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    elsewhere(tmp_path)
    with owning(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert not (tmp_path / LOCK).exists()
