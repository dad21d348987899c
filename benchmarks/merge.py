"""How long does the end of a run take, and does its memory stay flat? Unit files, merged and read.

    OMP_NUM_THREADS=1 python benchmarks/merge.py --out benchmarks/results/merge-cpu.json
    OMP_NUM_THREADS=1 python benchmarks/merge.py --images 50000 --profile

The units are those of `compare` as it is by default: five CAMs and two controls, 26 masks per
image, leakage, a held-out fill, 32 images per unit. One unit is computed by a small network. Its
rows, with other random numbers in every unit, are written as all units, by a process of its own.
Another process merges them into tables, means, intervals and tests, reads the results as `report`
does, and writes the report. Printed for each number of images: seconds, images per second, and the
most memory that process ever had (VmHWM, files that are mapped included).
"""

import argparse
import cProfile
import json
import multiprocessing
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sufficit import Classifier
from sufficit.data.images import ImageSource
from sufficit.metrics.column import CANDIDATE
from sufficit.provenance import provenance
from sufficit.runs.config import METHODS, UNIT, config_from
from sufficit.runs.drawing import holding
from sufficit.runs.engine import score_unit
from sufficit.runs.job import Job, make_job
from sufficit.runs.results import RunResults
from sufficit.runs.spread import in_this_process
from sufficit.runs.store import Store
from sufficit.runs.table import write_results
from sufficit.runs.unit_rows import Rows
from sufficit.sources import Maps

SIDE, CLASSES = 16, 10
NAN = 0.01  # share of images without a value


def job_of(images: int, checks: str = "controls,fill,leak,alpha-curve") -> Job:
    """A comparison of images in memory, all of them one image."""
    torch.manual_seed(0)
    config = config_from(
        {"model": "made up", "data": "made up", "methods": METHODS, "calls": 26}
        | {"unit_size": UNIT, "checks": checks, "columns": ("paper", "msi_rank"), "layer": "0"}
    )
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )
    pixels = torch.rand(1, 3, SIDE, SIDE).expand(images, -1, -1, -1)
    source = ImageSource.from_tensors(pixels, None, torch.arange(images) % CLASSES)
    return make_job(config, classifier=Classifier(model), images=source)


def write_units(images: int, place: Path) -> None:
    """Write the rows of one unit, with other numbers, as every unit of a run."""
    job = job_of(images)
    small = job_of(UNIT, "controls,fill,leak")  # all donors are among these images
    with Store.locked(place / "small") as store:
        started = store.start(small.key(), small.entries)
        small = holding(small, started, in_this_process, None)
        rows = score_unit(small, small.units[0])
    store = Store(place).start({"made": "up"}, job.entries)
    generator = torch.Generator().manual_seed(0)
    for unit in job.units:
        numbers = tuple(entry.number for entry in unit.entries)
        found = replace(
            _first(rows, len(numbers)),
            unit=unit.number,
            names=tuple(entry.image.name for entry in unit.entries),
            numbers=numbers,
        )
        for columns in found.values.values():
            for name, values in columns.items():
                if CANDIDATE in name and "rank" not in name:  # counts of calls and hits
                    continue
                moved = values + 0.1 * torch.randn(len(values), generator=generator)
                lost = torch.rand(len(values), generator=generator) < NAN
                columns[name] = moved.where(~lost, torch.nan)
        store.write(found)


def _first(rows: Rows, count: int) -> Rows:
    """The first images of a unit, in new dictionaries."""
    return replace(
        rows,
        targets=rows.targets[:count],
        values={
            source: {name: values[:count] for name, values in columns.items()}
            for source, columns in rows.values.items()
        },
        maps={
            name: Maps(one.maps[:count], one.final, {n: v[:count] for n, v in one.columns.items()})
            for name, one in rows.maps.items()
        },
    )


def most() -> float:
    """MiB that this process had at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def merge_units(images: int, place: Path, profiled: bool) -> dict[str, float]:
    """Merge the units and read the results; time and memory."""
    job, found = job_of(images), {"before_mib": most()}
    store = Store(place)
    _ = job.probes
    profile = cProfile.Profile()
    started, spent = time.perf_counter(), time.process_time()
    if profiled:
        profile.enable()
    write_results(job, store, range(len(job.units)), None, temporary=False)
    profile.disable()
    seconds = time.perf_counter() - started
    found |= {"merge_seconds": seconds, "merge_cpu_seconds": time.process_time() - spent}
    found |= {"merged_mib": most(), "images_per_second": images / seconds}
    started = time.perf_counter()
    results = RunResults.read(place)
    results.report(place / "report.html")
    found |= {"reported_mib": most(), "report_seconds": time.perf_counter() - started}
    assert results.n == images
    assert results.standing is not None
    if profiled:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return found


def alone(work: Callable[..., Any], *given: object) -> Any:
    """What a function returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def main() -> None:
    """Measure, print, and write the numbers down."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--images", type=int, nargs="+", default=[50_000, 200_000])
    words.add_argument("--profile", action="store_true", help="print where the time goes")
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    results: dict[str, dict[str, float]] = {}
    for images in asked.images:
        with tempfile.TemporaryDirectory() as place:
            alone(write_units, images, Path(place))
            results[str(images)] = alone(merge_units, images, Path(place), asked.profile)
    names = list(next(iter(results.values())))
    print(f"{'images':20}", *(f"{int(images):>12,}" for images in results))
    for name in names:
        print(f"{name:20}", *(f"{found[name]:12,.1f}" for found in results.values()))
    if asked.out:
        facts = provenance({"argv": sys.argv[1:]}, torch.device("cpu"), torch.float32)
        settings = {"sources": len(METHODS) + 2, "unit": UNIT, "calls": 26}
        content = facts | {"settings": settings, "results": results}
        asked.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
