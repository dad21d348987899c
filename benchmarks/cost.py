"""What a run costs up to a billion images, computed from rates that were measured.

    python benchmarks/cost.py                       # the table of benchmarks/README.md
    python benchmarks/cost.py --short               # that of docs/scale.md, for a million images
    python benchmarks/cost.py --price 2 --gpus 8    # with your own price and number of GPUs
    python benchmarks/cost.py --measure             # bytes per image, from a small run here

Nothing in the table is measured at its size. The rate is that of `compare` on files with one H200
(results/whole-h200.json: ResNet50, 224 px, bf16, compiled), the calls are those of the plan without
those for heatmaps and for checks on some of the images, and the bytes are those of a small run with
maps of 7x7 cells (results/storage-cpu.json). Prices are inputs.
"At most" is the disk just before a run ends and deletes its units. Of requests to object storage,
it counts a GET per image, and for each of the two files of a unit a PUT and a GET.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bands import band_probe
from sufficit import Classifier
from sufficit.data.images import ImageSource
from sufficit.data.loader import Unit
from sufficit.provenance import provenance
from sufficit.runs.config import DONORS, METHODS, RANKED, RunConfig, config_from
from sufficit.runs.engine import run
from sufficit.runs.job import Job, make_job
from sufficit.runs.spread import Score, in_this_process
from sufficit.runs.store import MAPS, UNITS, Store
from sufficit.runs.unit_rows import Rows
from sufficit.sources import CONTROLS

RESULTS = Path(__file__).parent / "results"
STORAGE = RESULTS / "storage-cpu.json"
SIZES = (10**6, 10**8, 10**9)
MEASURED = 64  # images of the small run
SIDE = 224  # pixels of an image
FEWEST = RANKED  # masks per image and method of a run with many images
SHORT = (0, 2, 3, 5, 6)  # columns of the short table
OFTEN = 2  # files of a unit: rows, maps
BYTES = (
    "bytes of scores.parquet per image and method",
    "bytes of maps per image and method",
    "bytes of curves.parquet per image, method and band",
    "bytes of units per image, method and band, while it runs",
)


NOTHING = Classifier(nn.Identity())  # it is not asked


@dataclass(frozen=True)
class Run:
    """A kind of run, in words, and what it asks the model."""

    words: str
    methods: int
    leak: bool = False
    masks: int | None = None  # per image and method; None for all
    columns: tuple[str, ...] | None = None
    value_step: float = RunConfig.value_step
    percent_step: float = RunConfig.percent_step

    @property
    def bands(self) -> int:
        """Masks per image and method."""
        if self.masks is not None:
            return self.masks
        steps = {"value_step": self.value_step, "percent_step": self.percent_step}
        return len(band_probe(NOTHING, columns=self.columns, **steps).bands) + 1  # the whole image

    @property
    def calls(self) -> int:
        """Calls of the model per image, at most: bands of the plan and masks of leakage."""
        leaked = 2 * DONORS + 5 if self.leak else 0
        return self.methods * (self.bands + leaked)


RUNS = (
    Run("one method, MSI in steps of 0.05", 1, columns=("msi",), value_step=0.05, percent_step=0.1),
    Run("one method, eleven columns", 1),
    # The control that marks the whole image takes no passes worth counting.
    Run("`compare` as it is: 5 CAMs, 2 controls", len(METHODS) + len(CONTROLS) - 1, masks=FEWEST),
    Run(
        "`compare --calls exact`, 5 CAMs, 2 controls, leakage on all images",
        len(METHODS) + len(CONTROLS) - 1,
        leak=True,
    ),
)


def rate() -> float:
    """Calls per second of one GPU in a whole run on files."""
    found = json.loads((RESULTS / "whole-h200.json").read_text())["results"]
    return float(found["passes_per_second"])


def compute_table(price: float, gpus: int, unit: int, put: float, get: float) -> list[list[str]]:
    """A row per kind of run and number of images."""
    storage = json.loads(STORAGE.read_text())["results"]
    rows = []
    for kind in RUNS:
        for images in SIZES:
            hours = images * kind.calls / rate() / 3600
            each, maps, curves, units = (storage[name] for name in BYTES)
            stored = curves * kind.bands if kind.masks is None else 0  # curves need all masks
            kept = images * kind.methods * (each + maps + stored)
            most = kept + images * kind.methods * units * kind.bands
            requests = images * get / 1000 + math.ceil(images / unit) * OFTEN * (put + get) / 1000
            rows.append(
                [
                    kind.words,
                    f"10^{round(math.log10(images))}",
                    f"{kind.calls:,}",
                    _few(hours),
                    _few(hours / gpus / 24),
                    _few(hours * price),
                    _few(kept / 1e9),
                    _few(most / 1e9),
                    _few(requests),
                ]
            )
    return rows


def table(
    price: float, gpus: int, unit: int, put: float, get: float, *, short: bool = False
) -> str:
    """The rows as Markdown; in short those of the fewest images, with few columns."""
    head = ["run", "images", "calls per image", "GPU-hours", f"days on {gpus} GPUs"]
    head += [f"GPUs at ${price:g} an hour, $", "results, GB", "at most, GB"]
    head += ["requests, $"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    rows = compute_table(price, gpus, unit, put, get)
    lines += rows[:: len(SIZES)] if short else rows
    if short:
        lines = [[cells[k] for k in SHORT] for cells in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _few(value: float) -> str:
    """Two significant digits.

    >>> _few(123456.0), _few(0.0123), _few(4.56)
    ('120,000', '0.012', '4.6')
    """
    if value == 0:
        return "0"
    digits = 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(0, digits)}f}"


def measure(images: int = MEASURED) -> dict[str, float]:
    """Bytes of a small run of `compare` as it is, while it runs and kept."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 32, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    classifier = Classifier(nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 10)).eval(), "1")
    pixels = torch.rand(images, 3, SIDE, SIDE)
    source = ImageSource.from_tensors(pixels, None, [k % 10 for k in range(images)])
    checks = ("controls", "fill", "leak")
    options = {"model": "", "data": "", "donors": 2, "checks": checks, "calls": "exact"}
    job = make_job(config_from(options), classifier=classifier, images=source)
    found: dict[str, float] = {}

    def measured(job: Job, store: Store, score: Score, units: Sequence[Unit]) -> Iterator[Rows]:
        """Compute the units, and look at the files of those that are done."""
        for rows in in_this_process(job, store, score, units):
            yield rows
            done = [*(store.folder / UNITS).glob("unit-*")]
            if done:
                sizes = sum(path.stat().st_size for path in done)
                found["units"] = sizes / (len(done) * len(rows))  # per image

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        run(job, place, progress=False, spread=measured)
        rows = {name: _bytes(place, f"*/{name}.parquet") for name in ("scores", "curves")}
        maps = _bytes(place, f"{MAPS}/*")
    each = images * len(job.sources)
    assert job.first_probe is not None
    bands = each * (len(job.first_probe.bands) + 1)
    per = (
        rows["scores"] / each,
        maps / each,
        rows["curves"] / bands,
        images * found["units"] / bands,
    )
    return dict(zip(BYTES, per, strict=True)) | {"images": images}


def _bytes(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--price", type=float, default=3.0, help="dollars per GPU-hour")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--unit-size", type=int, default=256, help="images per unit")
    parser.add_argument("--put", type=float, default=0.005, help="dollars per 1,000 PUT requests")
    parser.add_argument("--get", type=float, default=0.0004, help="dollars per 1,000 GET requests")
    parser.add_argument("--short", action="store_true", help="a million images, few columns")
    parser.add_argument("--measure", action="store_true", help="measure the bytes of a small run")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> str:
    """What the script prints."""
    asked = parse(words)
    if not asked.measure:
        prices = (asked.price, asked.gpus, asked.unit_size, asked.put, asked.get)
        return table(*prices, short=asked.short)
    facts = provenance({"argv": [*words]}, torch.device("cpu"), torch.float32)
    text = json.dumps(facts | {"results": measure()}, indent=2)
    STORAGE.write_text(text + "\n")
    return text


if __name__ == "__main__":
    print(main(sys.argv[1:]))
