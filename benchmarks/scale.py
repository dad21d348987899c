"""What Ray costs per unit: CPU time of the driver, units per second, memory.

    OMP_NUM_THREADS=1 python benchmarks/scale.py --out benchmarks/results/scale-cpu.json

A unit writes its file and computes nothing, so that all time is overhead. No workers: the loop in
this process. Starting Ray and loading the model are counted apart. Each number of units is measured
in a process of its own, so that the peak of its memory is its own too.
"""

import argparse
import json
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from sufficit import Classifier
from sufficit.data.images import ImageSource
from sufficit.data.loader import Unit
from sufficit.provenance import provenance
from sufficit.runs.config import Workers, config_from
from sufficit.runs.job import Job, make_job
from sufficit.runs.store import Store
from sufficit.runs.unit_rows import Rows
from sufficit.runs.workers import spreading


def idle(unit: Unit, following: Unit | None = None) -> Rows:
    """The rows of a unit without a row."""
    return Rows(unit.number)


def job_of(units: int) -> Job:
    """A job of so many units of one tiny image."""
    layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 2)).eval()
    images = ImageSource.from_tensors(torch.zeros(units, 3, 4, 4), None, [0] * units)
    options = {"checks": "none", "columns": ["msi"], "methods": ["center"]}
    config = config_from({"model": "", "data": "", **options})
    return make_job(config, classifier=Classifier(layers), images=images, unit=1)


def measure(units: int, workers: int) -> dict[str, float]:
    """Compute the units once."""
    job, moments = job_of(units), list[float]()
    asked = Workers(count=workers) if workers else None
    with TemporaryDirectory() as place, spreading(asked, job) as compute:
        store = Store(Path(place)).start(job.key(), job.entries)
        start, busy = time.monotonic(), time.process_time()
        for rows in compute(job, store, idle, [*job.units]):
            store.write(rows)
            moments.append(time.monotonic())
        busy = time.process_time() - busy
        assert len(store.done()) == units
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {
        "seconds to the first unit": round(moments[0] - start, 2),
        "units per second": round((units - 1) / (moments[-1] - moments[0]), 1),
        "driver's CPU milliseconds per unit": round(1000 * busy / units, 3),
        "peak MiB of the driver": round(peak),
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--units", type=int, nargs="*", default=[10, 100, 1_000, 10_000])
    words.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    results = {}
    spawned = get_context("spawn")  # a forked process has the memory of its parent
    for workers, units in product(asked.workers, asked.units):
        with ProcessPoolExecutor(1, mp_context=spawned) as process:
            found = process.submit(measure, units, workers).result()
        results[f"{workers} workers, {units} units"] = found
        print(workers, units, json.dumps(found), flush=True)
    facts = provenance({"argv": sys.argv[1:]}, torch.device("cpu"), torch.float32)
    text = json.dumps(facts | {"results": results}, indent=2) + "\n"
    asked.out.write_text(text) if asked.out else print(text)


if __name__ == "__main__":
    main()
