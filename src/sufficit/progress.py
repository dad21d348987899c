"""Progress of long jobs, drawn by tqdm in terminals and notebooks."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

Progress = Callable[[float, float], None]
"""Called as (done, total) while a long job runs."""
DELAY = 5.0  # seconds before a bar appears that nobody asked for


class Tick(Protocol):
    """Moves a progress bar."""

    def __call__(self, done: float, total: float, note: str = "", /) -> None:
        """Show `done` of `total`, and a note behind the bar."""


@contextmanager
def bar(title: str, wanted: bool | Progress | None = None) -> Iterator[Tick | None]:
    """Yield a function (done, total) that moves a progress bar, or None where no bar is drawn.

    True draws it at once, False never, None after five seconds in a terminal or notebook. An
    infinite total is an unknown one. A function of the caller is called instead of a bar.
    """
    if callable(wanted):
        report = wanted
        yield lambda done, total, note="": report(done, total)
        return
    if wanted is False:
        yield None
        return
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # it ships no types

    delay, disable = (0, False) if wanted else (DELAY, None)  # None: unless stderr is a terminal
    with tqdm(desc=title, delay=delay, disable=disable) as drawn:

        def tick(done: float, total: float, note: str = "", /) -> None:
            drawn.total = int(total) if math.isfinite(total) else None
            drawn.set_postfix_str(note, refresh=False)
            drawn.update(int(done) - drawn.n)

        yield None if drawn.disable else tick


def stage(tick: Progress | None, which: int, of: int) -> Progress | None:
    """Return the progress of stage number `which`, out of `of`, as part of the whole job."""
    if tick is None:
        return None
    return lambda done, total: tick(which * total + done, of * total)
