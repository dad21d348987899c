"""`sufficit status` reads from files alone how far a run is, how fast, and what failed."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from small_runs import config_for, interrupted, run_small, write_photos
from sufficit.runs.store import Store


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run of five units of two images, three of which were done at known times."""
    config, out = config_for(write_photos(tmp_path, 10), checks=["none"]), tmp_path / "out"
    interrupted(lambda: run_small(config, out, unit=2), after=3)
    now = time.time()
    for unit, ago in enumerate((70, 50, 30)):
        os.utime(Store(out).path(unit), (now - ago, now - ago))
    return out


def test_progress_pace_and_failed_units_are_told(sufficit: Any, stopped: Path) -> None:
    reason = "OutOfMemoryError: too large (process 7 on host, log /tmp/log)"
    Store(stopped).write_failure(4, [f"{k}.png" for k in range(7)], reason)
    told = sufficit("status", stopped)
    assert told.code == 0
    assert "3 of 5 units 6 of 10 images" in told.words
    assert "0.1 images/s lately, about 0:00:40 left. The last unit was done 0:00:3" in told.words
    failed = "unit 4 (0.png, 1.png, 2.png, 3.png, 4.png and 2 more): OutOfMemoryError: too large"
    assert f"Failed: {failed} (process 7 on host, log /tmp/log)" in told.words
    assert "Run the same command again to retry failed units" in told.words
    found = json.loads(sufficit("status", stopped, "--json").out)
    assert found["images_per_second"] == pytest.approx(0.1, abs=0.001)
    assert found["seconds_left"] == pytest.approx(40, abs=0.5)
    assert found["seconds_since_last_unit"] >= 30
    assert len(found["failed"][0]["images"]) == 7


def test_without_two_units_there_is_no_pace(sufficit: Any, stopped: Path) -> None:
    for unit in (1, 2):
        Store(stopped).path(unit).unlink()
    assert sufficit("status", stopped).words.startswith("1 of 5 units 2 of 10 images If it")
    assert json.loads(sufficit("status", stopped, "--json").out)["seconds_left"] is None


def test_a_folder_without_a_run_is_refused(sufficit: Any, tmp_path: Path) -> None:
    told = sufficit("status", tmp_path)
    assert told.code == 2
    assert "holds no run: give the --out of one" in told.err


def test_a_training_is_no_run_of_images(sufficit: Any, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"command": "sufficit train-lax", "history": []}')
    told = sufficit("status", tmp_path)
    assert told.code == 2
    assert "a run of another kind: give the --out of compare, evaluate, explain or a" in told.err


@pytest.mark.parametrize(
    ("over", "command", "ending"),
    [
        (True, None, "Finished."),  # from Python: there is nothing to do after the last epoch
        (True, "cd a && sufficit train-lax", "again to resume: cd a && sufficit train-lax"),
        (False, None, "Run the same command again to resume."),
    ],
)
def test_a_training_without_results_is_over_only_from_python(
    sufficit: Any, tmp_path: Path, over: bool, command: str | None, ending: str
) -> None:
    saved = {"state": {"epoch": 5}, "course": {"epochs": 5, "is_over": over}, "command": command}
    torch.save(saved, tmp_path / "checkpoint.pt")
    told = sufficit("status", tmp_path).words
    assert told.startswith("training: 5 of 5 epochs done ")
    assert told.endswith(ending)
