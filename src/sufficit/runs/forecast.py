"""How long a run will take, from timed batches, and what would make it shorter."""

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sufficit.data.image_files import BadImageError
from sufficit.errors import UserError
from sufficit.perturbation.predict import usual_batch
from sufficit.progress import duration
from sufficit.runs.config import SAMPLED, Workers
from sufficit.runs.job import Job
from sufficit.runs.store import Store

LONG = 30  # seconds from which a run says how long it takes
TIMED = 4  # images of a timed batch on a CPU
ENOUGH = 0.1  # seconds to time: one batch of a small network may be ten times slower than the next


@dataclass(frozen=True)
class Forecast:
    """The number of images that pass the model, the time this takes, and a sentence about it."""

    calls: int
    seconds: float
    words: str
    exact: int  # passes with every mask

    def masks(self, job: Job) -> str:
        """How many masks the run asks for, and what all of them would take."""
        probe = job.first_probe
        if probe is None or probe.drawing is None:
            return ""
        seconds = self.seconds * self.exact / max(self.calls, 1)
        return (
            f"{job.config.calls} of {len(probe.bands) + 1} masks per image and method, drawn by"
            f" seed: {self.calls:,} forward passes. --calls exact takes {self.exact:,}, about"
            f" {duration(seconds)}."
        )


def forecast(job: Job, out: Path | None = None, workers: Workers | None = None) -> Forecast | None:
    """Return the work that is left of a run; None where it cannot be timed here.

    A unit that is done in `out` counts as done. Compiled models are faster than forecast.
    """
    if workers is not None and workers.count is None:
        return None  # machines of a cluster
    images = len(job.entries)
    left = images
    if out is not None:
        with suppress(UserError):  # nothing may be there yet
            state = Store(out).state()
            if state.is_finished:
                return None
            left -= state.done_images
    speed = images_per_second(job)
    if speed is None:
        return None
    known = [source.facts().passes for source in job.sources]
    drawn = sum(one for one in known if isinstance(one, int))  # a formula, as K + 1, is not counted
    whole = replace(job, config=replace(job.config, calls="exact"))
    calls = int((images * drawn + job.calls) * left / images)
    exact = int((images * drawn + whole.calls) * left / images)
    at_once = 1 if workers is None else workers.count or 1
    seconds = calls / speed / at_once
    rate = f"{speed:,.0f}" if speed >= 10 else f"{speed:,.1f}"
    words = (
        f"This takes about {duration(seconds)}: {calls:,} images through the model, which does"
        f" {rate} per second on {job.device}. {_shorter(job)}"
    )
    return Forecast(calls, seconds, words, exact)


def images_per_second(job: Job) -> float | None:
    """Return the model's speed, from batches of the first image; None if it cannot be read."""
    try:
        image = job.entries[0].image.read(job.classifier.view)[None].to(job.classifier.device)
    except (BadImageError, OSError):
        return None
    on_cpu = job.classifier.device.type == "cpu"
    usual = job.config.batch_size or usual_batch(job.classifier, image.shape[1:])
    size = min(TIMED, usual) if on_cpu else usual
    batch = image.repeat(size, 1, 1, 1)
    with torch.no_grad():
        job.classifier(batch[:1]).cpu()  # what the first call prepares is not timed
        start = time.perf_counter()
        done = 0
        seconds = 0.0
        while seconds < ENOUGH:
            job.classifier(batch).cpu()  # on the CPU: a GPU would still be at it
            done += size
            seconds = time.perf_counter() - start
    return done / seconds


def _shorter(job: Job) -> str:
    """Return the options that make a run shorter, as a sentence; empty where none does."""
    config = job.config
    probe = job.first_probe
    ways = []
    if not config.quick:
        ways.append("--quick (a first look)")
    if len(job.entries) > 100:
        ways.append("--images 50")
    if probe is not None and probe.drawing is None and len(probe.bands) >= SAMPLED:
        ways.append(f"--calls {SAMPLED}")
    if len(job.ranked) > 1:
        ways.append("fewer --methods")
    if config.wanted_checks - {"controls"}:
        ways.append("--checks none")
    if job.classifier.device.type == "cpu" and torch.cuda.is_available():
        ways.append("--device cuda")
    return f"Shorter: {', '.join(ways)}." if ways else ""
