"""Where the time of a job goes: kernels, operators, and Python while the GPU waited."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

EVERY = 0.002  # seconds between two looks at the main thread
MARK = "the clock of the samples"
Span = tuple[float, float]  # start and end in microseconds


class Sampler:
    """Notes what the thread that made it does, every two milliseconds."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, str]] = []
        self.watched, self.done = threading.get_ident(), threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Sampler":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.done.wait(EVERY):
            frame = sys._current_frames().get(self.watched)
            if frame is not None:
                self.samples.append((time.perf_counter(), _place(frame)))


def _place(frame: FrameType | None) -> str:
    """The innermost function of the package, and the line it waits in."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "sufficit" in path.parts:
            return f"{path.stem}.{frame.f_code.co_qualname}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside the package"


def profiled(job: Callable[[], object], top: int = 12) -> dict[str, Any]:
    """Run a job once: the busiest kernels and operators, and what the GPU waited for."""
    on_gpu = torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=kinds) as found, Sampler() as sampler:
        marked = time.perf_counter()
        with record_function(MARK):
            started = time.perf_counter()
        job()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    events = found.events()
    zero = next(one.time_range.start for one in events if one.name == MARK)
    kernels = [one for one in events if one.device_type == DeviceType.CUDA]
    spans = [(one.time_range.start, one.time_range.end) for one in kernels if one.name != MARK]
    busy = joined(spans)
    looks = [(zero + 1e6 * (at - marked), place) for at, place in sampler.samples]
    waiting = Counter(place for at, place in looks if at >= zero and not within(busy, at))
    averages = found.key_averages()
    return {
        "seconds": seconds,
        "gpu_busy": sum(end - start for start, end in busy) / 1e6 / seconds,
        "kernels_ms": _largest(averages, "self_device_time_total", top),
        "operators_ms": _largest(averages, "self_cpu_time_total", top),
        "looks": len(looks),
        "looks_while_the_gpu_waited": sum(waiting.values()),
        "the_gpu_waited_for": dict(waiting.most_common(top)),
    }


def joined(spans: list[Span]) -> list[Span]:
    """Spans without overlaps, in order.

    >>> joined([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def within(spans: list[Span], at: float) -> bool:
    """Whether a time lies in one of the spans, which are in order.

    >>> within([(0, 2), (3, 4)], 3.5), within([(0, 2), (3, 4)], 2.5)
    (True, False)
    """
    low, high = 0, len(spans)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if spans[middle][0] <= at else (low, middle)
    return low > 0 and at < spans[low - 1][1]


def _largest(averages: Any, what: str, top: int) -> dict[str, dict[str, float]]:
    rows = sorted(averages, key=lambda one: getattr(one, what), reverse=True)
    return {
        one.key[:90]: {"ms": round(getattr(one, what) / 1e3, 2), "calls": one.count}
        for one in rows[:top]
        if getattr(one, what) > 0
    }


def print_profile(found: dict[str, Any]) -> None:
    """Print what `profiled` returned."""
    print(f"{found['seconds']:.2f} s under the profiler, GPU busy {found['gpu_busy']:.1%}")
    for title in ("kernels_ms", "operators_ms"):
        print(title.replace("_ms", ", ms (calls):"))
        for name, row in found[title].items():
            print(f"  {row['ms']:10.1f} ({row['calls']:6}) {name}")
    looks = max(1, found["looks"])
    print(f"the GPU waited at {found['looks_while_the_gpu_waited']} of {looks} looks, for:")
    for name, count in found["the_gpu_waited_for"].items():
        print(f"  {count / looks:7.1%} {name}")
    sys.stdout.flush()
