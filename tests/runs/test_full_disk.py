"""Disks that are full, folders that may not be written or vanish: one error, nothing lost."""

import os
import re
import resource
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from digit_images import write_digits
from small_runs import assert_same_rows, config_for, run_small
from sufficit import Lax, UserError
from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.images import list_images
from sufficit.files import is_unfinished
from sufficit.runs.config import RunConfig
from sufficit.runs.reader import Reader
from sufficit.training.validation import ValidationScores, ValidationSet

MODEL = ("--model", "sufficit:digits", "--device", "cpu")
COARSE = ("--value-step", "0.5", "--percent-step", "0.5")
COMMANDS = ("compare", "evaluate", "explain", "sanity", "train-lax", "figure", "demo")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with digits, and heatmaps of them."""
    folder = tmp_path_factory.mktemp("disk")
    write_digits(folder / "digits", 8)
    names = [picture.name for picture in list_images(folder / "digits")]
    write_heatmaps(folder / "maps.npz", {name: torch.rand(8, 8) for name in names})
    return folder


def words(command: str, place: Path, out: Path) -> Sequence[object]:
    data = ("--data", place / "digits")
    return {
        "compare": ("compare", *MODEL, *data, *COARSE, "-m", "gradcam"),
        "evaluate": ("evaluate", *MODEL, *data, *COARSE, "--heatmaps", place / "maps.npz"),
        "explain": ("explain", place / "digits", *MODEL),
        "sanity": ("sanity", *MODEL, *data, "--methods", "gradcam", "--steps", 1),
        "train-lax": ("train-lax", *MODEL, *data, "--epochs", 1),
        "figure": ("figure", place / "run", "--show", "sizes"),
        "demo": ("demo", "--images", 2, "--no-open"),
    }[command] + ("--out", out / "figure.png" if command == "figure" else out)


@contextmanager
def no_file_over(size: int) -> Iterator[None]:
    """What is written beyond so many bytes of a file fails, whoever writes it."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


@pytest.fixture
def short_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo of few model calls."""
    coarse = {"value_step": 0.5, "percent_step": 0.5}
    monkeypatch.setattr(
        "sufficit.cli.demo.RunConfig", lambda **options: RunConfig(**options | coarse)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("short_demo")
@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "figure"])
def test_a_full_disk_is_one_error_and_leaves_what_was_there(
    sufficit, place: Path, tmp_path: Path, command: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    notes = out / "notes.txt"
    notes.write_text("my own")
    with no_file_over(0):
        run = sufficit(*words(command, place, out))
    assert run.code == 2, run.err
    assert re.search("could not be written: .*File too large$", run.err)
    assert notes.read_text() == "my own"
    assert not [
        path for path in out.rglob("*") if is_unfinished(path.name) or path.name == "run.json"
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")
@pytest.mark.usefixtures("undrawn")
def test_a_run_resumes_when_the_disk_has_room_again(sufficit, place: Path, tmp_path: Path) -> None:
    given = words("compare", place, tmp_path / "out")
    with no_file_over(30_000):  # less than the pixels of a unit
        run = sufficit(*given)
    assert run.code == 2, run.err
    assert "could not be written: File too large" in run.err
    assert sufficit(*given).code == 0
    assert sufficit(*words("compare", place, tmp_path / "whole")).code == 0
    for method in ("gradcam", "random", "center"):
        rows = [tmp_path / out / method / "scores.parquet" for out in ("out", "whole")]
        assert rows[0].read_bytes() == rows[1].read_bytes()
    with no_file_over(0):
        run = sufficit(*words("figure", tmp_path, tmp_path / "out")[:1], tmp_path / "out",
                       "--show", "sizes", "--out", tmp_path / "figure.png")  # fmt: skip
    assert run.code == 2
    assert "figure.png could not be written: File too large" in run.err
    assert not (tmp_path / "figure.png").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_may_not_be_written_is_one_error_before_any_work(
    sufficit, place: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    below = sufficit(*words(command, place, tmp_path / "file" / "out"))
    usual = os.access
    monkeypatch.setattr(  # root may write everywhere
        "os.access", lambda path, mode, **more: mode != os.W_OK and usual(path, mode, **more)
    )
    closed = sufficit(*words(command, place, tmp_path / "closed"))
    for run in (below, closed):
        assert run.code == 2, run.err
        assert "can't be a folder of results" in run.err
    assert (tmp_path / "file").read_text() == "x"
    assert not (tmp_path / "closed").exists()


def test_a_folder_that_vanishes_during_a_run_is_one_error_and_the_run_starts_again(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out, seen = config_for(photos, checks=["controls"]), tmp_path / "out", []
    run_small(config, tmp_path / "whole")
    usual = Reader.read

    def vanishing(*given: Any) -> Any:
        seen.append(given)
        while len(seen) == 3 and out.exists():  # the unit before may be being written
            shutil.rmtree(out, ignore_errors=True)
        return usual(*given)

    with monkeypatch.context() as patched:
        patched.setattr(Reader, "read", vanishing)
        with pytest.raises(UserError, match="annot read|ould not be|annot write"):
            run_small(config, out)
    run_small(config, out)
    assert_same_rows(tmp_path / "whole", out, ("gradcam", "random"))


@pytest.mark.slow
def test_a_folder_that_vanishes_during_training_is_made_again(
    sufficit, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    usual = ValidationSet.score
    worths = chain([1.0], repeat(0.0))

    def vanishing(images: ValidationSet, *given: Any, **more: Any) -> ValidationScores:
        if not more.get("last"):  # after an epoch
            shutil.rmtree(out, ignore_errors=True)
        found = usual(images, *given, **more)
        object.__setattr__(found, "msi", next(worths))  # the first epoch is the best
        return found

    monkeypatch.setattr(ValidationSet, "score", vanishing)
    run = sufficit(*words("train-lax", place, out), "--epochs", 2)
    assert run.code == 0, run.err
    assert Lax.from_pretrained(out).trained["history"]
    assert (out / "checkpoint.pt").exists()
