"""Streams of a GPU that is not there: their work takes a moment."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class Stream:
    """A stream whose work takes a moment."""

    def __init__(self, *_: object) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        time.sleep(0.02)


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let streams need no GPU."""
    current = threading.local()

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        current.stream = stream
        yield

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current.stream)
