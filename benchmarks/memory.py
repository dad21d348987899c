"""Does memory stay flat? A comparison of one method on many small images in tar shards.

    OMP_NUM_THREADS=1 python benchmarks/memory.py --out benchmarks/results/memory-cpu.json

Images of 16 px are made up and written to shards, found, explained by Grad-CAM and scored by a
small net on coarse curves; the resident set is read at ten points of the scoring and after each
step.
"""

import argparse
import io
import json
import os
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from sufficit import Classifier, View
from sufficit.compare import score_folder
from sufficit.comparing.settings import Settings
from sufficit.data.images import find_pictures
from sufficit.results import provenance

SIDE, SHARD = 16, 10_000
POINTS = 10


def resident() -> float:
    """MiB of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


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


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--images", type=int, default=100_000)
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    points: list[dict[str, float]] = []
    steps = {"begun": resident()}
    with tempfile.TemporaryDirectory() as place:
        shards = Path(place) / "shards"
        shards.mkdir()
        write_shards(shards, asked.images)
        steps["shards written"] = resident()
        begun = time.perf_counter()
        pictures = find_pictures(shards)
        found = time.perf_counter() - begun
        steps["pictures found"] = resident()

        def told(done: float, total: float) -> None:
            if done >= len(points) / POINTS * total and len(points) <= POINTS:
                points.append({"images": done, "mib": resident()})
                print(f"{done:9.0f} images {points[-1]['mib']:8.1f} MiB", flush=True)

        settings = Settings(
            model="small", data=str(shards), methods=("gradcam",), controls=False, leak=False,
            value_step=0.25, percent_step=0.25, targets="label",
        )  # fmt: skip
        begun = time.perf_counter()
        score_folder(
            settings, Path(place) / "run", classifier=small_net(), pictures=pictures, progress=told
        )
        seconds = time.perf_counter() - begun
        steps["scores joined"] = resident()
    growth = points[-1]["mib"] - points[1]["mib"]
    print(
        f"{asked.images} images in {seconds:.0f} s, found in {found:.1f} s; from a tenth of them to"
        f" all, memory grew by {growth:.1f} MiB; {steps}"
    )
    if asked.out:
        results = {"points": points, "steps_mib": steps, "growth_mib": growth, "seconds": seconds}
        results |= {"images": asked.images, "seconds_to_find": found}
        facts = provenance({"argv": sys.argv[1:]}, torch.device("cpu"), torch.float32)
        asked.out.write_text(json.dumps(facts | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
