"""Runs of Ray workers with faults: kills, hangs, errors and lost machines, once each."""

import os
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sufficit import Classifier
from sufficit.data.batch import Batch
from sufficit.data.images import ImageSource
from sufficit.metrics.column import Heading
from sufficit.probes.probe import ProbeBase, SourceRows
from sufficit.runs.config import Workers, config_from
from sufficit.runs.engine import run
from sufficit.runs.job import Job, make_job
from sufficit.runs.results import RunResults
from sufficit.runs.store import MAPS
from sufficit.runs.workers import spreading
from sufficit.sources import sources_of

SIDE, UNIT = 8, 2


class FaultyProbe(ProbeBase):
    """A probe that notes every unit, and does once what each fault file says."""

    key = "mean"
    headings = {"mean_value": Heading("mean", "Mean value of the heatmap")}

    def __init__(self, folder: Path, pause: float = 0.0) -> None:
        self.folder, self.pause = folder, pause

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        images = batch.images
        numbers = [round(float(image[0, 0, 0]) * 1000) for image in images]
        with (self.folder / "calls").open("a") as file:
            file.write(f"{os.getpid()} {' '.join(map(str, numbers))}\n")
        time.sleep(self.pause)
        for path in sorted(self.folder.glob("fault-*")):
            kind = path.name.split("-")[1]
            if kind in ("always", "hoard"):
                if int(path.read_text()) in numbers:
                    raise RuntimeError("this image always fails") if kind == "always" else hoarded()
                continue
            try:
                path.unlink()  # only one process can
            except FileNotFoundError:
                continue
            commit(kind)
        return {name: {"mean_value": one.mean((1, 2))} for name, one in maps.items()}


def commit(kind: str) -> None:
    """Do what a fault is called."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exit":
        os._exit(1)
    elif kind == "hang":
        time.sleep(10_000)
    elif kind == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "memory":
        torch.empty(2**60, dtype=torch.uint8)
    elif kind == "error":
        raise RuntimeError("once")
    else:
        raise ValueError(kind)


def hoarded() -> RuntimeError:
    """Take memory slowly until killed."""
    held = []
    for _ in range(64):
        held.append(torch.ones(2**26))  # 256 MiB
        time.sleep(0.1)
    return RuntimeError(f"not killed with {len(held)} parts of memory")


def plant(folder: Path, *kinds: str, text: str = "") -> None:
    """Write the files of some faults."""
    for k, kind in enumerate(kinds):
        (folder / f"fault-{kind}-{k}").write_text(text)


def calls(folder: Path) -> Counter[tuple[int, ...]]:
    """How often each batch of images was scored."""
    lines = (folder / "calls").read_text().splitlines()
    return Counter(tuple(map(int, line.split()[1:])) for line in lines)


def processes(folder: Path) -> list[int]:
    """The processes that scored, the latest last."""
    path = folder / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[0]) for line in lines]


def small_classifier() -> Classifier:
    """Three classes, a layer for CAMs."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Classifier(nn.Sequential(*layers, nn.Linear(4, 3)).eval(), "0")


def small_job(folder: Path, images: int = 16, *, pause: float = 0.0, **options: object) -> Job:
    """A job of few tiny images, whose number is in their first pixel."""
    folder.mkdir(parents=True, exist_ok=True)
    classifier = small_classifier()
    pixels = torch.rand(images, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    pixels[:, 0, 0, 0] = torch.arange(images) / 1000
    source = ImageSource.from_tensors(pixels, None, [k % 3 for k in range(images)])
    coarse = {"value_step": 0.25, "percent_step": 0.25, "donors": 2, "checks": ["none"]}
    config = config_from({"model": "", "data": "", "methods": ["own"], **coarse, **options})
    methods: dict[str, Any] = {"own": brightness, "gradcam": "gradcam", "random": "random"}
    return make_job(
        config,
        classifier=classifier,
        images=source,
        sources=sources_of(methods, controls=False),
        unit=UNIT,
        probes=[FaultyProbe(folder, pause)],
    )


def brightness(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
    """The mean over the channels."""
    return images.mean(1)


def run_workers(job: Job, out: Path, workers: Workers, **options: bool) -> RunResults:
    """A run of workers."""
    with spreading(workers, job) as (placed, spread):
        return run(placed, out, progress=False, spread=spread, **options)


def rows(out: Path) -> dict[str, bytes]:
    """The files of a run that must not depend on who computed it."""
    patterns = ("*/*.parquet", "*/heatmaps.npz", "summary.json", "pairs.csv", "curves.json")
    found = sorted(path for pattern in patterns for path in out.glob(pattern))
    # Each map carries the digest of its run, which differs by nothing here.
    found += sorted((out / MAPS).glob("*"))
    return {str(path.relative_to(out)): path.read_bytes() for path in found}
