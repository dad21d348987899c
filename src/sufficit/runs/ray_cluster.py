"""The connection to Ray: started for one run, closed to others, or a cluster that is joined."""

import os
import secrets
import shutil
import socket
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from sufficit.errors import UserError, warn_user
from sufficit.runs.config import Workers
from sufficit.runs.ray_worker import short

ANSWER = 10.0  # seconds for a cluster to accept a connection
LONGEST_FOLDER = 20  # characters
LOOPBACK = "127.0.0.1"


class WorkerWarning(UserWarning):
    """A worker failed and is replaced, or a cluster is open to others."""


class RayCluster:
    """Ray, connected when the first unit is computed and shut down at the end."""

    def __init__(self, workers: Workers, device: torch.device) -> None:
        self.workers = workers
        self.ray = _import_ray(here=workers.address is None)
        self.gpus = _gpus(workers, device)
        self.device = str(device)
        if self.gpus:
            self.device = "cuda:0"  # Ray shows a worker its own GPUs only
        elif device.type == "cuda":
            self.device = "cpu"
        self._connected = False
        self._temp: Path | None = None

    def connect(self) -> ModuleType:
        """Start Ray or join its cluster, unless this process has done so."""
        if not self.ray.is_initialized():
            if self.workers.address is None:
                self._start_here()
            else:
                self._join(self.workers.address)
            self._connected = True
        return self.ray

    def close(self, *, keep_logs: bool) -> None:
        """Shut down what `connect` started."""
        if self._connected:
            self.ray.shutdown()
        if self._temp is not None and not keep_logs:
            shutil.rmtree(self._temp, ignore_errors=True)

    def wanted(self) -> int:
        """Return how many workers to have: as asked, or as many as the cluster has room for now."""
        if self.workers.count is not None:
            return self.workers.count
        has = self.ray.cluster_resources()
        room = [has.get("CPU", 0) / self.workers.cpus]
        if self.gpus:
            room.append(has.get("GPU", 0) / self.gpus)
        return max(1, int(min(room)))

    def room(self) -> str:
        """Return what each worker needs and the cluster has, in words."""
        has = self.ray.cluster_resources()
        return (
            f"each needs {self.workers.cpus:g} CPUs and {self.gpus:g} GPUs, the cluster has"
            f" {has.get('CPU', 0):g} CPUs and {has.get('GPU', 0):g} GPUs"
        )

    def _start_here(self) -> None:
        """Start Ray for this run alone: on the loopback, with a token that only this run has."""
        count = self.workers.count or 1
        found = torch.cuda.device_count()
        if self.gpus * count > found:
            raise UserError(
                f"{count} workers with {self.gpus:g} GPUs each need {self.gpus * count:g} GPUs,"
                f" this machine has {found}: lower --workers, or gpus in [workers] of the RUN.toml"
            )
        # Without a mode Ray turns tokens on by itself; one that is set after its import has no
        # effect. The token is in the environment, because Ray's file for it is readable by others.
        os.environ.pop("RAY_AUTH_MODE", None)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Readable by this user alone; Ray's default, /tmp/ray, is open to everyone.
        # Short, because the path of a socket below it must not exceed 107 bytes.
        folder = "/tmp" if len(tempfile.gettempdir()) > LONGEST_FOLDER else None
        self._temp = Path(tempfile.mkdtemp(prefix="sufficit-ray-", dir=folder))
        self.ray.init(
            address="local",
            num_cpus=max(1, round(count * self.workers.cpus)),
            num_gpus=found if self.gpus else 0,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(self._temp),
        )
        address = self.ray.nodes()[0]["NodeManagerAddress"]
        if address != LOOPBACK:
            warn_user(
                f"Ray listens at {address} instead of {LOOPBACK}, because it was imported before"
                " this run started; a token protects it. Import sufficit.runs.ray_spread first.",
                WorkerWarning,
            )

    def _join(self, address: str) -> None:
        """Join a cluster, and say so if it is open to others."""
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            if host:  # Ray itself waits for minutes
                socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()
            self.ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError, ImportError, self.ray.exceptions.RayError) as e:
            raise UserError(
                f"no Ray cluster answers at --workers {address} ({short(e)}): start one with `ray"
                " start --head`, or give a number to start Ray on this machine"
            ) from e
        if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":  # Ray sets it for its own file
            warn_user(
                f"the Ray cluster at {address} takes no token: anyone who reaches its ports can run"
                " code as its user and read its data. Start it with RAY_AUTH_MODE=token.",
                WorkerWarning,
            )


def _gpus(workers: Workers, device: torch.device) -> float:
    """Return the GPUs per worker: as asked, else one if the model is on a GPU, or a share."""
    if workers.gpus is not None:
        return workers.gpus
    if device.type != "cuda":
        return 0.0
    if workers.address is not None:
        return 1.0
    return min(1.0, torch.cuda.device_count() / (workers.count or 1))


def _import_ray(*, here: bool) -> ModuleType:
    """Import Ray without usage statistics; what it starts here listens on the loopback alone."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keep CUDA_VISIBLE_DEVICES
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # else it prints deaths to stdout
    if here:
        # Ray replaces a loopback address given to `init` by the machine's own, but for this.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UserError(f"--workers needs Ray ({error}): pip install '.[ray]'") from error
    found: ModuleType = ray
    return found
