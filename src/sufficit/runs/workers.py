"""Where units are computed: in this process, or by Ray's workers."""

from collections.abc import Iterator
from contextlib import contextmanager

from sufficit.runs.config import Workers
from sufficit.runs.engine import Spread, in_this_process
from sufficit.runs.job import Job


@contextmanager
def spreading(workers: Workers | None, job: Job) -> Iterator[Spread]:
    """Have the workers inside; without any, units are computed in this process."""
    if workers is None:
        yield in_this_process
        return
    from sufficit.runs.ray_workers import RayWorkers  # which imports Ray

    with RayWorkers(workers, job) as cluster:
        yield cluster.spread
