"""Units of a run in turns, as on a GPU: every number is that of units one after the other."""

from pathlib import Path
from typing import Any

import pytest

from small_runs import assert_same_rows, config_for, run_small
from small_runs import write_photos as photos_in
from small_streams import without_gpu
from sufficit.perturbation import predict
from sufficit.turns import wait_for_results


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photos_in(tmp_path_factory.mktemp("images"), n=26)


@pytest.mark.parametrize(
    "options",
    [
        {"checks": ["controls", "fill", "leak", "alpha-curve"]},
        {"checks": ["controls"], "methods": ["gradcam", "layercam", "rise"], "calls": "exact"},
        {"checks": ["leak"], "within": 0.9},
    ],
    ids=["checks", "a method that asks", "within"],
)
def test_the_rows_are_those_of_one_unit_after_the_other(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("sufficit.runs.job.FIRST_LOOK", 8)
    one = run_small(config_for(photos, **options), tmp_path / "one")
    without_gpu(monkeypatch)
    monkeypatch.setattr("sufficit.runs.spread.can_take_turns", lambda _: True)
    log: list[int] = []
    inside = 0

    def wait() -> None:
        nonlocal inside
        inside += 1
        log.append(inside)
        wait_for_results()
        inside -= 1

    monkeypatch.setattr(predict, "wait_for_results", wait)
    two = run_small(config_for(photos, **options), tmp_path / "two")
    assert max(log) == 2, "two units wait at a time"
    assert_same_rows(tmp_path / "one", tmp_path / "two", tuple(one.rows))
    assert one.summaries == two.summaries
