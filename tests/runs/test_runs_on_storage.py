"""Runs whose images, model, adapter, heatmaps and results are on object storage."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas
import pytest

from object_server import (
    KEY,
    SECRET,
    ObjectServer,
    busy,
    denied,
    environment_with,
    missing,
)
from small_runs import FLAGS, assert_same_rows, config_for, interrupted, run_small
from sufficit import Classifier, Lax
from sufficit.data.heatmap_files import HeatmapFile
from sufficit.errors import GoneError, UserError
from sufficit.files import place
from sufficit.runs.overlays import _inside
from sufficit.runs.results import RunResults
from sufficit.runs.store import SCORES, Store

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


def words(place: str, out: str) -> list[str]:
    methods = f"gradcam,{place}/digits-lax,{place}/maps.npz"
    given = ["--model", f"{place}/net", "--data", f"{place}/digits", "--methods", methods]
    return ["compare", *given, "--out", out, *FLAGS]


def test_a_comparison_from_and_to_object_storage_equals_the_local_one(
    inputs: tuple[str, str], bucket: str, object_server: ObjectServer, sufficit, tmp_path: Path
) -> None:
    local, remote = inputs
    assert sufficit(*words(local, f"{local}/out")).code == 0
    ran = sufficit(*words(remote, f"{bucket}/out"))
    assert ran.code == 0
    assert f"Report: {bucket}/out/report.html" in ran.words
    copy = object_server.download(f"{bucket}/out", tmp_path / "copy")
    assert_same_rows(Path(local) / "out", copy, ("gradcam", "digits-lax", "maps", "random"))
    for name in SAME:
        assert (copy / name).read_bytes() == (Path(local) / "out" / name).read_bytes()
    files = [p.relative_to(copy).as_posix() for p in copy.rglob("*") if p.is_file()]
    base = Path(local) / "out"
    assert sorted(files) == sorted(
        p.relative_to(base).as_posix() for p in base.rglob("*") if p.is_file()
    )
    record = json.loads((copy / "run.json").read_text())
    assert record["config"]["data"] == f"{remote}/digits"
    assert record["skipped"] == []
    for path in copy.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert SECRET.encode() not in content
            assert KEY.encode() not in content
    assert SECRET not in ran.out + ran.err

    assert sufficit("status", f"{bucket}/out").words == "Finished: 6 images."
    assert sufficit("report", f"{bucket}/out", "--out", f"{bucket}/again/r.html").code == 0
    page = place(f"{bucket}/again/r.html").read_bytes()
    assert page == (copy / "report.html").read_bytes()
    drawn = sufficit("figure", f"{bucket}/out", "--images", "6", "--out", f"{bucket}/f/sheet.svg")
    assert drawn.words == f"{bucket}/f/sheet.svg"
    assert sufficit("figure", base, "--images", "6", "--out", tmp_path / "sheet.svg").code == 0
    assert place(f"{bucket}/f/sheet.svg").read_bytes() == (tmp_path / "sheet.svg").read_bytes()
    again = sufficit("compare", "--config", f"{bucket}/out/RUN.toml", "--out", f"{bucket}/two")
    assert again.code == 0
    assert object_server.download(f"{bucket}/two", tmp_path / "two")
    assert_same_rows(copy, tmp_path / "two", ("gradcam",))


def test_credentials_on_the_command_line_are_written_nowhere(
    inputs: tuple[str, str], bucket: str, object_server: ObjectServer, sufficit, tmp_path: Path
) -> None:
    local, _ = inputs
    before = {*Path(local).rglob("*")}
    secret = f"s3://{KEY}:{SECRET}@{bucket[5:]}"
    for flag in ("--model", "--data", "--methods", "--out", "--weights", "--fill", "--config"):
        given = words(local, f"{local}/out")
        ran = sufficit(*given, flag, f"{secret}/in")
        assert ran.code == 2
        assert SECRET not in ran.out + ran.err
        assert KEY not in ran.out + ran.err
        assert "set them in the environment" in ran.err
    for command in ("status", "report", "figure", "explain"):
        model = ("--model", "sufficit:digits") if command == "explain" else ()
        ran = sufficit(command, f"{secret}/in", *model)
        assert (ran.code, SECRET in ran.out + ran.err) == (2, False)
    assert {*Path(local).rglob("*")} == before


def test_a_run_interrupted_on_object_storage_resumes(
    photos: Path, bucket: str, object_server: ObjectServer, tmp_path: Path
) -> None:
    config, out = config_for(photos), place(f"{bucket}/out")
    run_small(config, tmp_path / "whole")
    interrupted(lambda: run_small(config, out))
    assert Store(out).done(SCORES) == {0}
    state = Store(out).state()
    assert (state.done_images, state.images, state.is_finished) == (4, 11, False)
    with pytest.raises(UserError, match="holds no finished run: run the same command again"):
        RunResults.read(out)
    before = len(object_server.requests)
    run_small(config, out)
    written = [path for method, path in object_server.requests[before:] if method == "PUT"]
    assert not any("scores-000000" in path for path in written)  # it was done
    copy = object_server.download(f"{bucket}/out", tmp_path / "copy")
    assert_same_rows(tmp_path / "whole", copy, ("gradcam", "layercam", "random", "center"))
    assert not any(name.startswith("units/") for name in object_server.keys(f"{bucket}/out"))
    two = place(f"{bucket}/two")
    interrupted(lambda: run_small(config, two))
    with pytest.raises(UserError, match="Cannot resume .* `seed` was 0, now 5"):
        run_small(config_for(photos, seed=5), two)


def test_a_server_lost_in_the_middle_stops_the_run_and_it_resumes(
    photos: Path, bucket: str, object_server: ObjectServer, tmp_path: Path
) -> None:
    config, out = config_for(photos), place(f"{bucket}/out")
    run_small(config, tmp_path / "whole")
    object_server.faults.append(denied("PUT", "scores-000001"))
    with pytest.raises(GoneError, match="scores-000001.* to resume"):
        run_small(config, out)
    assert Store(out).done(SCORES) == {0}
    object_server.faults[:] = [busy(2, "PUT", "scores"), busy(2, "GET")]
    run_small(config, out)
    copy = object_server.download(f"{bucket}/out", tmp_path / "copy")
    assert_same_rows(tmp_path / "whole", copy, ("gradcam", "layercam"))


def test_a_server_lost_while_results_are_read_says_so(
    photos: Path, bucket: str, object_server: ObjectServer, sufficit
) -> None:
    out = place(f"{bucket}/out")
    results = run_small(config_for(photos), out)
    for name in ("run.json", "summary.json", "gradcam/scores.parquet", "shown.safetensors"):
        object_server.faults[:] = [denied("GET", name)]
        ran = sufficit("report", out)
        assert ran.code == 2
        assert f"{bucket}/out/{name} can't be reached" in ran.err
        assert "is not complete" not in ran.err
    object_server.faults[:] = [denied("GET", "heatmaps-")]
    with pytest.raises(UserError, match="can't be reached"):  # the report shows all images here
        replace(results, shown=None).heatmaps([9], ["gradcam"])
    object_server.faults.clear()
    assert RunResults.read(out).record["n"] == 11


def test_a_server_lost_before_a_run_resumes_says_so(
    photos: Path, bucket: str, object_server: ObjectServer
) -> None:
    out = place(f"{bucket}/out")
    object_server.faults.append(denied("PUT", "scores-000001"))
    with pytest.raises(UserError, match="scores-000001"):
        run_small(config_for(photos), out)
    for method in ("HEAD", "GET"):
        object_server.faults[:] = [denied(method, "manifest.parquet")]
        with pytest.raises(GoneError, match=r"manifest.parquet can't be reached.*to resume"):
            run_small(config_for(photos), out)
    object_server.faults.clear()
    run_small(config_for(photos), out)


def test_a_server_lost_while_units_are_merged_drops_no_column(
    photos: Path, bucket: str, object_server: ObjectServer, tmp_path: Path
) -> None:
    config, out = config_for(photos, alpha_min="search"), place(f"{bucket}/out")
    run_small(config, tmp_path / "whole")
    object_server.faults.append(denied("GET", "leak-000001"))
    with pytest.raises(GoneError, match="leak-000001"):
        run_small(config, out)
    object_server.faults.clear()
    run_small(config, out)
    copy = object_server.download(f"{bucket}/out", tmp_path / "copy")
    assert_same_rows(tmp_path / "whole", copy, ("gradcam", "layercam"))


def test_a_fill_may_be_on_object_storage(
    photos: Path, bucket: str, object_server: ObjectServer, tmp_path: Path
) -> None:
    object_server.upload(photos, f"{bucket}/photos")
    local = run_small(config_for(photos, fill=str(photos / "ant/00.png"), leak=False), None)
    remote = run_small(config_for(photos, fill=f"{bucket}/photos/ant/00.png", leak=False), None)
    pandas.testing.assert_frame_equal(local.rows["gradcam"], remote.rows["gradcam"])
    with pytest.raises(UserError, match=r"or an image file, there is no file .*/none.png: check"):
        run_small(config_for(photos, fill=f"{bucket}/none.png"), None)


def test_an_image_whose_name_leads_elsewhere_is_not_written(bucket: str) -> None:
    folder = place(f"{bucket}/run/overlays")
    assert str(_inside(folder, "cat/1.png")) == f"{bucket}/run/overlays/cat/1.png"
    for name in ("../1.png", "cat/../../1.png"):
        with pytest.raises(UserError, match="leads out of .*: rename the image"):
            _inside(folder, name)
    for name in ("/1.png", "s3://other/1.png"):
        assert str(_inside(folder, name)) == f"{folder}/{name}"


def test_half_an_upload_is_no_unit(
    photos: Path, bucket: str, object_server: ObjectServer, tmp_path: Path
) -> None:
    config, out = config_for(photos), place(f"{bucket}/out")
    interrupted(lambda: run_small(config, out))
    client = object_server.client()
    given = {"Bucket": bucket[5:], "Key": "out/units/scores-000001.safetensors"}
    started = client.create_multipart_upload(**given)["UploadId"]
    client.upload_part(**given, UploadId=started, PartNumber=1, Body=bytes(5 * 2**20))
    assert Store(out).done(SCORES) == {0}
    assert run_small(config, out).record["n"] == 11


def test_an_error_before_the_first_unit_leaves_nothing(
    photos: Path, bucket: str, object_server: ObjectServer
) -> None:
    (photos / "ant" / "00.png").write_bytes(b"no image")
    with pytest.raises(UserError, match="Cannot read ant/00.png"):
        run_small(config_for(photos, on_error="stop"), place(f"{bucket}/out"))
    assert object_server.keys(f"{bucket}/out") == []


def test_overwrite_deletes_what_an_earlier_run_left_and_nothing_else(
    photos: Path, bucket: str, object_server: ObjectServer
) -> None:
    config, out = config_for(photos, methods=["gradcam"]), place(f"{bucket}/out")
    run_small(config, out)
    object_server.client().put_object(Bucket=bucket[5:], Key="out/mine.txt", Body=b"mine")
    object_server.client().put_object(Bucket=bucket[5:], Key="outer/run.json", Body=b"other")
    Store(out).clear_units()
    Store(out).clear_results()
    assert object_server.keys(f"{bucket}/out") == ["mine.txt"]
    assert object_server.keys(f"{bucket}/outer") == ["run.json"]


@pytest.mark.slow
def test_a_run_killed_on_object_storage_resumes(
    photos: Path, bucket: str, object_server: ObjectServer, tmp_path: Path
) -> None:
    code = (
        "import os, signal; from sufficit import storage; usual = storage.RemotePath.upload\n"
        "def upload(self, file):\n"
        "    if 'scores-000001' in str(self): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    usual(self, file)\n"
        "storage.RemotePath.upload = upload\n"
        "import sys; from small_runs import config_for, run_small\n"
        "from sufficit.files import place\n"
        "run_small(config_for(place(sys.argv[1])), place(sys.argv[2]))"
    )
    source = Path(sys.modules["sufficit"].__file__ or "").parents[1]
    paths = f"{source}{os.pathsep}{Path(__file__).parents[1]}"
    env = environment_with(object_server) | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(photos), f"{bucket}/out"]
    killed = subprocess.run(command, env=env, check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert Store(place(f"{bucket}/out")).done(SCORES) == {0}
    run_small(config_for(photos), tmp_path / "whole")
    run_small(config_for(photos), place(f"{bucket}/out"))
    copy = object_server.download(f"{bucket}/out", tmp_path / "copy")
    assert_same_rows(tmp_path / "whole", copy, ("gradcam", "layercam"))


def test_explain_and_evaluate_work_on_object_storage(
    inputs: tuple[str, str], bucket: str, object_server: ObjectServer, sufficit, tmp_path: Path
) -> None:
    local, remote = inputs
    drawn = {}
    for folder, out in ((local, f"{local}/drawn"), (remote, f"{bucket}/drawn")):
        given = ("--model", f"{folder}/net", "--methods", f"gradcam,{folder}/digits-lax")
        drawn[folder] = sufficit("explain", f"{folder}/digits", *given, "--out", out)
        assert drawn[folder].code == 0, drawn[folder].err
    assert f"{bucket}/drawn/gradcam.npz" in drawn[remote].words
    copy = object_server.download(f"{bucket}/drawn", tmp_path / "copy")
    for path in (p for p in (Path(local) / "drawn").rglob("*") if p.is_file()):
        name = path.relative_to(Path(local) / "drawn")
        if name.suffix == ".npz":  # the archive holds the time
            with HeatmapFile(path) as one, HeatmapFile(copy / name) as other:
                assert one.digest() == other.digest()
        elif name.name != "run.json":
            assert (copy / name).read_bytes() == path.read_bytes()
    scored = {}
    for folder, out in ((local, f"{local}/run"), (remote, f"{bucket}/run")):
        maps = f"{folder if folder == local else bucket}/drawn/gradcam.npz"
        given = ("--model", f"{folder}/net", "--data", f"{folder}/digits", "--heatmaps", maps)
        ran = sufficit("evaluate", *given, "--out", out, "--json", *FLAGS)
        assert ran.code == 0, ran.err
        scored[folder] = json.loads(ran.out)["columns"]
    assert scored[local] == scored[remote]
    image = sufficit("explain", f"{remote}/digits/{first_image(local)}", *given[:2], "--out", local)
    assert image.code == 0, image.err


def first_image(folder: str) -> str:
    digits = Path(folder) / "digits"
    return min(digits.rglob("*.png")).relative_to(digits).as_posix()


@pytest.mark.usefixtures("undrawn")
def test_an_object_that_is_gone_is_skipped_and_a_lost_server_is_not(
    inputs: tuple[str, str], bucket: str, object_server: ObjectServer, sufficit
) -> None:
    local, remote = inputs
    name = first_image(local)
    object_server.faults.append(missing("GET", name))
    ran = sufficit(*words(remote, f"{bucket}/out"))
    assert ran.code == 0, ran.err
    assert f"Skipped {name}: can't be opened" in ran.err
    object_server.faults[:] = [denied("GET", "/digits/")]
    ran = sufficit(*words(remote, f"{bucket}/other"))
    assert ran.code == 2
    assert "can't be reached" in ran.err
    assert "skipped" not in ran.err.lower()
    object_server.faults.clear()
    for flag in ("--data", "--model", "--out"):
        ran = sufficit(*words(remote, f"{bucket}/three"), flag, "s3://no-such-bucket/x")
        assert (ran.code, "Traceback" in ran.err) == (2, False)
        assert "s3://no-such-bucket/x" in ran.err


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_workers_of_ray_read_and_write_object_storage(
    inputs: tuple[str, str], bucket: str, object_server: ObjectServer, sufficit, tmp_path: Path
) -> None:
    _, remote = inputs
    assert sufficit(*words(remote, f"{bucket}/here")).code == 0
    # In a process of its own, as a command is: Ray keeps the token of a cluster of earlier tests.
    asked = [*map(str, words(remote, f"{bucket}/ray")), "--workers", "1"]
    command = [sys.executable, "-m", "sufficit.cli", *asked]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    copies = [object_server.download(f"{bucket}/{n}", tmp_path / n) for n in ("here", "ray")]
    assert_same_rows(*copies, ("gradcam", "digits-lax", "maps"))
    assert SECRET not in ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_another_server_gives_the_same_run(
    inputs: tuple[str, str], tmp_path: Path, object_server: ObjectServer, bucket: str, sufficit
) -> None:
    local, _ = inputs
    assert sufficit(*words(local, f"{local}/out")).code == 0
    folder = tmp_path / "served" / "birds"
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
    env |= {"AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required"}  # as docs/storage.md says
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        given = [sys.executable, "-m", "sufficit.cli", *words("s3://birds", "s3://birds/out")]
        ran = subprocess.run(
            given, env=env, capture_output=True, text=True, timeout=300, check=False
        )
    finally:
        server.terminate()
        server.wait()
    assert ran.returncode == 0, ran.stderr
    assert_same_rows(Path(local) / "out", folder / "out", ("gradcam", "digits-lax", "maps"))
