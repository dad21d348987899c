"""One run at a time owns a folder; a killed process gives it back."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from sufficit import lock
from sufficit.errors import UserError
from sufficit.lock import LOCK, locked

HOLD = """
import sys, time
from pathlib import Path
from sufficit.lock import locked
with locked(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""


def refusal_in_another_thread(folder: Path) -> str:
    found: list[str] = []

    def other() -> None:
        with pytest.raises(UserError) as error, locked(folder):
            pass
        found.append(str(error.value))

    thread = Thread(target=other)
    thread.start()
    thread.join()
    return found[0]


def test_a_folder_is_locked_once_at_a_time_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with locked(folder):
        with locked(folder):  # by the same thread, as a command and its run
            assert f"another run is writing to {folder}: " in refusal_in_another_thread(folder)
        refusal = refusal_in_another_thread(folder)
        assert refusal.endswith("wait until it ends, or choose another --out")
        (folder / "kept").touch()
    assert [path.name for path in folder.iterdir()] == ["kept"]
    (folder / "kept").unlink()
    folder.rmdir()
    folder.parent.rmdir()
    with pytest.raises(UserError, match="stop"), locked(folder):
        raise UserError("stop")
    assert [*tmp_path.iterdir()] == []


def test_two_spellings_of_a_folder_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with locked(Path("run")), locked(tmp_path / "run"):
        assert "another run is writing to" in refusal_in_another_thread(tmp_path / "x/../run")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file, folder = tmp_path / "file", tmp_path / "run"
    with pytest.raises(UserError, match=f"{file} could not be made"), locked(file):
        pass
    (folder / LOCK).mkdir(parents=True)
    reason = f"cannot lock {folder} .*: choose another --out"
    with pytest.raises(UserError, match=reason), locked(folder):
        pass


@pytest.mark.processes
def test_a_killed_process_gives_the_folder_back_at_once(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(lock.__file__).parents[1])}
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        with pytest.raises(UserError, match="another run is writing"), locked(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / LOCK).exists()
    with locked(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()
