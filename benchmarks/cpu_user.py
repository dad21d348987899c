"""A default `compare` of a few photographs on a CPU: its passes, its time, and the bare model's.

    OMP_NUM_THREADS=2 python benchmarks/cpu_user.py --data PHOTOGRAPHS --out FILE.json

Five CAMs, the controls and all default checks by MobileNetV2 at 224 px, the report included, in a
process that has imported the package. Bare are forward passes alone, in the batches that a run
uses, before the run and after it; on a machine that others use, read the ratio.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from compiled import classifier_of
from jpegs import write_jpegs
from sufficit.perturbation.predict import usual_batch
from sufficit.provenance import provenance
from sufficit.runs.config import config_from
from sufficit.runs.engine import run
from sufficit.runs.forecast import forecast
from sufficit.runs.job import make_job
from whole import bare_rate, counting


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds and passes of a run, and the rate of the bare model."""
    write_jpegs(asked.data, folder / "photographs", asked.images)
    classifier = classifier_of(asked.model, asked.side, "cpu")
    batch = usual_batch(classifier, (3, asked.side, asked.side))
    before = bare_rate(classifier, asked.side, batch, asked.batches)
    started = time.perf_counter()
    job = make_job(
        config_from({"model": asked.model, "data": str(folder / "photographs"), "device": "cpu"}),
        classifier=classifier,
    )
    told = forecast(job)
    said = told.masks(job) if told else ""
    with counting() as passes:
        result = run(job, folder / "run", progress=False)
    seconds = time.perf_counter() - started
    after = bare_rate(classifier, asked.side, batch, asked.batches)
    # A backward pass counts as two.
    useful = passes["sent"] + 2 * passes["with a gradient"]
    bare = (before + after) / 2
    return {
        "images": asked.images,
        "threads": torch.get_num_threads(),
        "calls": job.config.calls,
        "masked_passes": result.record.model_calls,
        "passes": useful,
        "seconds": seconds,
        "bare_per_second": [before, after],
        "whole_over_bare": useful / seconds / bare,
        "load": os.getloadavg(),
        "forecast": said,
    }


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--model", default="mobilenet_v2")
    words.add_argument("--data", type=Path, help="photographs; made up where left out")
    words.add_argument("--images", type=int, default=24)
    words.add_argument("--side", type=int, default=224)
    words.add_argument("--batches", type=int, default=40)
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(asked, Path(folder))
    print(json.dumps(found, indent=2))
    if asked.out:
        facts = provenance({"argv": sys.argv[1:]}, torch.device("cpu"), torch.float32)
        asked.out.write_text(json.dumps(facts | {"results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
