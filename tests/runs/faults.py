"""Runs of Ray workers with faults: kills, hangs, errors and lost machines, once each."""

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sufficit import Classifier
from sufficit.data.batch import Batch
from sufficit.data.images import ImageSource
from sufficit.runs.config import Workers, config_from
from sufficit.runs.engine import run
from sufficit.runs.job import Job, make_job
from sufficit.runs.results import RunResults
from sufficit.runs.store import MAPS
from sufficit.runs.workers import spreading
from sufficit.sources import MapFile, Maps, sources_of

SIDE, UNIT = 8, 2


class FaultySource(MapFile):
    """A source that draws brightness, notes every call, and does once what each fault file says.

    It is a kind that the engine does not guard: its errors are not those of a user's code, which
    end a run at once.
    """

    pause = 0.0

    def check(self, model: Classifier, names: Sequence[str]) -> None:
        """Accept any images."""

    def digest(self) -> str:
        """The same for every folder and pause."""
        return "brightness"

    def maps(self, model: Classifier, batch: Batch) -> Maps:
        """The mean over the channels, unless a fault comes first."""
        images, folder = batch.images, self.path
        numbers = [round(float(image[0, 0, 0]) * 1000) for image in images]
        with (folder / "calls").open("a") as file:
            file.write(f"{os.getpid()} {' '.join(map(str, numbers))}\n")
        time.sleep(self.pause)
        for path in sorted(folder.glob("fault-*")):
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
        return Maps(images.mean(1), final=True)


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
    """How often the maps of each batch of images were drawn."""
    lines = (folder / "calls").read_text().splitlines()
    return Counter(tuple(map(int, line.split()[1:])) for line in lines)


def processes(folder: Path) -> list[int]:
    """The processes that drew maps, the latest last."""
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
    own = FaultySource("own", folder)
    own.pause = pause
    methods: dict[str, Any] = {"own": own, "gradcam": "gradcam", "random": "random"}
    sources = sources_of(methods, controls=False)
    return make_job(config, classifier=classifier, images=source, sources=sources, unit=UNIT)


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
