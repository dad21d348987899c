"""Adapters trained by Ray are those of one process, also when workers die."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from small_table import assert_same_table, narrow_nets, small_table
from sufficit import UserError, Workers
from sufficit.data.splits import Split
from sufficit.reproduce.adapters import train_on
from sufficit.reproduce.pipeline import TablePipeline
from sufficit.reproduce.table_plan import PLAN, read_plan
from sufficit.runs import distributed
from sufficit.runs.distributed import RayCluster, WorkerWarning

pytestmark = [pytest.mark.processes, pytest.mark.slow]
ray = pytest.importorskip("ray")
TWO = Workers(count=2)


@pytest.fixture(scope="module", autouse=True)
def two_cpus() -> Iterator[None]:
    """Ray on this machine for all tests of the file."""
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=2, object_store_memory=10**8, **options)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning that workers have not started, however busy the machine is."""
    monkeypatch.setattr(distributed, "PATIENCE", float("inf"))


@dataclass(frozen=True)
class FaultySplit(Split):
    """Images that do once, in the middle of the training, what a file says."""

    order: Path = Path()
    calls: list[int] | None = None

    def part(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        assert self.calls is not None
        self.calls.append(1)
        if len(self.calls) == 9 and self.order.exists():  # of 4 for features and 3 per epoch
            word = self.order.read_text()
            self.order.unlink()
            if word == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("these images always fail")
        return super().part(rows)


@pytest.mark.usefixtures("undrawn")
def test_a_table_of_workers_is_that_of_one_process(table: Path, tmp_path: Path) -> None:
    said: list[str] = []
    small_table(tmp_path / "run", workers=TWO, say=said.append)
    assert_same_table(table, tmp_path / "run")
    for name in ("lax-paper-0", "lax-robust-0"):
        files = [out / "adapters" / name / "model.safetensors" for out in (table, tmp_path / "run")]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert f"adapter {name}" in json.loads((tmp_path / "run" / "seconds.json").read_text())
        assert any(line.startswith(f"adapter {name}: ") for line in said)
    assert not list((tmp_path / "run" / "adapters").rglob("checkpoint.pt"))


def stopped(table: Path, out: Path, word: str) -> TablePipeline:
    """A table whose adapters are missing, with images that do what the word says."""
    shutil.copytree(table / "classifier", out / "classifier")
    shutil.copy(table / PLAN, out / PLAN)
    (out / "order").write_text(word)
    found = TablePipeline(read_plan(out), out, None, torch.device("cpu"), lambda line: None)
    train, held = found.parts
    faulty = FaultySplit(train.images, train.labels, train.side, None, out / "order", [])
    vars(found)["parts"] = faulty, held
    return found


def test_an_adapter_whose_worker_dies_resumes_on_another(table: Path, tmp_path: Path) -> None:
    with narrow_nets(), RayCluster(Workers(count=1), torch.device("cpu")) as cluster:
        pipeline = stopped(table, tmp_path, "die")
        with pytest.warns(WorkerWarning, match="adapter lax-paper-0 failed, try 1 of 3: "):
            done = [name for name, *_ in train_on(cluster, pipeline, ["lax-paper-0"])]
    assert done == ["lax-paper-0"]
    assert not (tmp_path / "order").exists()
    weights = Path("adapters") / "lax-paper-0" / "model.safetensors"
    assert (tmp_path / weights).read_bytes() == (table / weights).read_bytes()


def test_an_adapter_that_fails_is_named_and_the_others_are_trained(
    table: Path, tmp_path: Path
) -> None:
    names = ["lax-paper-0", "lax-robust-0"]
    with narrow_nets(), RayCluster(Workers(count=1), torch.device("cpu")) as cluster:
        pipeline = stopped(table, tmp_path, "fail")
        done = []
        with pytest.raises(UserError, match="1 of 2 adapters failed: lax-paper-0: RuntimeError"):
            done += [name for name, *_ in train_on(cluster, pipeline, names)]
    trained = sorted(path.parent.name for path in tmp_path.glob("adapters/*/trained.json"))
    assert trained == ["lax-robust-0"]


def test_a_worker_that_cannot_see_the_folder_says_so(table: Path, tmp_path: Path) -> None:
    with narrow_nets(), RayCluster(Workers(count=1), torch.device("cpu")) as cluster:
        pipeline = stopped(table, tmp_path, "")
        pipeline.classifier  # noqa: B018  # loaded while its folder is there
        (tmp_path / PLAN).unlink()
        with pytest.raises(UserError, match="give --out a folder that all machines share"):
            list(train_on(cluster, pipeline, ["lax-paper-0"]))
