"""Ray workers compute the same numbers, whoever fails; what is started is closed to others."""

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from faults import (
    UNIT,
    calls,
    plant,
    processes,
    rows,
    run_workers,
    small_classifier,
    small_job,
)
from small_runs import write_photos
from sufficit import Classifier, UserError, Workers, compare
from sufficit.classifier.source_code import run_user_code
from sufficit.data.images import list_images
from sufficit.runs import ray_cluster, ray_spread, ray_worker
from sufficit.runs.engine import run, score_unit
from sufficit.runs.job import Job
from sufficit.runs.store import Store
from sufficit.runs.workers import spreading
from sufficit.sources import sources_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]
ray = pytest.importorskip("ray")
TWO = Workers(count=2)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning that workers have not started, however busy the machine is."""
    monkeypatch.setattr(ray_spread, "PATIENCE", float("inf"))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The rows of a run in this process."""
    place = tmp_path_factory.mktemp("undisturbed")
    run(small_job(place, save_heatmaps=True), place / "out", progress=False)
    return rows(place / "out")


def survive(place: Path, workers: Workers = TWO, **options: Any) -> dict[str, bytes]:
    """The rows of a run of workers."""
    job = small_job(place, **{"save_heatmaps": True, **options})
    run_workers(job, place / "out", workers)
    return rows(place / "out")


def wait_for(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_workers_compute_the_rows_of_one_process(
    machines: Any, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    assert survive(tmp_path) == wanted
    assert max(calls(tmp_path).values()) == 1
    assert os.getpid() not in processes(tmp_path)
    assert len(wanted) > 8


def test_leakage_and_the_search_of_alpha_are_the_same_too(machines: Any, tmp_path: Path) -> None:
    options = {"checks": ["leak"], "alpha_min": "search", "save_heatmaps": True}
    run(small_job(tmp_path / "one", **options), tmp_path / "one" / "out", progress=False)
    assert survive(tmp_path / "two", **options) == rows(tmp_path / "one" / "out")
    one, two = calls(tmp_path / "one"), calls(tmp_path / "two")
    assert sum(two.values()) == sum(one.values())


def test_workers_stop_at_the_look_of_one_process_with_the_same_rows(
    machines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sufficit.runs.job.FIRST_LOOK", 4)
    monkeypatch.setattr("sufficit.runs.stopping.UNMET", 0)
    first = run(small_job(tmp_path / "first", within=1.0), None, progress=False)
    assert first.record.within is not None
    within = 0.99 * first.record.within["half_width"]  # not yet at the first look
    one = run(small_job(tmp_path / "one", within=within), tmp_path / "one" / "out", progress=False)
    said = one.record.within
    assert said is not None
    assert said["reached"]
    assert 4 < said["images"] < 16
    assert survive(tmp_path / "two", within=within, save_heatmaps=False) == rows(
        tmp_path / "one" / "out"
    )
    assert json.loads((tmp_path / "two" / "out" / "run.json").read_text())["within"] == said
    assert sum(map(len, calls(tmp_path / "two"))) >= said["images"]
    kept = {path.name for path in (tmp_path / "two" / "out" / "drawn").iterdir()}
    assert kept == {path.name for path in (tmp_path / "one" / "out" / "drawn").iterdir()}


@pytest.mark.filterwarnings("ignore::sufficit.runs.ray_cluster.WorkerWarning")
def test_workers_that_die_or_fail_are_replaced(
    machines: Any, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    faults = ("kill", "memory", "error", "exit")
    plant(tmp_path, *faults)
    assert survive(tmp_path) == wanted
    assert not list(tmp_path.glob("fault-*"))
    batches = calls(tmp_path)
    assert sum(batches.values()) == len(batches) + len(faults)


def test_a_result_that_waits_for_the_driver_is_not_late(machines: Any, tmp_path: Path) -> None:
    found = []
    limited = Workers(count=2, unit_timeout=4)
    job = small_job(tmp_path, images=8)
    with Store.locked(None) as owned, spreading(limited, job) as (placed, spread):
        store = owned.start(placed.key(), placed.entries)
        for computed in spread(
            placed, store, functools.partial(score_unit, placed), [*placed.units]
        ):
            found.append(computed.unit)
            time.sleep(5)  # meanwhile the other worker is done
    assert sorted(found) == [0, 1, 2, 3]


def test_a_worker_killed_in_the_middle_of_a_unit_loses_no_row(
    machines: Any, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    def kill_one() -> None:
        wait_for(lambda: processes(tmp_path))
        os.kill(processes(tmp_path)[0], signal.SIGKILL)  # its first unit takes two seconds

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_one)
        with pytest.warns(ray_cluster.WorkerWarning, match="try 1: ") as said:
            assert survive(tmp_path, pause=2) == wanted
        killing.result()
    assert f"(process {processes(tmp_path)[0]} on " in str(said[0].message)
    batches = calls(tmp_path)
    assert sum(batches.values()) == len(batches) + 1
    assert max(batches.values()) == 2


@pytest.mark.filterwarnings("ignore::sufficit.runs.ray_cluster.WorkerWarning")
def test_units_that_take_too_long_are_named_and_the_same_command_computes_them(
    machines: Any, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    faults = ("freeze", "hang")
    plant(tmp_path, *faults)
    limited = Workers(count=2, unit_timeout=8)
    with pytest.raises(UserError, match=r"2 of 8 units failed: .*: no result after 8 s .*again"):
        survive(tmp_path, limited)
    state = Store(tmp_path / "out").state()
    assert (state.done, len(state.failed)) == (6, 2)
    before = calls(tmp_path)
    assert survive(tmp_path, limited) == wanted
    assert (calls(tmp_path) - before).total() == len(faults)


@pytest.mark.filterwarnings("ignore::sufficit.runs.ray_cluster.WorkerWarning")
def test_a_run_ends_on_the_other_machines_if_a_lost_one_never_comes_back(
    machines: Any, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(survive, tmp_path, pause=0.4)
            wait_for(lambda: running.done() or len({*processes(tmp_path)}) > 1)
            machines.remove_node(machines.second, allow_graceful=False)
            assert running.result(timeout=120) == wanted
    finally:
        machines.second = machines.add_node(num_cpus=1, object_store_memory=10**8)


@pytest.mark.filterwarnings("ignore::sufficit.runs.ray_cluster.WorkerWarning")
def test_a_lost_machine_and_a_new_one_lose_no_unit(
    machines: Any, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as pool:  # Ray starts nodes in the main thread only
        running = pool.submit(survive, tmp_path, pause=0.4)
        wait_for(lambda: running.done() or len({*processes(tmp_path)}) > 1)
        machines.remove_node(machines.second, allow_graceful=False)
        machines.second = machines.add_node(num_cpus=1, object_store_memory=10**8)
        assert running.result() == wanted
    batches = calls(tmp_path)
    assert sum(batches.values()) <= len(batches) + 1


def test_a_unit_that_always_fails_is_named_and_the_others_are_done(
    machines: Any, wanted: dict[str, bytes], tmp_path: Path, sufficit: Any
) -> None:
    plant(tmp_path, "always", text="5")
    with (
        pytest.warns(ray_cluster.WorkerWarning, match=r"unit 2 \(2 images, .* log /"),
        pytest.raises(UserError, match=r"1 of 8 units failed: unit 2 \(2 images, .*again"),
    ):
        survive(tmp_path)
    state = Store(tmp_path / "out").state()
    assert (state.done, state.units) == (7, 8)
    assert (state.done_images, state.images) == (14, 16)
    assert state.failed[0]["unit"] == 2
    assert calls(tmp_path)[4, 5] == 3
    told = sufficit("status", tmp_path / "out")
    assert "7 of 8 units 14 of 16 images" in told.words
    assert "Failed: unit 2 (image-0004, image-0005): RuntimeError: this image always" in told.words
    # Ray prints what became of the nodes of earlier tests whenever it notices, also before these.
    told = sufficit("status", tmp_path / "out", "--json").out
    assert json.loads(told[told.index("{") :])["units"] == 8
    (tmp_path / "fault-always-0").unlink()
    before = calls(tmp_path)
    assert survive(tmp_path) == wanted
    assert (calls(tmp_path) - before).total() == 1
    lines = [line.strip() for line in sufficit("status", tmp_path / "out").out.splitlines()]
    assert lines[-2] == "Finished: 16 images."  # the next command is last


def test_errors_of_the_user_stop_the_run_as_in_one_process(machines: Any, tmp_path: Path) -> None:
    job = small_job(tmp_path)
    (own,) = sources_of({"own": raises_user_error}, controls=False)
    with pytest.raises(UserError, match="this method has no map"):
        run_workers(replace(job, sources=(own,)), tmp_path / "out", Workers(count=1))


def raises_user_error(*_: object) -> None:
    raise UserError("this method has no map: draw one")


def test_a_lack_of_memory_is_recognized_with_what_to_do() -> None:
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(2**60, dtype=torch.uint8)
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA"), torchs.value):
        assert "lower --batch-size" in ray_worker.short(error)
    with pytest.raises(UserError) as wrapped:
        run_user_code("mine.py:own", lambda: [0] * 2**60)
    assert "mine.py:own raised MemoryError" in str(wrapped.value)
    assert "lower --batch-size" in ray_worker.short(wrapped.value)
    died = "killed by SIGKILL by OOM killer due to high memory usage, or ray stop was called"
    for error in (RuntimeError("other"), RuntimeError(died)):
        assert "memory:" not in ray_worker.short(error)


def test_compare_in_python_has_workers_that_get_lambdas_and_closures(
    machines: Any, tmp_path: Path
) -> None:
    classifier, images = small_classifier(), torch.rand(6, 3, 8, 8)
    factor = 0.5
    methods = {
        "lambda": lambda model, images, targets: images.mean(1),
        "closure": functools.partial(lambda k, model, images, targets: factor * images[:, k], 1),
    }
    options: dict[str, Any] = {"value_step": 0.25, "percent_step": 0.25, "unit_size": 2}
    given = (classifier, images, methods)
    for name, workers in (("one", None), ("two", 2), ("three", Workers(count=1, cpus=0.5))):
        place = tmp_path / name
        compare(*given, out=place, workers=workers, progress=False, checks="none", **options)
    assert len(rows(tmp_path / "one")) > 8
    assert rows(tmp_path / "one") == rows(tmp_path / "two") == rows(tmp_path / "three")


def test_compare_in_python_with_a_twin_has_the_rows_of_one_process(
    machines: Any, tmp_path: Path
) -> None:
    classifier, twin = small_classifier(), small_classifier()
    with torch.no_grad():
        twin.model[-1].weight.mul_(-1)  # so that it says something else
    images = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"value_step": 0.25, "percent_step": 0.25, "unit_size": 2}
    options |= {"twin": twin, "fills": ["black", "blur"], "checks": "none", "progress": False}
    found = [
        compare(classifier, images, ["gradcam"], out=tmp_path / name, workers=workers, **options)
        for name, workers in (("one", None), ("two", 2))
    ]
    assert rows(tmp_path / "one") == rows(tmp_path / "two")
    for results in found:
        scores = results.rows["gradcam"]
        assert (scores["fid_minus_pixel"] != scores["fid_minus_pixel_twin"]).all()
        assert results.record.twin == found[0].record.twin


def test_a_cluster_without_room_for_a_worker_is_told_what_each_needs(
    machines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_spread, "PATIENCE", 0.0)
    text = "no worker has started yet: each needs 2 CPUs and 0 GPUs, the cluster has 2 CPUs"
    with pytest.raises(ray_cluster.WorkerWarning, match=text):  # an error here, else it waits
        survive(tmp_path, Workers(count=1, cpus=2))


def test_what_cannot_be_sent_to_workers_is_named(machines: Any, tmp_path: Path) -> None:
    lock, images = threading.Lock(), torch.rand(2, 3, 8, 8)

    def locked(model: Classifier, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with lock:
            return images.mean(1)

    options: dict[str, Any] = {"value_step": 0.25, "percent_step": 0.25, "checks": "none"}
    options |= {"out": tmp_path / "out", "workers": 1, "progress": False}
    with pytest.raises(UserError, match=r"the method locked to workers \(TypeError: cannot pickle"):
        compare(small_classifier(), images, {"locked": locked}, **options)
    classifier = small_classifier()
    classifier.model.lock = lock
    with pytest.raises(UserError, match=r"cannot send the model .*locks.*or run without workers"):
        compare(classifier, images, ["gradcam"], **options)
    assert not (tmp_path / "out").exists()


def test_a_worker_that_cannot_import_a_method_says_what_to_do(tmp_path: Path) -> None:
    sys.modules["vanishing"] = module = types.ModuleType("vanishing")
    exec(
        "class Own:\n    def __call__(self, model, images, targets): return images[:, 0]",
        vars(module),
    )
    job = small_job(tmp_path)
    job = replace(job, sources=sources_of({"own": module.Own()}, controls=False))
    given = shipped(job)
    del sys.modules["vanishing"]
    found = ray_worker.UnitWorker().load(given)
    assert isinstance(found, ray_worker.Problem)
    assert found.is_final
    assert "(No module named 'vanishing'): install it there, or set PYTHONPATH" in found.reason


def shipped(job: Job, **changed: Any) -> ray_worker.Shipment:
    """What is sent to an actor."""
    score = functools.partial(score_unit, job)
    return replace(ray_worker.ship(score, job, device="cpu", threads=1, sample=None), **changed)


def test_a_worker_that_cannot_see_the_images_or_has_another_version_says_so(
    tmp_path: Path,
) -> None:
    images = list_images(write_photos(tmp_path))
    given = shipped(small_job(tmp_path), sample=images[0])
    assert isinstance(ray_worker.UnitWorker().load(given), str)
    Path(images[0].file).unlink()
    found = ray_worker.UnitWorker().load(given)
    assert isinstance(found, ray_worker.Problem)
    assert found.is_final
    assert "cannot see the image ant/00.png: give --data a folder" in found.reason
    other = replace(given, versions={"sufficit": "0.0", "torch": "0.0"})
    found = ray_worker.UnitWorker().load(other)
    assert isinstance(found, ray_worker.Problem)
    assert "the driver 0.0: install the same version" in found.reason


class NotedRay(types.ModuleType):
    """Ray as far as a connection needs it; it notes how it was started."""

    exceptions = ray.exceptions

    def __init__(self) -> None:
        super().__init__("ray")
        self.given: dict[str, Any] = {}
        self.environment: dict[str, str] = {}

    def is_initialized(self) -> bool:
        return bool(self.given)

    def init(self, **given: Any) -> None:
        self.given, self.environment = given, dict(os.environ)

    def nodes(self) -> list[dict[str, str]]:
        return [{"NodeManagerAddress": "127.0.0.1"}]

    def shutdown(self) -> None:
        self.given = {}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> NotedRay:
    found = NotedRay()
    monkeypatch.setattr(ray_cluster, "_import_ray", lambda *, here: found)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")  # so that what a run sets is undone
        monkeypatch.delenv(name)
    return found


def test_the_ray_of_a_run_has_a_token_of_its_own_and_a_folder_that_others_cannot_read(
    noted: NotedRay,
) -> None:
    cluster = ray_cluster.RayCluster(TWO, torch.device("cpu"))
    cluster.connect()
    folder = Path(noted.given["_temp_dir"])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (noted.given["address"], noted.given["include_dashboard"]) == ("local", False)
    assert len(noted.environment["RAY_AUTH_TOKEN"]) == 64
    assert "RAY_AUTH_MODE" not in noted.environment  # Ray then asks for the token by itself
    cluster.close(keep_logs=False)
    assert not folder.exists()
    assert not noted.given


def test_usage_statistics_are_off_and_the_loopback_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    ray_cluster._import_ray(here=True)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


@pytest.mark.parametrize("mode", ["token", ""])
def test_joining_a_cluster_without_a_token_says_what_that_means(
    noted: NotedRay, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        cluster = ray_cluster.RayCluster(Workers(address=address), torch.device("cpu"))
        wanted = pytest.warns(ray_cluster.WorkerWarning, match="anyone who reaches its ports can")
        with nullcontext() if mode else wanted:
            cluster.connect()
        assert noted.given["address"] == address


DRIVER = """
from pathlib import Path
from faults import run_workers, small_job
from sufficit.runs.config import Workers
import torch
torch.set_num_threads(1)
place = Path({place!r})
job = small_job(place, save_heatmaps=True, pause=0.5)
run_workers(job, place / "out", Workers(count=2))
"""


def test_a_killed_driver_leaves_no_process_and_the_same_command_resumes(
    wanted: dict[str, bytes], tmp_path: Path
) -> None:
    temp = tempfile.mkdtemp(prefix="s", dir="/tmp")  # short, for the paths of sockets
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": temp}
    environment.pop("RAY_AUTH_MODE", None)
    words = [sys.executable, "-c", DRIVER.format(place=str(tmp_path))]
    driver = subprocess.Popen(words, env=environment)
    store = Store(tmp_path / "out")
    try:
        wait_for(lambda: driver.poll() is not None or len(store.done()) > 1, 300)
        assert driver.poll() is None
        workers = {*processes(tmp_path)}
        listening = addresses(driver.pid)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        assert len(listening) > 2
        assert {*listening} == {"127.0.0.1"}
        done, before = len(store.done()), calls(tmp_path)
        subprocess.run(words, env=environment, check=True)
    finally:
        driver.kill()
        driver.wait()
        shutil.rmtree(temp, ignore_errors=True)
    assert rows(tmp_path / "out") == wanted
    again = calls(tmp_path) - before
    assert again.total() == 16 // UNIT - done


OUT_OF_MEMORY = """
from pathlib import Path
from faults import plant, run_workers, small_job
from sufficit import UserError
from sufficit.runs.config import Workers
place = Path({place!r})
job = small_job(place)
plant(place, "hoard", text="5")
try:
    run_workers(job, place / "out", Workers(count=1))
except UserError as error:
    print(error)
"""


def test_a_worker_that_ray_kills_for_its_memory_is_retried_and_then_reported(
    tmp_path: Path,
) -> None:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(lines[name].split()[0]) / 2**20 for name in ("MemTotal", "MemAvailable"))
    if free < 6:
        pytest.skip("less than 6 GiB of free memory")
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "RAY_memory_usage_threshold": f"{(total - free + 4) / total:.4f}",
    }
    environment.pop("RAY_AUTH_MODE", None)
    words = [sys.executable, "-c", OUT_OF_MEMORY.format(place=str(tmp_path))]
    found = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert "1 of 8 units failed: unit 2 (2 images" in found.stdout
    assert "OutOfMemoryError: 1 worker(s) were killed" in found.stdout
    assert "lower --batch-size or --unit-size, or have fewer workers" in found.stdout
    assert "try 2: " in found.stderr
    state = Store(tmp_path / "out").state()
    assert state.done == 7
    assert "Out of memory: lower --batch-size" in state.failed[0]["reason"]
    assert "log /" in state.failed[0]["reason"]


def addresses(driver: int) -> list[str]:
    """The addresses that a process and those it started listen at."""
    processes, found = {driver}, []
    stats = {int(p.parent.name): p for p in Path("/proc").glob("[0-9]*/stat")}
    parents = {
        pid: int(path.read_text().rpartition(")")[2].split()[1]) for pid, path in stats.items()
    }
    for _ in range(5):
        processes |= {pid for pid, parent in parents.items() if parent in processes}
    sockets = set()
    for pid in processes:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(str(link.readlink()))
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                raw = bytes.fromhex(words[1].split(":")[0])
                found.append(".".join(map(str, raw[-4:][::-1])))
    return found


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--workers", 0), "workers must be 1 or more, got 0"),
        (("--workers", -2), "workers must be 1 or more, got -2"),
        (("--workers", 1, "--unit-timeout", -1), "unit_timeout must be more than 0"),
        (("--workers", "somewhere"), "a number, auto, HOST:PORT or ray://HOST:PORT, got 'some"),
        (("--workers", "127.0.0.1:1"), "no Ray cluster answers at --workers 127.0.0.1:1"),
        (("--config", "cpus = 0"), "cpus must be more than 0"),
        (("--config", "gpus = 99"), "need 99 GPUs, this machine has"),
        (("--config", "gpu = 1"), "Did you mean 'gpus'?"),
    ],
)
def test_wrong_options_are_refused(
    sufficit: Any,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: Any,
    text: str,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whatever other tests have started
    given = ("--model", "sufficit:digits", "--data", images, "--out", tmp_path / "out")
    if words[0] == "--config":
        (tmp_path / "RUN.toml").write_text(f"[workers]\ncount = 1\n{words[1]}\n")
        words = ("--config", tmp_path / "RUN.toml")
    found = sufficit("compare", *given, "--device", "cpu", *words)
    assert found.code == 2
    assert text in found.err
    assert not (tmp_path / "out").exists()


def test_without_the_extra_the_install_command_is_named(
    sufficit: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    given = ("--model", "sufficit:digits", "--data", images, "--out", tmp_path / "out")
    found = sufficit("evaluate", *given, "--heatmaps", images / "maps.npz", "--workers", 2)
    assert found.code == 2
    assert "pip install '.[ray]'" in found.err


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import numpy as np
    from digit_folder import main as write_digits

    place = tmp_path_factory.mktemp("digits")
    write_digits(place, 3)
    names = [path.relative_to(place).as_posix() for path in place.rglob("*.png")]
    np.savez(place / "maps.npz", **{name: np.full((8, 8), 0.5, np.float32) for name in names})
    return place
