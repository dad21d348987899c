"""The files of docs/cluster are valid, and the docs show what the cost model prints."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sufficit.runs.config import Workers, read_toml, read_workers, workers_from

ROOT = Path(__file__).parents[1]
FILES = ROOT / "docs" / "cluster"


def loaded(name: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((FILES / name).read_text())


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml"])
def test_ray_accepts_the_files_of_virtual_machines(name: str) -> None:
    pytest.importorskip("jsonschema")
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = util.prepare_config(loaded(name))
    util.validate_config(config)
    assert config["available_node_types"]["gpu"]["max_workers"] == 8
    assert config["available_node_types"]["head"]["resources"] == {"CPU": 0}
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    for part in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert config[part][-1].startswith("RAY_AUTH_MODE=token "), part


def test_ray_refuses_a_file_with_a_wrong_field() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    util = pytest.importorskip("ray.autoscaler._private.util")
    with pytest.raises(jsonschema.ValidationError, match="min_wokers"):
        util.validate_config(util.prepare_config(loaded("aws.yaml") | {"min_wokers": 1}))


def test_the_job_of_kubernetes_has_the_fields_that_kuberay_requires() -> None:
    job = loaded("rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 60, 0)
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = set()
    for group in groups:
        assert "rayStartParams" in group
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        images.add(container["image"])
        assert container["resources"]["limits"]["memory"]
        (mount,) = container["volumeMounts"]
        assert mount["name"] == pod["volumes"][0]["name"]
    assert len(images) == 1, "driver and workers have the same versions"
    (worker,) = cluster["workerGroupSpecs"]
    assert worker["minReplicas"] <= worker["replicas"] <= worker["maxReplicas"]
    asked = shlex.split(job["spec"]["entrypoint"])
    assert asked == ["sufficit", "compare", "--config", "/shared/run.toml", "--out", "/shared/run"]
    workers = workers_from(read_workers(FILES / "run.toml"))
    assert workers == Workers(count=worker["maxReplicas"], address="auto", gpus=1)
    assert read_toml(FILES / "run.toml")["unit_size"] == 256


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command of Sufficit in these files and in the strings of docs/scale.md."""
    for path in [*FILES.iterdir(), ROOT / "docs" / "scale.md"]:
        text = path.read_text().replace("\\\n", " ").replace(">-\n", "")
        text = re.sub(r"(--out /shared/run)\n\s+", r"\1 ", text)  # the folded lines of YAML
        for found in re.findall(r"sufficit (?:compare|evaluate|explain) [^`'\n]*", text):
            yield path.name, found.split()


def test_their_commands_have_options_that_exist(sufficit: Any) -> None:
    helps: dict[str, str] = {}
    for name, words in commands():
        helps.setdefault(words[1], sufficit(words[1], "--help-all").out)
        for word in words[2:]:
            assert not word.startswith("--") or word in helps[words[1]], (name, word)
    assert {name for name, _ in commands()} == {"rayjob.yaml", "run.toml", "scale.md", "slurm.sh"}


STANDINS = {
    "srun": 'while [[ $1 == -* ]]; do [[ $1 == -w ]] && shift; shift; done\nexec "$@"',
    # So many names that a reader who stops at the first one breaks the pipe.
    "scontrol": "echo first; seq -f machine%g 100000",
    "hostname": "echo 127.0.0.1",
    "sufficit": """
echo "tasks: ${SLURM_NTASKS:-none}"
python "$(dirname "$0")/join.py" "$@"
RAY_AUTH_TOKEN=another python "$(dirname "$0")/join.py" "$@"
""",
}
JOIN = """
import os, sys, time, ray
given = dict(zip(sys.argv, sys.argv[1:]))
try:
    ray.init(address=given["--workers"], log_to_driver=False, logging_level="ERROR")
except Exception as error:
    print("refused:", type(error).__name__, error, flush=True)
    raise SystemExit(0)
while len(ray.nodes()) < 2:
    time.sleep(0.2)
print("joined by a token of", len(os.environ["RAY_AUTH_TOKEN"]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_the_script_of_slurm_starts_ray_with_a_token_on_all_machines(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    subprocess.run(["bash", "-n", FILES / "slurm.sh"], check=True)
    for name, text in STANDINS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "join.py").write_text(JOIN)
    script = (FILES / "slurm.sh").read_text().replace("GPUS=4 ", "GPUS=0 ")
    job = str(os.getpid())
    given = {"SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "first,second"}
    given |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS": "2"}
    given["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    # Without what Ray, or a run in this process, has set.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(
            ["bash", "-c", script], env=clean | given, stdout=log, stderr=log
        )
        try:
            running.wait(300)
        finally:
            running.kill()
            end_processes(job)
    assert processes_of(job) == []
    said = (tmp_path / "log").read_text()
    assert "joined by a token of 64" in said, said[-2000:]
    assert "joined by a token of 7" not in said
    assert "refused:" in said, said[-2000:]
    assert "tasks: none" in said


def end_processes(job: str) -> None:
    """Kill what the script started: at the end of a job Slurm does it."""
    ended = time.monotonic() + 30
    while (found := processes_of(job)) and time.monotonic() < ended:
        for number in found:
            with suppress(OSError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.2)  # one that ends may have started another
    shutil.rmtree(f"/tmp/ray-{job}", ignore_errors=True)


def processes_of(job: str) -> list[int]:
    """The processes that the script started, and those that Ray did."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            started = f"SLURM_JOB_ID={job}\0".encode() in (path / "environ").read_bytes()
            # Ray's agents write their title over their environment, but have their logs open.
            logs = (str(file.readlink()) for file in (path / "fd").iterdir())
            if started or any(log.startswith(f"/tmp/ray-{job}/") for log in logs):
                found.append(int(path.name))
    return found


def cost_model() -> ModuleType:
    path = ROOT / "benchmarks" / "cost.py"
    spec = importlib.util.spec_from_file_location("cost_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))  # it imports a module beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def test_the_docs_show_the_tables_of_the_cost_model() -> None:
    model = cost_model()
    assert model.main([]) in (ROOT / "benchmarks" / "README.md").read_text()
    assert model.main(["--short"]) in (ROOT / "docs" / "scale.md").read_text()


def test_the_cost_model_gives_an_answer_known_by_hand(tmp_path: Path) -> None:
    model = cost_model()
    model.rate = lambda: 354_000.0  # a thousand images a second with all columns
    bytes_each = {"results": dict.fromkeys(model.BYTES, 1)}
    (tmp_path / "bytes.json").write_text(json.dumps(bytes_each))
    model.STORAGE, model.SIZES = tmp_path / "bytes.json", (3_600_000,)
    row = model.compute_table(price=2, gpus=4, unit=100, put=5, get=1)[1]
    hours, each = 1, 1 + 1 + 354
    kept = 3_600_000 * each / 1e9
    most = kept + 3_600_000 * 354 / 1e9
    requests = 3600 + 36 * 2 * 6
    wanted = [hours, hours / 4 / 24, 2 * hours, kept, most, requests]
    assert row[2] == "354"
    found = [float(cell.replace(",", "")) for cell in row[3:]]
    assert found == pytest.approx(wanted, rel=0.05)
