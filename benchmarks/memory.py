"""Does memory stay flat? A comparison of one method on many small images in tar shards.

    OMP_NUM_THREADS=1 python benchmarks/memory.py --out benchmarks/results/memory-cpu.json

Images of 16 px are made up and written to shards, found, explained by Grad-CAM and scored by a
small net on coarse curves, with the memory of the process at ten points; then the results are
merged (merge.py has the usual columns). Each number of images has a process of its own. Memory is
that which only this process can give back (RssAnon): pages of files are the system's to drop.
"""

import argparse
import io
import json
import multiprocessing
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from sufficit import Classifier, View
from sufficit.provenance import provenance
from sufficit.runs.config import UNIT, RunConfig
from sufficit.runs.engine import run
from sufficit.runs.job import Job, make_job

SIDE, SHARD = 16, 10_000
POINTS = 10


def resident(kind: str = "RssAnon") -> float:
    """MiB of this process that are in memory and not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(kind))


@contextmanager
def peak(found: dict[str, float], name: str) -> Iterator[None]:
    """Keep the most memory that was in use inside the block, and the seconds it took."""
    ended, highest, begun = Event(), [resident()], time.perf_counter()

    def watch() -> None:
        while not ended.wait(0.02):
            highest.append(max(highest.pop(), resident()))

    watching = Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
        found |= {f"{name}_mib": max(*highest, resident())}
        found |= {f"{name}_seconds": time.perf_counter() - begun}


def write_shards(folder: Path, images: int) -> None:
    """Noise as PNG, with the number of a class beside it."""
    drawn = np.random.default_rng(0)
    for first in range(0, images, SHARD):
        with tarfile.open(folder / f"{first // SHARD:04d}.tar", "w") as shard:
            for number in range(first, min(first + SHARD, images)):
                pixels = drawn.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
                written = io.BytesIO()
                Image.fromarray(pixels).save(written, "png", compress_level=1)
                for kind, content in {
                    "cls": b"%d" % (number % 4),
                    "png": written.getvalue(),
                }.items():
                    facts = tarfile.TarInfo(f"{number:07d}.{kind}")
                    facts.size = len(content)
                    shard.addfile(facts, io.BytesIO(content))


def small_net() -> Classifier:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        nn.Linear(32, 4),
    )
    return Classifier(model, layer="1", view=View((SIDE, SIDE)))


def job_on(place: Path, images: int, **options: Any) -> Job:
    """A comparison of one method over shards."""
    (place / "shards").mkdir()
    write_shards(place / "shards", images)
    config = RunConfig(
        calls="exact",
        model="small", data=str(place / "shards"), methods=("gradcam",), checks=("none",),
        targets="label", **options,
    )  # fmt: skip
    return make_job(config, classifier=small_net())


def scored(images: int, place: Path) -> dict[str, Any]:
    """A run on coarse curves: when the first unit is done, and memory on the way and after."""
    points: list[dict[str, float]] = []
    found: dict[str, float] = {}
    job = job_on(place, images, value_step=0.25, percent_step=0.25)

    def ticked(done: float, _: float, *__: object) -> None:
        if done >= UNIT:
            found.setdefault("seconds_to_first_unit", time.perf_counter() - started)
        if done >= max(UNIT, len(points) * images / POINTS) and len(points) <= POINTS:
            points.append({"images": done, "mib": resident()})
            print(f"{done:9.0f} images {points[-1]['mib']:8.1f} MiB", flush=True)

    started = time.perf_counter()
    with peak(found, "all"):
        run(job, place / "run", progress=ticked)
    return found | {"points": points, "growth_mib": points[-1]["mib"] - points[1]["mib"]}


def measured(images: int) -> dict[str, Any]:
    """A run on so many images."""
    with tempfile.TemporaryDirectory() as place:
        found = {"images": images, "scored": scored(images, Path(place))}
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--images", type=int, nargs="+", default=[10_000, 100_000])
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    alone = {"mp_context": multiprocessing.get_context("spawn"), "max_tasks_per_child": 1}
    with ProcessPoolExecutor(1, **alone) as pool:  # type: ignore[arg-type]
        results = list(pool.map(measured, asked.images))
    if asked.out:
        facts = provenance({"argv": sys.argv[1:]}, torch.device("cpu"), torch.float32)
        asked.out.write_text(json.dumps(facts | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
