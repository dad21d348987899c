"""The steps of the paper's tables: in order, once, side by side, in time, on another machine."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pandas
import pytest

import reproduce
from state import pack, unpack
from steps import Clock, OutOfTimeError, Step, facts_of, mark_of, minutes_of, work


class Recorder:
    """Makes steps that note when they run."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def step(self, name: str, *needs: str, seconds: float = 0.0) -> Step:
        def run(clock: Clock) -> dict[str, str]:
            self.ran.append(name)
            return {"by": name}

        return Step(name, run, needs, seconds)


def test_steps_run_once_after_what_they_need(tmp_path: Path) -> None:
    made = Recorder()
    steps = [made.step("c", "a", "b"), made.step("b", "a"), made.step("a")]
    assert work(steps, tmp_path, Clock(None))
    assert made.ran == ["a", "b", "c"]
    assert work(steps, tmp_path, Clock(None))
    assert made.ran == ["a", "b", "c"]
    assert facts_of(tmp_path, "b")["by"] == "b"
    assert minutes_of(tmp_path) < 1


def test_a_step_begins_only_if_its_time_is_left(tmp_path: Path) -> None:
    made = Recorder()
    steps = [made.step("long", seconds=100), made.step("short", seconds=1)]
    assert not work(steps, tmp_path, Clock(50))
    assert made.ran == ["short"]
    assert work(steps, tmp_path, Clock(101))
    assert made.ran == ["short", "long"]


def test_a_step_that_runs_out_of_time_goes_on_later(tmp_path: Path) -> None:
    done: list[int] = []

    def run(clock: Clock) -> None:
        while len(done) < 4:
            done.append(len(done))
            if len(done) == 2:
                clock.end = 0.0
            clock.check()

    steps = [Step("slow", run)]
    assert not work(steps, tmp_path, Clock(10))
    assert not mark_of(tmp_path, "slow").exists()
    assert len(done) == 2
    assert work(steps, tmp_path, Clock(10))
    assert len(facts_of(tmp_path, "slow")["spans"]) == 2


def test_an_error_is_not_marked_as_done(tmp_path: Path) -> None:
    def run(clock: Clock) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        work([Step("bad", run)], tmp_path, Clock(None))
    assert not mark_of(tmp_path, "bad").exists()


def test_processes_share_the_steps(tmp_path: Path) -> None:
    """Two workers: neither does what the other does, both wait for what both need."""
    ran: list[str] = []
    both = threading.Barrier(2, timeout=20)

    def meet(name: str) -> Step:
        def run(clock: Clock) -> None:
            both.wait()  # both are at work at once
            ran.append(name)

        return Step(name, run, ("first",))

    last = Recorder()
    steps = [Step("first", lambda clock: None), meet("a"), meet("b"), last.step("last", "a", "b")]
    found: list[bool] = []
    workers = [
        threading.Thread(target=lambda: found.append(work(steps, tmp_path, Clock(30))))
        for _ in range(2)
    ]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert found == [True, True]
    assert sorted(ran) == ["a", "b"]
    assert last.ran == ["last"]


def test_a_run_is_packed_into_small_files_and_restored(tmp_path: Path) -> None:
    out, state = tmp_path / "out", tmp_path / "state"
    (out / "done").mkdir(parents=True)
    (out / "locks").mkdir()
    content = bytes(range(256)) * 40
    (out / "done" / "a.json").write_text("{}")
    (out / "weights").write_bytes(content)
    (out / "locks" / "a.lock").write_text("")
    (out / "half.part").write_text("x")
    parts = pack(out, state, part=200, most=99)
    assert len(parts) > 1
    assert max(path.stat().st_size for path in parts) <= 200
    assert unpack(state, tmp_path / "again")
    files = sorted(p.name for p in (tmp_path / "again").rglob("*") if p.is_file())
    assert files == ["a.json", "weights"]
    assert (tmp_path / "again" / "weights").read_bytes() == content
    assert not unpack(tmp_path, out)


def test_what_has_no_room_is_left_out_with_the_mark_of_its_step(tmp_path: Path) -> None:
    out, state, again = tmp_path / "out", tmp_path / "state", tmp_path / "again"
    (out / "done").mkdir(parents=True)
    for name in ("a", "b"):
        (out / "done" / f"{name}.json").write_text("{}")
    (out / "a.safetensors").write_bytes(bytes(100))
    (out / "b.safetensors").write_bytes(bytes(50_000))
    pack(out, state, part=5_000, most=4)
    assert unpack(state, again)
    assert [path.name for path in sorted(again.rglob("*.*"))] == ["a.safetensors", "a.json"]
    (out / "results").mkdir()
    (out / "results" / "run.json").write_text("{}")
    pack(out, state, part=5_000, most=4)
    assert unpack(state, tmp_path / "third")
    assert (tmp_path / "third" / "done" / "b.json").exists()


TINY = "--images 4 --train-images 64 --test-images 20 --epochs 2 --lax-epochs 1 --twin-epochs 1"
TINY += " --seeds 1 --step 0.25"
COMMAND = ["synthetic-mnist", "--quick", *TINY.split()]


class Ticking(Clock):
    """Runs out of time at the nth check, counted over all."""

    checks: Iterator[int]
    at: int

    def check(self, done: float = 0, total: float = 0) -> None:
        if next(type(self).checks) == type(self).at:
            raise OutOfTimeError


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_table_that_is_stopped_again_and_again_has_the_rows_of_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(name: str) -> pandas.DataFrame:
        found = pandas.read_parquet(tmp_path / name / "results" / "rows.parquet")
        return found.drop(columns=[one for one in found if one.startswith("calls")])

    reproduce.main([*COMMAND, "--device", "cpu", "--out", str(tmp_path / "whole")])
    monkeypatch.setattr(reproduce, "Clock", Ticking)
    place = tmp_path / "place-0"
    for start in range(40):
        Ticking.checks, Ticking.at = iter(range(10**9)), int(1.4**start)  # further each time
        words = [*COMMAND, "--device", "cpu", "--out", str(place), "--keep", str(tmp_path / "s")]
        reproduce.main([*words, "--restore", str(tmp_path / "s")])
        if (place / "results" / "run.json").exists():
            break
        place = tmp_path / f"place-{start + 1}"  # as on another machine
    assert start > 3
    pandas.testing.assert_frame_equal(rows("whole"), rows(place.name), atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_processes_make_a_table(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [*COMMAND, "--device", "cpu", "--out", str(out), "--processes", "2", "--seconds", "300"]
    reproduce.main([*words, "--keep", str(tmp_path / "state")])
    run = json.loads((out / "results" / "run.json").read_text())
    assert run["gpu_minutes"] > 0
    assert len(run["adapters"]) == 2
    assert [*(tmp_path / "state").iterdir()]
