"""How long `sufficit compare` takes for 50,000 photographs, from the rate of a run on fewer.

    python benchmarks/fifty_thousand.py --device cuda --images 4096 --out fifty-thousand-h200.json
    python benchmarks/fifty_thousand.py --images 24 --model resnet18 --side 64 --calls 18    # CPU

Photographs are written as JPEG files of ImageNet's usual size, then compared as 50,000 would be by
default: five CAMs, three controls, leakage and a held-out fill on a tenth of the images, as many
masks as 50,000 images get, on CUDA by a compiled copy of the model; MSI over alpha_min, on 16
images whatever their number, is left out. The clock of the rate runs from the first unit's end to
the last one's, so that compiling and donors are counted once. The end of the run is that of this
one, with the images to show, and the merge of 50,000 images that merge.py measured. Nothing is
scored at 50,000 images.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compare import Clock
from compiled import classifier_of
from jpegs import write_jpegs
from sufficit.provenance import provenance
from sufficit.runs import probes_of
from sufficit.runs.config import config_from
from sufficit.runs.engine import run
from sufficit.runs.job import make_job

MERGE = Path(__file__).parent / "results" / "merge-cpu.json"
WHOLE = 50_000  # images


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of each part of a run, and what they come to for 50,000 images."""
    classifier = classifier_of(asked.model, asked.side, asked.device)
    write_jpegs(asked.data, folder / "photographs", asked.images)
    # The checks look at as large a share of these images as of 50,000.
    share = probes_of.CHECKED / WHOLE
    probes_of.CHECKED = round(share * asked.images)
    values = {"model": asked.model, "data": str(folder / "photographs"), "targets": "label"}
    values |= {"calls": asked.calls, "donors": asked.donors, "device": asked.device}
    values |= {"compile": "on" if asked.device == "cuda" else "off", "checks": asked.checks}
    values |= {"unit_size": asked.unit_size}
    given = {name: value for name, value in values.items() if value is not None}
    job = make_job(config_from(given), classifier=classifier)
    clock, started = Clock(), time.perf_counter()
    found = run(job, folder / "run", progress=False, spread=clock)
    ended, unit = time.perf_counter(), job.entries.unit
    rate = (asked.images - unit) / (clock.ends[-1] - clock.ends[0])
    assert job.first_probe is not None  # it scores
    masks = len(job.first_probe.bands) + 1
    spent = {
        "until the first unit is done": clock.ends[0] - started,
        "scoring": (WHOLE - unit) / rate,
        "the end of this run": ended - clock.ends[-1],
        "merging": json.loads(MERGE.read_text())["results"][str(WHOLE)]["merge_seconds"],
    }
    return {
        "images": asked.images, "checked": probes_of.CHECKED,
        "sources": len(job.sources), "masks": masks,
        "calls": job.config.calls, "donors": job.config.donors, "unit": unit,
        "model_calls": found.record.model_calls, "compiled": job.compiles,
        "images_per_second": rate,
        "calls_per_image": found.record.model_calls / asked.images,
        "calls_per_second": found.record.model_calls / asked.images * rate,
        "seconds_for_50000": spent,
        "minutes_for_50000": sum(spent.values()) / 60,
    }  # fmt: skip


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--device", default="cpu")
    words.add_argument("--model", default="resnet50")
    words.add_argument("--data", type=Path, help="photographs; made up where left out")
    words.add_argument("--images", type=int, default=4096)
    words.add_argument("--side", type=int, default=224)
    words.add_argument("--calls", type=int, default=18, help="what a run of 50,000 has by default")
    words.add_argument("--donors", type=int, default=4, help="likewise")
    words.add_argument("--checks", default="controls,fill,leak")
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
