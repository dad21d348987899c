"""The random state of Python, numpy and torch: seeded for a block, restored after it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def unmoved() -> Iterator[None]:
    """Restore the random state after the block, torch's on all devices in use.

    Lightning's isolate_rng does not restore it after an error.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    plain, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002  # users draw from it
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(numbers)  # noqa: NPY002


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch, numpy and Python for the block, and restore the random state after it."""
    with unmoved():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  # as libraries draw from it
        yield


def random_state() -> list[object]:
    """The state of every generator that `seeded` seeds; equal lists are equal states."""
    known: Any = np.random.get_state()  # noqa: NPY002
    _, numbers, *places = known
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return [
        random.getstate(),
        numbers.tobytes(),
        places,
        *(state.numpy().tobytes() for state in states),
    ]
