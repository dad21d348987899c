"""Torch's random state: seeded for a block, restored after it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unmoved() -> Iterator[None]:
    """Restore the random state of torch, on all devices in use, after the block."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        yield


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch for the block, and restore its random state after it."""
    with unmoved():
        torch.manual_seed(seed)
        yield
