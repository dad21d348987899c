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
    """The images that the model will be asked for, and for how long."""

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
    """The work that is left of a run; None where it cannot be timed here.

    A unit that is done in `out` counts as done. Compiled models are faster than forecast.
    """
    if workers is not None and workers.count is None:
        return None  # machines of a cluster
    images = len(job.entries)
    left = images
    with suppress(UserError):  # nothing may be there yet
        state = None if out is None else Store(out).state()
        if state is not None and state.is_finished:
            return None
        left -= 0 if state is None else state.done_images
    speed = images_per_second(job)
    if speed is None:
        return None
    known = [source.facts().passes for source in job.sources]
    drawn = sum(one for one in known if isinstance(one, int))  # a formula, as K + 1, is not counted
    whole = replace(job, config=replace(job.config, calls="exact"))
    calls, exact = (int((images * drawn + one.calls) * left / images) for one in (job, whole))
    seconds = calls / speed / (1 if workers is None else workers.count or 1)
    words = f"This takes about {duration(seconds)}: {calls:,} images through the model, which does"
    words += f" {speed:,.{0 if speed >= 10 else 1}f} per second on {job.device}."
    return Forecast(calls, seconds, f"{words} {_shorter(job)}", exact)


def images_per_second(job: Job) -> float | None:
    """How many images the model answers for, from batches of the first image."""
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
        start, done, seconds = time.perf_counter(), 0, 0.0
        while seconds < ENOUGH:
            job.classifier(batch).cpu()
            done, seconds = done + size, time.perf_counter() - start
    return done / seconds


def _shorter(job: Job) -> str:
    config, n = job.config, len(job.entries)
    ways = ["--quick (a first look)"] if not config.quick else []
    ways += ["--images 50"] if n > 100 else []
    probe = job.first_probe
    many = probe is not None and probe.drawing is None and len(probe.bands) >= SAMPLED
    ways += [f"--calls {SAMPLED}"] if many else []
    ways += ["fewer --methods"] if len(job.ranked) > 1 else []
    ways += ["--checks none"] if config.wanted_checks - {"controls"} else []
    gpu = job.classifier.device.type == "cpu" and torch.cuda.is_available()
    ways += ["--device cuda"] if gpu else []
    return f"Shorter: {', '.join(ways)}." if ways else ""
