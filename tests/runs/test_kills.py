"""A run that is killed at any moment resumes and ends with the same rows."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from small_runs import assert_same_rows, config_for, run_small, write_photos
from sufficit.files import is_unfinished
from sufficit.runs.config import write_toml

pytestmark = [pytest.mark.processes, pytest.mark.slow]
METHODS = ("gradcam", "layercam", "random", "center")
SCRIPT = """
import os, signal, sys, traceback
from pathlib import Path
from threading import Timer
from sufficit import files
from sufficit.runs import engine
from sufficit.runs.config import config_from, read_toml
from sufficit.runs.job import make_job

def end():
    os.kill(os.getpid(), signal.SIGKILL)

def go(kind, when):
    usual, count = files.Path.replace, [0]

    def replace(part, path):  # the moment at which a file gets its name
        count[0] += 1
        if kind == "half" and count[0] == when:
            part.write_bytes(part.read_bytes()[:50])
            end()
        found = usual(part, path)
        if kind == "whole" and count[0] == when:
            end()
        return found

    files.Path.replace = replace
    job = make_job(config_from(read_toml(Path("RUN.toml"))), unit=2)
    if kind == "seconds":
        Timer(when, end).start()
    engine.run(job, Path("out"), progress=False)

for line in sys.stdin:  # each run in a process of its own, which need not import all this again
    place, kind, when = line.rsplit(maxsplit=2)
    if (child := os.fork()) == 0:
        try:
            os.chdir(place)
            go(kind, float(when))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
Start = Callable[[Path, str, float], int]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Run in a process of its own, to be killed; return its exit code."""
    source = str(Path(sys.modules["sufficit"].__file__ or "").parents[1])
    words = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    # One thread as in the tests: another number may add in another order.
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, text=True) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None

        def started(place: Path, kind: str, when: float) -> int:
            starter.stdin.write(f"{place} {kind} {when}\n")
            starter.stdin.flush()
            return int(starter.stdout.readline())

        yield started


@pytest.mark.parametrize("alpha_min", [0.5, "search"])
def test_a_run_killed_again_and_again_ends_with_the_same_rows(
    start: Start, tmp_path: Path, alpha_min: float
) -> None:
    photos = write_photos(tmp_path)
    config = config_for(photos, alpha_min=alpha_min, save_heatmaps=True)
    write_toml(tmp_path / "RUN.toml", config)
    run_small(config, tmp_path / "whole", unit=2)
    chance = random.Random(str(alpha_min))
    moments = [("half", 3.0), ("whole", 5.0), ("half", 8.0), ("whole", 12.0)]
    moments += [("seconds", chance.uniform(0.1, 0.6)), ("half", 4.0)]
    done = tmp_path / "out" / "run.json"  # a finished run is not started again
    codes = [start(tmp_path, *moment) for moment in moments if not done.exists()]
    assert codes[:4] == [-signal.SIGKILL] * 4
    for _ in range(3):
        if (tmp_path / "out" / "run.json").exists():
            break
        assert start(tmp_path, "never", 0) == 0
    assert_same_rows(tmp_path / "whole", tmp_path / "out", METHODS)
    names = ("summary.json", "pairs.csv", "shown.safetensors")
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not [p for p in (tmp_path / "out").rglob("*") if is_unfinished(p.name)]
    assert not (tmp_path / "out" / "units").exists()
