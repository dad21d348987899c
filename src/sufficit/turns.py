"""Units that share a GPU: Python works on one unit while the GPU computes another.

One thread at a time runs Python. It gives its turn away only where it waits for results of the GPU,
so that hooks, modes and caches of a model never meet two threads. Each thread queues its work in a
stream of its own: it waits for its own results, while the GPU goes on with those of the others.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from threading import Event, Lock
from typing import TypeVar

import torch

IN_TURN = 2  # units at a time
Asked = TypeVar("Asked")
Found = TypeVar("Found")

_turn: "ContextVar[Lock | None]" = ContextVar("turn", default=None)


@contextmanager
def others_turn() -> Iterator[None]:
    """Let another thread have the turn inside the block, which must only wait."""
    lock = _turn.get()
    if lock is None:
        yield
        return
    lock.release()
    try:
        yield
    finally:
        lock.acquire()


def wait_for_results() -> None:
    """Wait until the GPU has computed what this thread queued; others have the turn meanwhile."""
    if _turn.get() is not None:
        with others_turn():
            torch.cuda.current_stream().synchronize()


def mark() -> "torch.cuda.Event | None":
    """Mark what is queued on the GPU so far; None without a GPU, where nothing is queued."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def wait_for(event: "torch.cuda.Event | None") -> None:
    """Wait until the GPU has computed what was queued at a mark; others have the turn meanwhile."""
    if event is not None:
        with others_turn():
            event.synchronize()


def can_take_turns(device: torch.device) -> bool:
    """Whether threads can share a device, as no setting holds for this thread alone."""
    settings = torch.is_autocast_enabled(device.type) or torch.is_inference_mode_enabled()
    return device.type == "cuda" and not settings


def in_turns(
    compute: Callable[[Asked], Found], asked: Iterable[Asked], device: torch.device
) -> Iterator[Found]:
    """What `compute` returns for each item, in order, with a few in work at a time.

    The first one is computed alone: it compiles, and makes what all others share.
    """
    torch.cuda.synchronize(device)  # what was queued so far is read by other streams
    turn = Lock()
    streams = [torch.cuda.Stream(device) for _ in range(IN_TURN)]
    free = deque(streams)

    def work(one: Asked, before: Event | None, begun: Event) -> Found:
        if before is not None:
            before.wait()  # units are begun in their order, in which images are read ahead
        turn.acquire()
        begun.set()
        token = _turn.set(turn)
        stream = free.popleft()
        try:
            with torch.cuda.stream(stream):
                found = compute(one)
                wait_for_results()
            return found
        finally:
            free.append(stream)
            _turn.reset(token)
            turn.release()

    waiting: deque[Future[Found]] = deque()
    before: Event | None = None
    is_first = True
    with ThreadPoolExecutor(IN_TURN) as pool:
        try:
            for one in asked:
                begun = Event()
                # A copy, because whoever counts progress is known by the context.
                waiting.append(pool.submit(copy_context().run, work, one, before, begun))
                before = begun
                if is_first or len(waiting) == IN_TURN:
                    yield waiting.popleft().result()
                is_first = False
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
