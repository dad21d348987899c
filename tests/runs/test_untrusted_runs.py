"""Untrusted RUN.toml files and results: one clear error."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from small_runs import config_for, run_small, write_photos
from sufficit import Classifier, Lax, UserError
from sufficit.provenance import save_json
from sufficit.runs.config import RunConfig, config_from, read_toml, write_toml
from sufficit.runs.job import make_job
from sufficit.runs.results import RunResults
from sufficit.runs.shown import SHOWN
from sufficit.runs.store import read_tensors, save_tensors
from untrusted_files import (
    ANY,
    CHANGES,
    CUT,
    DEEP,
    DEEP_JSON,
    FUZZ,
    HUGE,
    bent,
    described,
    npy,
    npz,
    reads,
    resnet,
)

BASE = {"model": "m", "data": "d"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methods = " + "[" * DEEP + "]" * DEEP, "is not valid TOML"),
        ("seed = " + HUGE, "is not valid TOML"),
        ("seed = 0x" + "F" * 9000, "seed must be a whole number, got a value too large"),
        ("seed = 9223372036854775808", "seed must be 9223372036854775807 or less"),
        ("donors = 1_000_000_000", "donors must be 1000000 or less"),
        ("num_classes = 10_000_000", "num_classes must be 100000 or less"),
        ("batch_size = 10_000_000", "batch_size must be 1000000 or less"),
        ("unit_size = 1_000_000", "unit_size must be 100000 or less"),
        ("alpha_min = 0x" + "F" * 9000, "alpha_min must be"),
        ("seed." + ".".join("a" * 3000) + " = 1", "seed must be a whole number"),
        ("x" * 100_000 + " = 1", r"Unknown option in RUN.toml 'x+'\.\.\."),
        ("# " + "x" * 2**20, "more than 1048576 bytes"),
        ("model = 'a'\0", "is not valid TOML"),
        ('model = "\udcff"', "is not valid TOML"),
    ],
)
def test_an_untrusted_run_file_is_one_short_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "RUN.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=words) as told:
        read_toml(tmp_path / "RUN.toml")
    assert len(str(told.value)) < 1500


def test_no_reader_waits_for_a_pipe(tmp_path: Path, adapter: Path, saved: Path) -> None:
    for path in (tmp_path / "RUN.toml", adapter / "config.json", saved / "classifier.json"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    for read, path in (
        (read_toml, tmp_path / "RUN.toml"),
        (Lax.from_pretrained, adapter),
        (Classifier.load, saved),
    ):
        with pytest.raises(UserError):
            read(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    photos = write_photos(tmp_path_factory.mktemp("images"), n=5)
    run_small(config_for(photos, checks=["none"]), photos.parent / "run")
    return photos.parent / "run"


@pytest.mark.parametrize("methods", [["../../x"], ["/etc"], [3], 7])
def test_the_methods_of_a_finished_run_lie_inside_it(
    finished: Path, tmp_path: Path, methods: object
) -> None:
    record = json.loads((finished / "run.json").read_text())
    save_json(tmp_path / "run.json", record | {"methods": methods})
    save_json(tmp_path / "summary.json", {})
    with pytest.raises(UserError, match=r"can't be the name|is not complete"):
        RunResults.read(tmp_path)
    (tmp_path / "run.json").write_text(DEEP_JSON)
    with pytest.raises(UserError, match=r"run\.json could not be read"):
        RunResults.read(tmp_path)


def shorter(*names: str) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    """A change that takes the last image out of some tensors."""

    def change(tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        tensors |= {name: tensors[name][:-1] for name in names}

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, facts: facts.update(rows=[0]), "holds 5 images and 1 rows"),
        (lambda tensors, facts: facts.update(rows=[9] * 5), "out of bounds"),
        (shorter("pixels"), "holds 4 images and 5 rows"),
        (shorter("maps/gradcam"), r"heatmaps must be \[N,H,W\] = \[5, 12, 10\], got \[4, 12, 10\]"),
        (shorter("answers/layercam/targets"), "holds 5 images and 4 answers"),
        (shorter("answers/layercam/named"), "holds 5 images and 4 answers"),
        (
            lambda tensors, facts: tensors.update(pixels=tensors["pixels"][..., 3:]),
            r"heatmaps must be \[N,H,W\] = \[5, 12, 7\], got \[5, 12, 10\]",
        ),
    ],
)
def test_images_shown_that_do_not_fit_together_are_refused(
    finished: Path, tmp_path: Path, change: Callable[..., None], words: str
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    assert RunResults.read(tmp_path / "run").shown is not None
    tensors, facts = read_tensors(tmp_path / "run" / SHOWN)
    change(tensors, facts)
    save_tensors(tmp_path / "run" / SHOWN, tensors, facts)
    with pytest.raises(UserError, match=rf"is not complete \(.*{words}"):
        RunResults.read(tmp_path / "run")


@pytest.mark.parametrize("name", ["units", "run.json", "RUN.toml", "report.html", "summary.json"])
def test_no_adapter_takes_the_place_of_a_result(tmp_path: Path, adapter: Path, name: str) -> None:
    shutil.copytree(adapter, tmp_path / name)
    config = config_from({**BASE, "methods": [str(tmp_path / name)]})
    with pytest.raises(UserError, match=rf"'{name}' is a file of every run: give the source"):
        make_job(config)


def test_run_files_with_any_bytes_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "RUN.toml"
    write_toml(path, RunConfig(model="m", data="d", methods=("a", "b"), size="64", batch_size=3))
    whole = path.read_bytes()

    @FUZZ
    @given(CHANGES, CUT)
    def bend(changes: list[tuple[int, int]], cut: int | None) -> None:
        path.write_bytes(bent(whole, changes, cut))
        reads(lambda: config_from(read_toml(path)))

    bend()


@FUZZ
@given(st.sampled_from([*vars(RunConfig(model="m", data="d")), "x"]), ANY)
def test_settings_with_anything_in_a_place_are_taken_or_refused(name: str, value: object) -> None:
    reads(lambda: config_from(BASE | {name: value}))


@pytest.mark.slow
def test_all_of_them_stay_within_little_memory(tmp_path: Path, adapter: Path, saved: Path) -> None:
    npz(tmp_path / "large.npz", npy("(8000, 16000)"))
    (tmp_path / "RUN.toml").write_text("methods = " + "[" * DEEP)
    config = json.loads((adapter / "config.json").read_text())
    (adapter / "config.json").write_text(json.dumps(config | {"channels": 60_000, "widths": [200]}))
    described(saved, recipe=resnet(num_classes=10**6))
    script = """
        import resource
        from pathlib import Path
        from sufficit import Classifier, Lax, UserError
        from sufficit.runs.config import read_toml
        from sufficit.data.heatmap_files import HeatmapFile
        import torchvision.models

        def read_maps(path):
            with HeatmapFile(path) as maps:
                return maps.read("a")

        def used(what):
            line = next(l for l in Path("/proc/self/status").open() if l.startswith(what))
            return int(line.split()[1]) * 1024

        limit = used("VmSize") + 40 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for read, path in (
            (read_maps, "large.npz"), (read_toml, "RUN.toml"),
            (Lax.from_pretrained, "adapter"), (Classifier.load, "saved"),
        ):
            try:
                read(Path(path))
            except UserError as error:
                print(path, len(str(error)) < 500)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = ["large.npz", "RUN.toml", "adapter", "saved"]
    assert done.stdout.split() == [word for name in told for word in (name, "True")], done.stderr
