"""Where the time of a job goes: kernels, operators, and Python while the GPU waited."""

import sys
import threading
import time
import warnings
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


BESIDE = ("loader", "store", "image_files", "pictures", "files", "storage", "spread", "turns")
"""Modules in which threads read, write, or wait for their turn."""


class Sampler:
    """Notes what the thread does that works for the GPU, every two milliseconds."""

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
            frames = sys._current_frames()
            frames.pop(threading.get_ident(), None)
            places = [_place(frame) for frame in frames.values()]
            working = [p for p in places if "." in p and p.partition(".")[0] not in BESIDE]
            self.samples.append((time.perf_counter(), working[0] if working else "nobody works"))


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


def compared(job: Callable[[], object], top: int = 40) -> dict[str, Any]:
    """Run a job three times: by the clock and by function, under the profiler, and by its waits."""
    _settle()
    with StackSampler() as sampler:
        started = time.perf_counter()
        job()
        _settle()
        seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "seconds_in": sampler.seconds_in(seconds, top),
        "sums": sums_of(job),
        "waits": waits_of(job, top),
    }


class StackSampler(Sampler):
    """Notes all functions of the package that the thread that made it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.within: Counter[str] = Counter()
        self.looks = 0

    def _watch(self) -> None:
        while not self.done.wait(EVERY):
            frame = sys._current_frames().get(self.watched)
            found = set()
            while frame is not None:
                path = Path(frame.f_code.co_filename)
                if "sufficit" in path.parts:
                    found.add(f"{path.parent.name}/{path.stem}.{frame.f_code.co_qualname}")
                frame = frame.f_back
            self.within.update(found)
            self.looks += 1

    def seconds_in(self, seconds: float, top: int) -> dict[str, float]:
        """The time spent in each function and all that it calls, the longest first."""
        each = seconds / max(1, self.looks)
        return {name: round(each * looks, 3) for name, looks in self.within.most_common(top)}


def sums_of(job: Callable[[], object]) -> dict[str, Any]:
    """Sums over a run under torch.profiler: CPU, kernels, copies, and calls of the driver."""
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=kinds) as found:
        started = time.perf_counter()
        job()
        _settle()
        seconds = time.perf_counter() - started
    averages = found.key_averages()
    on_device = [one for one in averages if one.device_type == DeviceType.CUDA]
    operators = [one for one in averages if one.device_type == DeviceType.CPU]
    copies = [one for one in on_device if one.key.startswith(("Memcpy", "Memset"))]
    kernels = [one for one in on_device if one not in copies]
    driver = [one for one in operators if one.key.startswith(("cuda", "cuLaunch"))]
    return {
        "seconds": seconds,
        "cpu_ms": sum(one.self_cpu_time_total for one in operators) / 1e3,
        "kernels": sum(one.count for one in kernels),
        "kernels_ms": sum(one.self_device_time_total for one in kernels) / 1e3,
        "driver": _largest(driver, "self_cpu_time_total", 12),
        "copies": _largest(copies, "self_device_time_total", 8),
        "kernels_by_time": _largest(kernels, "self_device_time_total", 12),
        "operators_by_time": _largest(operators, "self_cpu_time_total", 30),
    }


def waits_of(job: Callable[[], object], top: int) -> dict[str, Any]:
    """How often each line of the package waited for the GPU."""
    found: Counter[str] = Counter()

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if "synchronizing" in str(message):
            found[_place(sys._getframe(1))] += 1

    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note  # type: ignore[assignment]  # the context puts it back
            torch.cuda.set_sync_debug_mode("warn")
            try:
                job()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return {"waits": sum(found.values()), "by_line": dict(found.most_common(top))}


def print_compared(found: dict[str, dict[str, Any]]) -> None:
    """Print what `compared` returned for two versions."""
    for name, one in found.items():
        sums = one["sums"]
        print(
            f"{name}: {one['seconds']:.2f} s; profiled {sums['seconds']:.2f} s,"
            f" CPU {sums['cpu_ms']:.0f} ms, {sums['kernels']} kernels {sums['kernels_ms']:.0f} ms,"
            f" {one['waits']['waits']} waits"
        )
        for title in ("driver", "copies"):
            words = [f"{k} {v['ms']:.0f} ms x{v['calls']}" for k, v in sums[title].items()]
            print(f"  {title}: {'; '.join(words[:6])}")
        for title, table in (("s in", one["seconds_in"]), ("waits at", one["waits"]["by_line"])):
            for place, number in [*table.items()][:30]:
                print(f"  {number:8} {title} {place}")
    sys.stdout.flush()


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
