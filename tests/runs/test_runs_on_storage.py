"""Runs whose images, model, adapter and heatmaps are on object storage, and their results here."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from object_server import KEY, SECRET, ObjectServer, denied, environment_with, missing
from small_runs import FLAGS, assert_same_rows
from sufficit import Classifier, Lax
from sufficit.data.heatmap_files import HeatmapFile

pytestmark = pytest.mark.processes
SAME = ("summary.json", "pairs.csv", "shown.safetensors")  # but for paths, the same files


@pytest.fixture
def inputs(digits: Path, bucket: str, object_server: ObjectServer) -> tuple[str, str]:
    """The same digits, heatmaps, saved classifier and adapter in a folder and in a bucket."""
    folder = digits.parent
    Classifier.load("sufficit:digits").save(folder / "net")
    Lax.from_pretrained("sufficit:digits").save_pretrained(folder / "digits-lax")
    object_server.upload(folder, f"{bucket}/in")
    return str(folder), f"{bucket}/in"


def words(place: str, out: Path | str) -> list[str]:
    methods = f"gradcam,{place}/digits-lax,{place}/maps.npz"
    given = ["--model", f"{place}/net", "--data", f"{place}/digits", "--methods", methods]
    return ["compare", *given, "--out", str(out), *FLAGS]


def files_in(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.mark.slow
def test_a_comparison_of_files_on_object_storage_equals_the_local_one(
    inputs: tuple[str, str], bucket: str, sufficit, tmp_path: Path
) -> None:
    local, remote = inputs
    here, out = Path(local) / "out", tmp_path / "from-storage"
    assert sufficit(*words(local, here)).code == 0
    ran = sufficit(*words(remote, out))
    assert ran.code == 0, ran.err
    assert_same_rows(here, out, ("gradcam", "digits-lax", "maps", "random"))
    for name in SAME:
        assert (out / name).read_bytes() == (here / name).read_bytes()
    assert files_in(out) == files_in(here)
    record = json.loads((out / "run.json").read_text())
    assert record["config"]["data"] == f"{remote}/digits"
    assert record["skipped"] == []
    for name in files_in(out):
        content = (out / name).read_bytes()
        assert SECRET.encode() not in content
        assert KEY.encode() not in content
    assert SECRET not in ran.out + ran.err


@pytest.mark.parametrize("command", ["compare", "explain", "train-lax", "figure"])
def test_results_on_object_storage_are_refused(
    inputs: tuple[str, str], bucket: str, object_server: ObjectServer, sufficit, command: str
) -> None:
    local, _ = inputs
    model = ("--model", f"{local}/net")
    given: tuple[str, ...] = {
        "compare": (*model, "--data", f"{local}/digits", "--methods", "gradcam"),
        "explain": (f"{local}/digits", *model),
        "train-lax": (*model, "--data", f"{local}/digits"),
        "figure": (local,),
    }[command]
    before = len(object_server.requests)
    ran = sufficit(command, *given, "--out", f"{bucket}/out/r.svg")
    assert ran.code == 2
    assert f"cannot write to {bucket}/out" in ran.words + " ".join(ran.err.split())
    assert [one for one in object_server.requests[before:] if one[0] == "PUT"] == []


def test_credentials_on_the_command_line_are_written_nowhere(
    inputs: tuple[str, str], bucket: str, sufficit
) -> None:
    local, _ = inputs
    before = {*Path(local).rglob("*")}
    secret = f"s3://{KEY}:{SECRET}@{bucket[5:]}"
    for flag in ("--model", "--data", "--methods", "--out", "--weights", "--config"):
        ran = sufficit(*words(local, f"{local}/out"), flag, f"{secret}/in")
        assert ran.code == 2
        assert SECRET not in ran.out + ran.err
        assert KEY not in ran.out + ran.err
        assert "set them in the environment" in ran.err
    for command in ("status", "report", "figure", "explain"):
        model = ("--model", "sufficit:digits") if command == "explain" else ()
        ran = sufficit(command, f"{secret}/in", *model)
        assert (ran.code, SECRET in ran.out + ran.err) == (2, False)
    assert {*Path(local).rglob("*")} == before


@pytest.mark.slow
def test_explain_and_evaluate_read_object_storage(
    inputs: tuple[str, str], bucket: str, object_server: ObjectServer, sufficit, tmp_path: Path
) -> None:
    local, remote = inputs
    drawn = {local: tmp_path / "drawn-here", remote: tmp_path / "drawn-there"}
    for folder, out in drawn.items():
        given = ("--model", f"{folder}/net", "--methods", f"gradcam,{folder}/digits-lax")
        ran = sufficit("explain", f"{folder}/digits", *given, "--out", out)
        assert ran.code == 0, ran.err
    for name in files_in(drawn[local]):
        one, other = drawn[local] / name, drawn[remote] / name
        if one.suffix == ".npz":  # the archive holds the time
            with HeatmapFile(one) as maps, HeatmapFile(other) as other_maps:
                assert maps.digest() == other_maps.digest()
        elif one.name != "run.json":
            assert other.read_bytes() == one.read_bytes()
    object_server.upload(drawn[remote], f"{bucket}/drawn")
    scored = {}
    for folder, maps_in in ((local, str(drawn[local])), (remote, f"{bucket}/drawn")):
        maps = (
            "--heatmaps",
            f"{maps_in}/gradcam+fit.npz",
            "--out",
            tmp_path / f"run-{len(scored)}",
        )
        given = ("--model", f"{folder}/net", "--data", f"{folder}/digits")
        ran = sufficit("evaluate", *given, *maps, "--json", *FLAGS)
        assert ran.code == 0, ran.err
        scored[folder] = json.loads(ran.out)["columns"]
    assert scored[local] == scored[remote]
    image = f"{remote}/digits/{first_image(local)}"
    ran = sufficit("explain", image, "--model", f"{remote}/net", "--out", local)
    assert ran.code == 0, ran.err


def first_image(folder: str) -> str:
    digits = Path(folder) / "digits"
    return min(digits.rglob("*.png")).relative_to(digits).as_posix()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_an_object_that_is_gone_is_skipped_and_a_lost_server_is_not(
    inputs: tuple[str, str], object_server: ObjectServer, sufficit, tmp_path: Path
) -> None:
    local, remote = inputs
    name = first_image(local)
    object_server.faults.append(missing("GET", name))
    ran = sufficit(*words(remote, tmp_path / "out"))
    assert ran.code == 0, ran.err
    assert f"Skipped {name}: can't be opened" in ran.err
    object_server.faults[:] = [denied("GET", "/digits/")]
    ran = sufficit(*words(remote, tmp_path / "other"))
    assert ran.code == 2
    assert "can't be reached" in ran.err
    assert "skipped" not in ran.err.lower()
    object_server.faults.clear()
    ran = sufficit(*words(remote, tmp_path / "other"))
    assert ran.code == 0, ran.err
    for flag in ("--data", "--model"):
        ran = sufficit(*words(remote, tmp_path / "three"), flag, "s3://no-such-bucket/x")
        assert (ran.code, "Traceback" in ran.err) == (2, False)
        assert "s3://no-such-bucket/x" in ran.err


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_workers_of_ray_read_object_storage(
    inputs: tuple[str, str], sufficit, tmp_path: Path
) -> None:
    _, remote = inputs
    assert sufficit(*words(remote, tmp_path / "here")).code == 0
    # In a process of its own, as a command is: Ray keeps the token of a cluster of earlier tests.
    asked = [*words(remote, tmp_path / "ray"), "--workers", "1"]
    command = [sys.executable, "-m", "sufficit.cli", *asked]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert_same_rows(tmp_path / "here", tmp_path / "ray", ("gradcam", "digits-lax", "maps"))
    assert SECRET not in ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_another_server_gives_the_same_run(
    inputs: tuple[str, str], tmp_path: Path, object_server: ObjectServer, sufficit
) -> None:
    local, _ = inputs
    assert sufficit(*words(local, f"{local}/out")).code == 0
    folder, out = tmp_path / "served" / "birds", tmp_path / "from-rclone"
    folder.mkdir(parents=True)
    for name in ("digits", "net", "digits-lax"):
        shutil.copytree(Path(local) / name, folder / name)
    shutil.copy(Path(local) / "maps.npz", folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program = Path(sys.executable).with_name("rclone")
    command = [program, "serve", "s3", folder.parent, "--addr", address]
    command += ["--auth-key", f"{KEY},{SECRET}", "--config", "/dev/null", "--vfs-cache-mode", "off"]
    source = Path(sys.modules["sufficit"].__file__ or "").parents[1]
    env = environment_with(object_server) | {"AWS_ENDPOINT_URL": f"http://{address}"}
    env |= {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "AWS_MAX_ATTEMPTS": "10"}
    env |= {"AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required"}  # as docs/files.md says
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        given = [sys.executable, "-m", "sufficit.cli", *words("s3://birds", out)]
        ran = subprocess.run(
            given, env=env, capture_output=True, text=True, timeout=300, check=False
        )
    finally:
        server.terminate()
        server.wait()
    assert ran.returncode == 0, ran.stderr
    assert_same_rows(Path(local) / "out", out, ("gradcam", "digits-lax", "maps"))
