"""The line before the model: one worker, and a bounded number of places."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from sufficit.progress import Progress
from sufficit.web.memory import give_back
from sufficit.web.refusals import GoneError, RefusedError

REST = 1.0  # seconds after the last request, when memory goes back to the system
T = TypeVar("T")
Job = Callable[[Progress], T]
"""Work for the model; it calls what it is given now and then, which raises when it may stop."""


class Line:
    """Requests take a place before they are read, and are worked on one after another."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._taken = 0
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="sufficit-model")
        self._resting: asyncio.TimerHandle | None = None

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return self._taken

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for as long as the block runs; refused where none is free."""
        with self._lock:
            if self._taken >= self.places:
                raise RefusedError(503, f"{self._taken} requests wait here already: try again soon")
            self._taken += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken -= 1

    async def work(self, job: Job[T], gone: Awaitable[None]) -> T:
        """What the job returns; where `gone` comes first, the job is dropped or stopped."""
        stopped = threading.Event()

        def tick(done: float, total: float) -> None:
            if stopped.is_set():
                raise GoneError

        leaving = asyncio.ensure_future(gone)
        inner = self._worker.submit(job, tick)
        future = asyncio.wrap_future(inner)
        try:
            awaited: set[asyncio.Future[Any]] = {future, leaving}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if future.done():
                return future.result()
            stopped.set()
            if not inner.cancel():
                await asyncio.wait({future})  # the place is free when the model is
                future.exception()  # looked at, or asyncio complains
            raise GoneError
        finally:
            stopped.set()
            inner.cancel()
            leaving.cancel()

    def rest(self) -> None:
        """Give memory back to the system once nobody has asked for a while."""
        if self._resting is not None:
            self._resting.cancel()
        self._resting = asyncio.get_running_loop().call_later(REST, self._give_back)

    def _give_back(self) -> None:
        if not self._taken:
            self._worker.submit(give_back)
