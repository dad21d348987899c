"""A list of steps that several processes work on, within a time, and that resumes where it was.

A step is done when its mark `done/NAME.json` exists. Processes on one machine share a list: each
takes the next step whose needs are done and that nobody holds. A step begins only if its estimated
time is left; one that takes a `Clock` may end early by `Clock.check` and resumes the next time.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from table_results import write_json

WAIT = 0.5  # seconds, while other processes hold all steps that could begin


class OutOfTimeError(Exception):
    """The time is over; what is written stays."""


class Clock:
    """How much time is left."""

    def __init__(self, seconds: float | None) -> None:
        self.end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return float("inf") if self.end is None else self.end - time.monotonic()

    def check(self, done: float = 0, total: float = 0) -> None:
        """Raise if the time is over. It may be given as `progress`, which is called often."""
        if self.left < 0:
            raise OutOfTimeError


@dataclass(frozen=True)
class Step:
    """A part of a run that is done once; what it returns is stored in its mark."""

    name: str
    run: Callable[[Clock], Mapping[str, Any] | None]
    needs: tuple[str, ...] = ()
    seconds: float = 0.0  # about, on an H200: it begins only if so much time is left


def mark_of(out: Path, name: str) -> Path:
    """Return the file that says that a step is done."""
    return out / "done" / f"{name}.json"


def facts_of(out: Path, name: str) -> dict[str, Any]:
    """Return what a finished step said."""
    found: dict[str, Any] = json.loads(mark_of(out, name).read_text())
    return found


def work(steps: Sequence[Step], out: Path, clock: Clock) -> bool:
    """Do the steps that are missing, as long as there is time; return whether all are done."""
    for folder in ("done", "locks"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    while True:
        missing = [step for step in steps if not mark_of(out, step.name).exists()]
        if not missing:
            return True
        ready = [one for one in missing if all(mark_of(out, need).exists() for need in one.needs)]
        fitting = [one for one in ready if one.seconds <= clock.left]
        try:
            began = any(_was_done(step, out, clock) for step in fitting)
        except OutOfTimeError:
            return False
        if began:
            continue
        # What others hold may make further steps ready; without others nothing changes any more.
        if clock.left < 0 or not any(_is_held(out, step.name) for step in missing):
            return all(mark_of(out, step.name).exists() for step in steps)
        time.sleep(WAIT)


def _was_done(step: Step, out: Path, clock: Clock) -> bool:
    """Do a step unless another process holds it; whether it was done."""
    with _held(out, step.name) as mine:
        if not mine or mark_of(out, step.name).exists():
            return False
        print(f"{step.name}: begins", flush=True)
        since, start = time.time(), time.monotonic()
        try:
            facts = dict(step.run(clock) or {})
        except OutOfTimeError:
            _note(out, step.name, since)
            print(f"{step.name}: the time is over", flush=True)
            raise
        spans = [*_note(out, step.name, since)]
        write_json(mark_of(out, step.name), facts | {"spans": spans})
        print(f"{step.name}: done in {time.monotonic() - start:.1f} s", flush=True)
        return True


def _note(out: Path, name: str, since: float) -> list[list[float]]:
    """Add the time that a step was worked on; return all such times, as seconds since 1970."""
    path = out / "done" / f"{name}.spans"
    spans: list[list[float]] = json.loads(path.read_text()) if path.exists() else []
    spans.append([round(since, 1), round(time.time(), 1)])
    path.write_text(json.dumps(spans))
    return spans


@contextmanager
def _held(out: Path, name: str) -> Iterator[bool]:
    lock = FileLock(out / "locks" / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _is_held(out: Path, name: str) -> bool:
    with _held(out, name) as mine:
        return not mine


def minutes_of(out: Path) -> float:
    """Return the minutes in which at least one step was worked on.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "done").mkdir()
    >>> for name, spans in {"a": [[0, 60]], "b": [[30, 90], [300, 360]]}.items():
    ...     _ = (folder / "done" / f"{name}.spans").write_text(json.dumps(spans))
    >>> minutes_of(folder)
    2.5
    """
    spans = [
        span for path in (out / "done").glob("*.spans") for span in json.loads(path.read_text())
    ]
    total, reached = 0.0, float("-inf")
    for since, ended in sorted(spans):
        total += max(0.0, ended - max(since, reached))
        reached = max(reached, ended)
    return total / 60


def side_by_side(command: Sequence[str], processes: int) -> None:
    """Run a command several times at once, and wait for all; end if one of them fails."""
    started = [subprocess.Popen([sys.executable, *command]) for _ in range(processes)]
    codes = [one.wait() for one in started]
    if any(codes):
        sys.exit(f"{sum(map(bool, codes))} of {processes} processes failed: see above")
