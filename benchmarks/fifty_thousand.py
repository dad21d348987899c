"""How long `sufficit compare` takes for 50,000 photographs, from the rate of a run on fewer.

    python benchmarks/fifty_thousand.py --device cuda --images 1536 --out fifty-thousand-h200.json
    python benchmarks/fifty_thousand.py --images 12 --model resnet18 --side 64 --calls 10    # CPU

Photographs of ImageNet's usual size are made up and written as JPEG, then compared as they would be
by default: five CAMs, two controls, leakage, a held-out fill (--held-out-fill none leaves it out),
masks sampled, on CUDA by a compiled copy of the model; MSI over alpha_min, on 16 images whatever
their number, is left out. The clock of the rate runs from the first unit's end to the last one's,
so that compiling, donors and the curves of the images to show are counted once; merging the units
is counted per image, from merging one unit and all. Nothing is measured at 50,000 images.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare import write_photographs
from compiled import classifier_of
from sufficit.provenance import provenance
from sufficit.runs import merge
from sufficit.runs.config import config_from
from sufficit.runs.engine import Worker, compute, start
from sufficit.runs.explanations import quiet
from sufficit.runs.job import Job, make_job
from sufficit.runs.results import RunResults
from sufficit.runs.store import SCORES, Store

WRITE = merge.write_shown  # the pictures of the report: the same number for any run
WHOLE, PIXELS = 50_000, 450  # images, and pixels per side: as many as 500 x 400


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of each part of a run, and what they come to for 50,000 images."""
    classifier = classifier_of(asked.model, asked.side, asked.device)
    write_photographs(folder / "photographs", asked.images, asked.pixels)
    values = {"model": asked.model, "data": str(folder / "photographs"), "targets": "label"}
    values |= {"calls": asked.calls, "donors": asked.donors, "device": asked.device}
    values |= {"compile": "on" if asked.device == "cuda" else "off", "alpha_curve": False}
    values |= {"held_out_fill": asked.held_out_fill, "unit_size": asked.unit_size}
    given = {name: value for name, value in values.items() if value is not None}
    job = make_job(config_from(given), classifier=classifier)
    moments: list[tuple[float, float]] = []  # images x methods that are done, and when

    def tick(done: float, total: float, *_: object) -> None:
        moments.append((done / total * asked.images, time.perf_counter()))

    shown = [0.0]

    def timed(*given: Any) -> dict[str, str]:
        now = time.perf_counter()
        found = WRITE(*given)
        shown.append(time.perf_counter() - now)
        return found

    def results(job: Job) -> tuple[RunResults, float]:
        """Merge the units of a job; the seconds without the pictures, which are counted apart."""
        now = time.perf_counter()
        found = merge.write_results(job, store, {}, flat=False, temporary=True)
        return found, time.perf_counter() - now - shown[-1]

    merge.write_shown = timed
    with quiet():
        begun = time.perf_counter()
        store = start(job, Store(folder / "run"), job.key(), (SCORES,))
        compute(Worker(job, store), tick)
        few = [results(replace(job, part=1))[1] for _ in range(2)][1]  # the first one warms up
        found, every = results(job)
    unit = job.entries.unit
    first = next((n, at) for n, at in moments if n >= unit - 1e-9)
    last = moments[-1]
    rate = (last[0] - first[0]) / (last[1] - first[1])
    spent = {
        "until the first unit is done": first[1] - begun,
        "scoring": (WHOLE - unit) / rate,
        "merging": few + (every - few) / (asked.images - unit) * (WHOLE - unit),
        "the images to show": shown[-1],
    }
    return {
        "images": asked.images, "sources": len(job.sources), "masks": job.masks,
        "calls": job.config.calls, "donors": job.config.donors, "unit": unit,
        "model_calls": found.record["model_calls"], "compiled": job.compiles,
        "images_per_second": rate,
        "calls_per_second": found.record["model_calls"] / asked.images * rate,
        "seconds_for_50000": spent,
        "minutes_for_50000": sum(spent.values()) / 60,
    }  # fmt: skip


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--device", default="cpu")
    words.add_argument("--model", default="resnet50")
    words.add_argument("--images", type=int, default=1536)
    words.add_argument("--side", type=int, default=224)
    words.add_argument("--pixels", type=int, default=PIXELS)
    words.add_argument("--calls", type=int, default=26, help="what a run of 50,000 has by default")
    words.add_argument("--donors", type=int, default=4, help="likewise")
    words.add_argument("--held-out-fill", help="none leaves it out")
    words.add_argument("--unit-size", type=int)
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(asked, Path(folder))
    print(json.dumps(found, indent=2))
    if asked.out:
        classifier = classifier_of(asked.model, asked.side, asked.device)
        facts = provenance({"argv": sys.argv[1:]}, classifier.device, classifier.dtype)
        asked.out.write_text(json.dumps(facts | {"results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
