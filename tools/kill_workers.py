"""Kill Ray workers, nodes and drivers, take their memory, and see whether runs end the same.

tools/kill.py calls it.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from digit_folder import main as write_digits

from sufficit.runs.config import Workers, config_from
from sufficit.runs.engine import run
from sufficit.runs.job import make_job
from sufficit.runs.store import MAPS, Store
from sufficit.runs.workers import spreading

IMAGES, UNIT = 40, 2
KINDS = ("worker", "hang", "memory", "node", "driver")
TIMEOUT = 20.0  # seconds for a unit
NODE = {"num_cpus": 1, "object_store_memory": 10**8}
METHOD = """
import resource
import time
from pathlib import Path

import torch

def slow(classifier, images, targets):
    time.sleep(1)
    try:
        Path({order!r}).unlink()  # only one worker can
    except FileNotFoundError:
        return images.mean(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**26,) * 2)
    return torch.ones(2**30)
"""


def compute(place: Path, out: Path, workers: Workers | None) -> None:
    """Compare two methods on digits, one of which is slow enough to be killed."""
    config = config_from(
        {
            "model": "sufficit:digits",
            "data": str(place / "digits"),
            "methods": ["gradcam", f"slow=python:{place / 'slow.py'}:slow"],
            "checks": ["none"],
            "device": "cpu",
            "value_step": 0.25,
            "percent_step": 0.25,
        }
    )
    with spreading(workers, make_job(config, unit=UNIT)) as (job, spread):
        run(job, out, progress=False, spread=spread)


def rows(out: Path) -> dict[str, bytes]:
    """The files that must not depend on who computed them."""
    patterns = ("*/*.parquet", f"{MAPS}/*", "summary.json", "pairs.csv", "curves.json")
    found = sorted(path for pattern in patterns for path in out.glob(pattern))
    return {str(path.relative_to(out)): path.read_bytes() for path in found}


def own_workers() -> list[int]:
    """The actors below this process; other clusters of this machine are left alone."""
    parents, actors = {}, []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)] = int(stat[1])
            if (path / "cmdline").read_bytes().startswith(b"ray::UnitWorker") and stat[0] != "T":
                actors.append(int(path.name))
    found = []
    for actor in actors:
        pid = actor
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        found += [actor] if pid == os.getpid() else []
    return found


class Trial:
    """A cluster of a head and two nodes, and a driver that is started again until it is done."""

    def __init__(self, place: Path) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 10**8}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.new_node() for _ in range(2)]
        self.place, self.counts = place, Counter[str]()
        self.driver: subprocess.Popen[bytes] | None = None

    def new_node(self) -> Any:
        """A node of one CPU; on a busy machine Ray gives up on some after 30 seconds."""
        for _ in range(9):
            with suppress(Exception):  # Ray raises no kind of its own
                return self.cluster.add_node(**NODE)
        return self.cluster.add_node(**NODE)

    def stop(self) -> None:
        """End what is still there."""
        if self.driver is not None:
            self.driver.kill()
        self.cluster.shutdown()

    def kills(self) -> int:
        """How many there were."""
        return sum(self.counts[kind] for kind in KINDS)

    def start(self, out: Path) -> subprocess.Popen[bytes]:
        """A driver in a process of its own."""
        words = [sys.executable, __file__, "--driver", str(self.place), "--out", str(out)]
        self.counts["drivers started"] += 1
        with (self.place / "log").open("ab") as log:
            return subprocess.Popen(
                [*words, "--address", self.cluster.address], stdout=log, stderr=log
            )

    def survive(self, out: Path, chance: random.Random, kills: int, end: float) -> None:
        """Let a run end that is disturbed every few seconds."""
        driver, done = self.start(out), 0
        while True:
            self.driver = driver
            with suppress(subprocess.TimeoutExpired):
                driver.wait(chance.uniform(0.2, 2))
            if driver.returncode == 0:
                return
            if driver.returncode is not None:  # killed, or some units failed three times
                self.counts["runs that ended with failed units"] += driver.returncode > 0
                driver = self.start(out)
            elif self.kills() < kills and time.monotonic() < end:
                now = len(Store(out).done())
                if now > done and self.disturb(chance, driver):  # never twice without a unit done
                    done = now

    def disturb(self, chance: random.Random, driver: subprocess.Popen[bytes]) -> bool:
        """Kill or stop something; whether there was something."""
        kind = chance.choices(KINDS, (6, 2, 2, 2, 1))[0]
        workers = own_workers()
        if kind in ("worker", "hang") and not workers:
            return False
        if kind == "worker":
            os.kill(chance.choice(workers), signal.SIGKILL)
        elif kind == "hang":
            os.kill(chance.choice(workers), signal.SIGSTOP)
        elif kind == "memory":
            (self.place / "memory").touch()  # the next call of the method takes more than there is
        elif kind == "node":
            self.cluster.remove_node(self.nodes.pop(0), allow_graceful=False)
            self.nodes.append(self.new_node())
        else:
            driver.kill()
        self.counts[kind] += 1
        print(kind, dict(self.counts), flush=True)
        return True


def kill_workers(kills: int, minutes: float, chance: random.Random) -> Counter[str]:
    """Disturb runs until there were enough kills, or no further ones after so long; count them."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    runs = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_digits(place / "digits", IMAGES)
        (place / "slow.py").write_text(METHOD.format(order=str(place / "memory")))
        compute(place, place / "undisturbed", None)
        trial = Trial(place)
        end = time.monotonic() + 60 * minutes
        try:
            while trial.kills() < kills and time.monotonic() < end:
                out = place / f"run-{runs}"
                trial.survive(out, chance, kills, end)
                runs += 1
                assert rows(out) == rows(place / "undisturbed"), f"run {runs} differs"
        finally:
            trial.stop()
    return trial.counts


if __name__ == "__main__":  # a driver, in a process of its own
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("--driver", "--out", "--address"):
        parser.add_argument(option, required=True)
    asked = parser.parse_args()
    limits = Workers(count=2, address=asked.address, unit_timeout=TIMEOUT)
    compute(Path(asked.driver), Path(asked.out), limits)
