"""The adapters of a table trained as tasks of Ray, each on a device of its own."""

import io
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sufficit.errors import UserError, warn_user
from sufficit.reproduce.table_plan import PLAN
from sufficit.runs.actors import lacks_memory, short
from sufficit.runs.distributed import TRIES, RayCluster, WorkerWarning

if TYPE_CHECKING:
    from sufficit.reproduce.pipeline import TablePipeline


def train_on(
    cluster: RayCluster, table: "TablePipeline", names: Sequence[str]
) -> Iterator[tuple[str, float, float]]:
    """Train these adapters; give each one's name, seconds and validation MSI when it is done.

    An adapter whose worker dies or lacks memory resumes on another one, three tries in all. What
    fails is raised at the end, when the others are done.
    """
    cluster.connect()
    ray, workers = cluster.ray, cluster.workers
    task = ray.remote(train_shipped).options(
        num_cpus=workers.cpus, num_gpus=cluster.gpus, max_retries=0
    )
    given = ray.put(_packed(table)), cluster.device, max(1, int(workers.cpus))
    left, running, tries = [*names], dict[object, str](), Counter[str]()
    failed: dict[str, str] = {}
    while left or running:
        while left and len(running) < cluster.wanted():
            name = left.pop(0)
            running[task.remote(*given, name)] = name
        for ref in ray.wait([*running])[0]:
            name = running.pop(ref)
            tries[name] += 1
            try:
                took, value = ray.get(ref)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)  # of what the training itself raised
                reason = short(error if cause is None else cause)
                if tries[name] < TRIES and (cause is None or lacks_memory(cause)):
                    words = f"adapter {name} failed, try {tries[name]} of {TRIES}: {reason}"
                    warn_user(words, WorkerWarning)
                    left.append(name)
                else:
                    failed[name] = reason
                continue
            yield name, took, value
    if failed:
        listed = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise UserError(
            f"{len(failed)} of {len(names)} adapters failed: {listed}. The others are kept: run the"
            " same command again to retry"
        )


def train_shipped(packed: bytes, device: str, threads: int, name: str) -> tuple[float, float]:
    """Train one adapter here: its seconds and its validation MSI."""
    start = time.monotonic()
    torch.set_num_threads(threads)
    # The bytes come from our own driver, which the token of the cluster vouches for.
    table, filled = torch.load(io.BytesIO(packed), map_location=device, weights_only=False)
    if not (table.out / PLAN).exists():
        raise UserError(
            f"{socket.gethostname()} cannot see {table.out / PLAN}: give --out a folder that all"
            " machines share"
        )
    table = replace(table, device=torch.device(device))
    vars(table).update(filled)
    value = table.train_named(name)
    return time.monotonic() - start, value


def _packed(table: "TablePipeline") -> bytes:
    """A table with its classifier and images, so that a worker needs no data folder."""
    from ray import cloudpickle

    filled = {"classifier": table.classifier, "parts": table.parts}
    bare = replace(table, out=table.out.absolute(), say=print, progress=False, workers=None)
    packed = io.BytesIO()
    torch.save((bare, filled), packed, pickle_module=cloudpickle)
    return packed.getvalue()
