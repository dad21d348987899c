"""Torch's randomness by seed, and the caller's left where it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unmoved() -> Iterator[None]:
    """Torch's generators, on all devices in use, are after the block where they were before it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        yield


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's own randomness by seed inside, as if nothing had been drawn outside."""
    with unmoved():
        torch.manual_seed(seed)
        yield
