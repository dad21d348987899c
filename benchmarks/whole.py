"""A whole `compare` from JPEG files beside the bare compiled model, and where its GPU waits.

    PYTHONPATH=src python benchmarks/whole.py --device cuda --data PHOTOGRAPHS --out whole-h200.json
    PYTHONPATH=src python benchmarks/whole.py --model resnet18 --side 32 --images 40 --unit-size 8

Five CAMs, the controls, leakage and a held-out fill, 26 masks per image and fill, by a compiled
copy of the model. Useful forward passes are counted: those of the run's own record, and those of
the heatmaps, a backward pass as two. The clock runs from the end of the first unit, when everything
is compiled, to the units that are profiled at the end. Bare are forward passes of a compiled copy
alone, on inputs that lie ready, before the run and after it; `whole_over_bare` divides by the mean
of the two. The table of results, which is made at the end, is not in the clock.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled import classifier_of
from evaluate import bare
from jpegs import write_jpegs
from profiling import print_profile, profiled
from sufficit import Classifier
from sufficit.classifier.acceleration import accelerated
from sufficit.data.loader import Unit
from sufficit.perturbation.predict import usual_batch
from sufficit.provenance import provenance
from sufficit.runs.config import config_from
from sufficit.runs.engine import run
from sufficit.runs.job import Job, make_job
from sufficit.runs.spread import Score, in_this_process
from sufficit.runs.store import Store
from sufficit.runs.unit_rows import Rows

AIM = 0.9
BARE = 64  # batches of one measurement of the bare model


class Watched:
    """Computes units here, notes when each was done, and profiles the last ones."""

    def __init__(self, last: int, passes: dict[str, int]) -> None:
        self.last, self.passes = last, passes
        self.ends: list[float] = []
        self.sent: list[int] = []  # images through the model until then
        self.profile: dict[str, Any] = {}

    def __call__(
        self, job: Job, store: Store, score: Score, units: Sequence[Unit]
    ) -> Iterator[Rows]:
        """The rows of the units."""
        rows = in_this_process(job, store, score, units)
        if job.held is None:  # these are the donors, which come before all units
            yield from rows
            return
        for found in islice(rows, len(units) - self.last):
            self.ends.append(time.perf_counter())
            self.sent.append(self.passes["sent"])
            yield found
        seconds = self.ends[-1] - self.ends[0]
        print(f"{len(self.ends) - 1} units in {seconds:.1f} s, then the profile", flush=True)
        final: list[Rows] = []
        self.profile = profiled(lambda: final.extend(rows))
        yield from final


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Count the images that go through any copy of any classifier, with and without gradients."""
    found = {"sent": 0, "with a gradient": 0}
    forward = Classifier._forward

    def counted(self: Classifier, model: torch.nn.Module, inputs: Tensor) -> Tensor:
        output = forward(self, model, inputs)
        found["sent"] += len(inputs)
        found["with a gradient"] += len(inputs) * output.requires_grad
        return output

    Classifier._forward = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Classifier._forward = forward  # type: ignore[method-assign]


def bare_rate(fast: Classifier, side: int, batch: int, batches: int) -> float:
    """Images per second of the model alone."""
    work = bare(fast, side, batch * batches, batch)
    work()
    _wait(fast)
    started = time.perf_counter()
    work()
    _wait(fast)
    return batch * batches / (time.perf_counter() - started)


def _wait(classifier: Classifier) -> None:
    if classifier.device.type == "cuda":
        torch.cuda.synchronize()


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Forward passes per second of the whole, and of the bare model."""
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - started:6.1f} s: {text}", flush=True)

    write_jpegs(asked.data, folder / "photographs", asked.images)
    say("photographs are written")
    on_gpu = asked.device == "cuda"
    classifier = classifier_of(asked.model, asked.side, asked.device)
    shape = (3, asked.side, asked.side)
    batch = usual_batch(classifier, shape)
    fast = accelerated(classifier, (batch, *shape)) if on_gpu else classifier
    say("the bare model is compiled")
    batches = BARE if on_gpu else 2
    before = bare_rate(fast, asked.side, batch, batches)
    say(f"bare: {before:.0f} images/s")
    values = {
        "model": asked.model,
        "data": str(folder / "photographs"),
        "targets": "label",
        "calls": 26,
        "donors": 4,
        "checks": ("controls", "fill", "leak"),
        "compile": "on" if on_gpu else "off",
        "device": asked.device,
    }
    if asked.unit_size is not None:
        values["unit_size"] = asked.unit_size
    job = make_job(config_from(values), classifier=classifier)
    with counting() as passes:
        watched = Watched(asked.profiled, passes)
        result = run(job, folder / "run", progress=False, spread=watched)
    ended = time.perf_counter()
    say("the run is done")
    after = bare_rate(fast, asked.side, batch, batches)
    say(f"bare: {after:.0f} images/s")
    masked = result.record.model_calls
    useful = masked + 3 * passes["with a gradient"]
    unit = job.entries.unit
    timed = unit * (len(watched.ends) - 1)
    images_per_second = timed / (watched.ends[-1] - watched.ends[0])
    whole = useful / asked.images * images_per_second
    return {
        "model": asked.model,
        "images": asked.images,
        "unit": unit,
        "sources": len(job.sources),
        "masked_passes": masked,
        "images_with_gradient": passes["with a gradient"],
        "passes_per_image": useful / asked.images,
        # Batches of a compiled copy are filled up, which is work for nothing.
        "sent_per_image": (watched.sent[-1] - watched.sent[0]) / timed,
        "images_per_second": images_per_second,
        "passes_per_second": whole,
        "bare_batch": batch,
        "bare_per_second": [before, after],
        "whole_over_bare": whole / ((before + after) / 2),
        "seconds_after_the_last_timed_unit": ended - watched.ends[-1],
        "profile": watched.profile,
        "spent": time.perf_counter() - started,
    }


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    words.add_argument("--model", default="resnet50")
    words.add_argument("--data", type=Path, help="photographs; made up where left out")
    words.add_argument("--images", type=int, default=1536)
    words.add_argument("--side", type=int, default=224)
    words.add_argument("--unit-size", type=int)
    words.add_argument("--profiled", type=int, default=4, help="units, the last ones")
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(asked, Path(folder))
    print_profile(found["profile"])
    print(json.dumps({name: one for name, one in found.items() if name != "profile"}, indent=2))
    ratio = found["whole_over_bare"]
    print(f"whole over bare: **{ratio:.3f}** (aim {AIM}: {'met' if ratio >= AIM else 'missed'})")
    if asked.out:
        dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
        facts = provenance({"argv": sys.argv[1:]}, torch.device(asked.device), dtype)
        asked.out.write_text(json.dumps(facts | {"results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
