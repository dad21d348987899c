"""Where units are computed: in this process, or by Ray's workers."""

from collections.abc import Iterator
from contextlib import contextmanager

from sufficit.runs.config import Workers
from sufficit.runs.job import Job
from sufficit.runs.spread import Spread, in_this_process


@contextmanager
def spreading(workers: Workers | None, job: Job) -> Iterator[tuple[Job, Spread]]:
    """Have the workers inside, and the job on their device; without any, this process computes."""
    if workers is None:
        yield job, in_this_process
        return
    from sufficit.runs.ray_spread import RayWorkers  # which imports Ray

    with RayWorkers(workers, job) as cluster:
        yield cluster.job, cluster.spread
