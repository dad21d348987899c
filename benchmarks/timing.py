"""Time jobs side by side, so that what disturbs one disturbs all."""

import statistics
import time
from collections.abc import Callable

import torch

Job = Callable[[], object]


def side_by_side(jobs: dict[str, Job], device: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each job in each round; the jobs take turns, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            seconds = _timed(job, device)
            if turn:
                times[name].append(seconds)
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """The median of each job's times."""
    return {name: statistics.median(values) for name, values in times.items()}


def _timed(job: Job, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    job()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun
