"""A progress bar for whatever takes longer than a few seconds."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from sufficit.perturbation.types import Progress

PATIENCE = 5.0  # seconds of silence before a bar shows by itself


class Tick(Protocol):
    """Tells a bar how far a job is, and what there is to say of it."""

    def __call__(self, done: float, total: float, note: str = "", /) -> None:
        """`done` of `total`."""


@contextmanager
def bar(title: str, wanted: bool | Progress | None = None) -> Iterator[Tick | None]:
    """A function (done, total) that draws a bar: at once, never, or (None) when it takes long.

    A total of infinity is one that is not known: what is done is counted. A function of the
    caller's own is handed through.
    """
    if callable(wanted):
        told = wanted
        yield lambda done, total, note="": told(done, total)
        return
    if wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    bars = Bars(*columns, *times, console=Console(stderr=True))
    task = bars.add_task(title, total=None, note="")
    begun = time.monotonic()

    def tick(done: float, total: float, note: str = "", /) -> None:
        if wanted or time.monotonic() - begun > PATIENCE:
            bars.start()
        known = total if math.isfinite(total) else None
        bars.update(task, completed=done, total=known, note=note)

    if wanted:
        bars.start()
    try:
        yield tick
    finally:
        if bars.live.is_started:
            bars.stop()


def stage(tick: Progress | None, which: int, of: int) -> Progress | None:
    """The progress of one of several stages as part of the whole."""
    if tick is None:
        return None
    return lambda done, total: tick(which * total + done, of * total)
