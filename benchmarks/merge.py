"""Does the memory of the end of a run stay flat? Unit files of three sources, merged and read.

    OMP_NUM_THREADS=1 python benchmarks/merge.py --out benchmarks/results/merge-cpu.json

Predictions, maps and pixels are made up and written as the units of a run, by a process of their
own. Another process merges them into rows, curves, means, intervals and tests, reads the results
as `sufficit report` does, and writes the report. Printed for each number of images: the most memory
that process ever had (VmHWM, files that are mapped included), and rows per second.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sufficit import Classifier
from sufficit.data.images import ImageFile
from sufficit.data.manifest import listed
from sufficit.provenance import provenance
from sufficit.runs.config import RunConfig
from sufficit.runs.job import Job
from sufficit.runs.merge import write_results
from sufficit.runs.results import RunResults
from sufficit.runs.store import HEATMAPS, PIXELS, SCORES, Store

SOURCES = ("one", "two", "three")
SIDE, MAP, CLASSES = 8, 2, 10
UNIT = 1000  # images; few files, so that their number does not decide the time
NAN = 0.01  # share of images for which the model returned NaN


def made_up(count: int) -> Iterator[ImageFile]:
    """Images that are listed one by one."""
    for number in range(count):
        folder = f"class-{number * CLASSES // count}"
        name = f"{folder}/{number:08d}.png"
        yield ImageFile(name, name, folder, size=1000)


def job_of(images: int) -> Job:
    config = RunConfig(
        model="made up", data="made up", methods=SOURCES, controls=False, leak=False,
        alpha_curve=False, targets="label", value_step=0.1, percent_step=0.2,
        calls="exact", unit_size=UNIT, columns=("paper",),
    )  # fmt: skip
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, CLASSES))
    sources = dict.fromkeys(SOURCES, "gradcam")
    entries = listed(made_up(images), UNIT)
    entries = entries.labelled({word: number for number, word in enumerate(entries.words)})
    return Job(config, Classifier(model), entries, sources, "label")


def write_units(images: int, place: Path) -> None:
    """Random predictions, maps and pixels for every unit."""
    job, store = job_of(images), Store(place)
    generator = torch.Generator().manual_seed(0)
    for unit in range(len(job.units)):
        numbers = list(range(unit * UNIT, min(images, (unit + 1) * UNIT)))
        entries, n = job.units[unit].entries, len(numbers)
        targets = torch.tensor([entry.label for entry in entries])
        tensors = {}
        for name in SOURCES:
            drawn = torch.rand(n, len(job.plan.asks), generator=generator)
            named = torch.where(drawn > 0.4, targets[:, None], -2).int()
            lost = torch.rand(n, generator=generator) < NAN
            named[lost], drawn[lost] = -1, torch.nan
            shares = torch.rand(n, len(job.plan.weighs), generator=generator, dtype=torch.float64)
            parts = {"named": named, "confidences": drawn, "shares": shares}
            parts |= {"targets": targets, "calls": torch.full((n,), len(job.plan.asks))}
            tensors |= {f"{name}/{part}": tensor for part, tensor in parts.items()}
        shape = [3, SIDE, SIDE]
        facts = {"names": [entry.image.name for entry in entries], "numbers": numbers}
        facts |= {"shape": shape}  # type: ignore[dict-item]
        maps = {f"maps/{m}": torch.rand(n, MAP, MAP, generator=generator) for m in SOURCES}
        final = dict.fromkeys(SOURCES, False)
        store.write(HEATMAPS, unit, maps, facts | {"final": final, "controls": {}})
        pixels = torch.randint(256, (n, *shape), generator=generator, dtype=torch.uint8)
        store.write(PIXELS, unit, {"pixels": pixels}, {"numbers": numbers})
        more = {"skipped": {}, "empty": dict.fromkeys(SOURCES, 0), "stretched": []}
        more["bad_truths"] = {}
        store.write(SCORES, unit, tensors, facts | more)


def most() -> float:
    """MiB that this process had at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def merge_units(images: int, place: Path) -> dict[str, float]:
    """Merge the units and read the results; memory and speed."""
    job, found = job_of(images), {"before_mib": most()}
    begun = time.perf_counter()
    write_results(job, Store(place), {}, flat=False, temporary=False)
    seconds = time.perf_counter() - begun
    found |= {"merged_mib": most(), "rows_per_second": len(SOURCES) * images / seconds}
    begun = time.perf_counter()
    results = RunResults.read(place)
    results.report(place / "report.html")
    found |= {"reported_mib": most(), "report_seconds": time.perf_counter() - begun}
    assert results.n == images
    assert results.standing is not None
    return found | {"merge_seconds": seconds}


def alone(work: Callable[..., Any], *given: object) -> Any:
    """What a function returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--images", type=int, nargs="+", default=[100_000, 1_000_000])
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    results: dict[str, dict[str, float]] = {}
    for images in asked.images:
        with tempfile.TemporaryDirectory() as place:
            alone(write_units, images, Path(place))
            results[str(images)] = alone(merge_units, images, Path(place))
    names = list(next(iter(results.values())))
    print(f"{'images':20}", *(f"{int(images):>12,}" for images in results))
    for name in names:
        print(f"{name:20}", *(f"{found[name]:12,.1f}" for found in results.values()))
    if asked.out:
        facts = provenance({"argv": sys.argv[1:]}, torch.device("cpu"), torch.float32)
        settings = {"sources": len(SOURCES), "unit": UNIT, "bands": len(job_of(1).plan.asks)}
        content = facts | {"settings": settings, "results": results}
        asked.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
