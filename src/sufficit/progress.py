"""Progress of long jobs: a bar in terminals and notebooks, lines in log files."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Protocol

Progress = Callable[[float, float], None]
"""Called as (done, total) while a long job runs."""
DELAY = 5.0  # seconds before a bar appears that nobody asked for
LOG_EVERY = 30.0  # seconds between lines where a bar can't move, as in a log file


class Tick(Protocol):
    """Moves a progress bar."""

    def __call__(self, done: float, total: float, note: str = "", /) -> None:
        """Show `done` of `total`, and a note behind the bar."""


def duration(seconds: float) -> str:
    """A time in words.

    >>> [duration(s) for s in (8, 75, 1440, 7300, 200_000)]
    ['8 seconds', '75 seconds', '24 minutes', '2 hours', '2.3 days']
    """
    units = (("days", 86400), ("hours", 3600), ("minutes", 60))
    for unit, size in units:
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.0f} seconds"


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook.

    >>> in_notebook()
    False
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


# Images are counted where they pass through a model, so that no function on the way there has to
# hand a bar on.
_counting: ContextVar[Callable[[int], None] | None] = ContextVar("counting", default=None)


@contextmanager
def counted(count: Callable[[int], None] | None) -> Iterator[None]:
    """Call `count` with the number of masked images, each time some have passed the model."""
    before = _counting.set(count)
    try:
        yield
    finally:
        _counting.reset(before)


def passed(images: int) -> None:
    """Count images that have passed the model."""
    count = _counting.get()
    if count is not None:
        count(images)


@contextmanager
def bar(title: str, wanted: bool | Progress | None = None) -> Iterator[Tick | None]:
    """Yield a function (done, total) that moves a progress bar, or None where no bar is drawn.

    True draws it at once, False never, None after five seconds in a terminal or notebook, and
    elsewhere a line every half minute. An infinite total is an unknown one. A function of the
    caller is called instead of a bar.
    """
    if callable(wanted):
        report = wanted
        yield lambda done, total, note="": report(done, total)
        return
    if wanted is False:
        yield None
        return
    if not wanted and not in_notebook() and not sys.stderr.isatty():
        yield _lines(title)
        return
    if in_notebook() and find_spec("ipywidgets"):
        from tqdm.notebook import tqdm  # type: ignore[import-untyped]  # it ships no types
    else:
        from tqdm.std import tqdm  # type: ignore[import-untyped]  # it ships no types

    with tqdm(desc=title, delay=0 if wanted else DELAY) as drawn:

        def tick(done: float, total: float, note: str = "", /) -> None:
            drawn.total = int(total) if math.isfinite(total) else None
            drawn.set_postfix_str(note, refresh=False)
            drawn.update(int(done) - drawn.n)

        yield tick


def _lines(title: str) -> Tick:
    """Write a line to stderr from time to time: how much is done, and the time left."""
    start = last = time.monotonic()
    before: float | None = None

    def tick(done: float, total: float, note: str = "", /) -> None:
        nonlocal last, before
        before = done if before is None else before  # what an earlier run did took no time now
        now = time.monotonic()
        if now - last < LOG_EVERY:
            return
        last = now
        words = f"{title}: {int(done)}"
        if math.isfinite(total):
            words += f" of {int(total)}"
            if done > before:
                left = (now - start) * (total - done) / (done - before)
                words += f", {left / 60:.0f} minutes left" if left > 90 else f", {left:.0f} s left"
        sys.stderr.write(f"{words}{', ' if note else ''}{note}\n")
        sys.stderr.flush()

    return tick


@contextmanager
def counting_bar(title: str, total: int, wanted: bool | Progress | None = None) -> Iterator[None]:
    """A bar of masked images that pass the model inside, of `total` at most."""
    done = 0
    with bar(title, wanted) as tick:

        def count(images: int) -> None:
            nonlocal done
            done += images
            if tick:
                tick(min(done, total), total)

        with counted(count):
            yield
        if tick:  # equal masks were sent once, so that less was done than forecast
            tick(total, total)
