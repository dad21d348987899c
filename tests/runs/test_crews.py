"""Several processes share a run, and give what one alone gives."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pandas
import pytest
from PIL import Image
from sufficit.compare import compare_folder
from sufficit.comparing.settings import settings_from

from own_model import MODEL
from sufficit import UserError, crews
from sufficit.crews import Crew, FirstGoneError, is_first, leads

SOURCE = str(Path(sys.modules["sufficit"].__file__ or "").parents[1])
COMMAND = """
import sys
from sufficit import compare, scoring
from sufficit import plots as figures
from sufficit.cli import main
from sufficit.comparing import saving

compare.compare_folder.__kwdefaults__["group"] = 3
scoring.GROUP = 3
saving._save_sheet = saving.write_report = figures.save = lambda *_: None  # take long
main()
"""
STEPS = ["--value-step", "0.25", "--percent-step", "0.25", "--device", "cpu"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Fourteen small pictures in class folders, of which one is no picture, and a model."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "command.py").write_text(COMMAND)
    pixels = np.random.default_rng(0).integers(0, 256, (14, 12, 10, 3), dtype=np.uint8)
    for i, picture in enumerate(pixels):
        path = tmp_path / "photos" / ("ant", "bee", "cat")[i % 3] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    (tmp_path / "photos" / "bee" / "04.png").write_bytes(b"no picture")
    return tmp_path / "photos"


def processes(folder: Path, *words: object, torchrun: int = 0) -> subprocess.Popen[str]:
    """The command with groups of three images, in processes of its own or torchrun's."""
    run = [sys.executable, "-W", "ignore"]
    if torchrun:
        run += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
    named = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "SUFFICIT_TRACEBACK": "1"}
    return subprocess.Popen(
        [*run, "command.py", *map(str, words)],
        cwd=folder,
        env={**{k: v for k, v in os.environ.items() if "RANK" not in k}, **named},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def comparing(out: str, *more: object) -> list[object]:
    words = ["compare", "--model", "python:model.py:make", "--data", "photos", *STEPS]
    return [*words, "--methods", "gradcam,layercam", "--donors", 3, "--out", out, *more]


def alone(place: Path, out: str) -> None:
    """The same comparison in this process."""
    settings = settings_from(
        {"model": "python:model.py:make", "data": "photos", "device": "cpu", "donors": 3}
        | {"methods": ["gradcam", "layercam"], "value_step": 0.25, "percent_step": 0.25}
    )
    with pytest.MonkeyPatch.context() as here:
        here.chdir(place)
        for slow in ("_save_sheet", "write_report"):
            here.setattr(f"sufficit.comparing.saving.{slow}", lambda *_: None)
        compare_folder(settings, Path(out), group=3)


def same_files(one: Path, other: Path, names: Sequence[str]) -> None:
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_two_processes_compare_to_the_last_digit_as_one_does(photos: Path) -> None:
    place = photos.parent
    shared = processes(place, *comparing("two", "--devices", 2))
    alone(place, "one")
    out, err = shared.communicate(timeout=300)
    assert shared.returncode == 0, err
    methods = ("gradcam", "layercam", "random", "center")
    files = [f"{m}/{name}.parquet" for m in methods for name in ("scores", "curves")]
    same_files(place / "one", place / "two", [*files, "summary.json", "pairs.csv"])
    run = json.loads((place / "two" / "run.json").read_text())
    assert [skipped["name"] for skipped in run["skipped"]] == ["bee/04.png"]
    assert not (place / "two" / "parts").exists()
    assert out.count("MSI is near +1") == 1
    assert err.count("Skipped") == 1
    assert "distributed" not in err


def test_processes_of_torchrun_evaluate_as_one_does(photos: Path) -> None:
    place = photos.parent
    names = sorted(str(p.relative_to(photos)) for p in photos.rglob("*.png"))
    maps = np.random.default_rng(1).random((len(names), 12, 10), dtype=np.float32)
    np.savez(place / "maps.npz", **dict(zip(names, maps, strict=True)))
    words = ["evaluate", "--model", "python:model.py:make", "--data", "photos", *STEPS]
    words += ["--heatmaps", "maps.npz", "--leak", "--donors", "3", "--alpha-min", "search"]
    shared = processes(place, *words, "--out", "two", "--json", torchrun=2)
    single = processes(place, *words, "--out", "one", "--json")
    (out, err), (wanted, _) = (run.communicate(timeout=300) for run in (shared, single))
    assert shared.returncode == single.returncode == 0, err
    same_files(place / "one", place / "two", ["scores.parquet", "curves.parquet", "summary.json"])
    assert json.loads(out) == json.loads(wanted)
    assert len(pandas.read_parquet(place / "two" / "scores.parquet")) == 13
    assert not (place / "two" / "parts").exists()


DYING = """
import os, signal
from sufficit.comparing import groups

whole = groups._score_group
def dying(job, parts, group, *rest):
    if os.environ.get("LOCAL_RANK") == "1" and group.number > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    whole(job, parts, group, *rest)
groups._score_group = dying
"""


def test_when_a_process_is_killed_all_end_and_a_restart_goes_on(photos: Path) -> None:
    place = photos.parent
    (place / "command.py").write_text(DYING + COMMAND)
    killed = processes(place, *comparing("out", "--devices", 2))
    killed.communicate(timeout=300)
    assert killed.returncode != 0
    parts = place / "out" / "parts"
    assert sorted(path.stem for path in parts.glob("*.safetensors")) == [
        f"scores-{number:06d}" for number in (0, 1, 2, 4)
    ]
    assert not (place / "out" / "run.json").exists()
    written = {path: path.stat().st_mtime_ns for path in parts.glob("scores-*")}
    with pytest.MonkeyPatch.context() as kept:
        kept.setattr("sufficit.keeping.Parts.remove", lambda self: None)
        alone(place, "out")
    alone(place, "whole")
    assert written.items() <= {p: p.stat().st_mtime_ns for p in parts.glob("scores-*")}.items()
    files = [f"{m}/scores.parquet" for m in ("gradcam", "layercam", "random", "center")]
    same_files(place / "out", place / "whole", [*files, "summary.json"])


class Together:
    """Several crews in threads of one process, and what each ended with."""

    def __init__(self, folder: Path, size: int = 2, run: str = "now") -> None:
        self.folder = folder
        self.crews = [Crew(rank, size, run) for rank in range(size)]
        self.ended: dict[int, Any] = {}

    def work(self, *jobs: Callable[[Crew], Any]) -> dict[int, Any]:
        threads = [
            Thread(target=self._one, args=pair) for pair in zip(self.crews, jobs, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert not any(thread.is_alive() for thread in threads)
        return self.ended

    def _one(self, crew: Crew, job: Callable[[Crew], Any]) -> None:
        try:
            with crew.meet(self.folder):
                self.ended[crew.rank] = job(crew)
        except Exception as error:
            self.ended[crew.rank] = error


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life come often, and silence is noticed soon."""
    for name, seconds in {"BEAT": 0.02, "GLANCE": 0.01, "SILENCE": 0.4, "START": 0.8}.items():
        monkeypatch.setattr(crews, name, seconds)


def staged(numbers: list[int], ticks: list[tuple[float, float]]) -> Callable[[Crew], list[int]]:
    """A stage over numbers, of which the first process knows, told in tens."""

    def job(crew: Crew) -> list[int]:
        mine = crew.mine("work", numbers if crew.first else [])
        tell = (lambda *told: ticks.append(told)) if crew.first else None
        with crew.stage("work", tell, 5, 5 + 10 * len(numbers)) as told:
            for k in range(len(mine)):
                told(10 * (k + 1), 5 + 10 * len(numbers))
        return mine

    return job


@pytest.mark.usefixtures("quick")
def test_every_number_is_done_once_and_progress_is_of_all(tmp_path: Path) -> None:
    ticks: list[tuple[float, float]] = []
    job = staged([3, 5, 6, 7, 9], ticks)
    ended = Together(tmp_path, 3).work(job, job, job)
    assert ended == {0: [3, 7], 1: [5, 9], 2: [6]}
    assert ticks[-1] == (55, 55)
    assert [done for done, _ in ticks] == sorted(done for done, _ in ticks)


def test_alone_nothing_is_written_and_nobody_waited_for(tmp_path: Path) -> None:
    ticks: list[tuple[float, float]] = []
    assert Together(tmp_path, 1).work(staged([3, 5], ticks)) == {0: [3, 5]}
    assert ticks == [(15, 25), (25, 25)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_words_of_an_earlier_run_are_not_heard(tmp_path: Path) -> None:
    job = staged([1, 2], [])
    assert Together(tmp_path, run="before").work(job, job) == {0: [1], 1: [2]}
    later = staged([7, 8], [])

    def late(crew: Crew) -> list[int]:
        time.sleep(0.2)  # what the earlier run said still lies there
        return later(crew)

    assert Together(tmp_path).work(late, later) == {0: [7], 1: [8]}


@pytest.mark.usefixtures("quick")
def test_a_crew_meets_again_elsewhere_while_it_is_met(tmp_path: Path) -> None:
    def job(crew: Crew) -> list[list[int]]:
        found = [staged([1, 2, 3], [])(crew)]
        for word in ("this", "that"):
            again = crew.again(word)
            assert (again.rank, again.size, again.device) == (crew.rank, 2, crew.device)
            with again.meet(tmp_path / word):
                found.append(staged([4, 5, 6], [])(again))
        return found

    ended = Together(tmp_path).work(job, job)
    assert ended == {0: [[1, 3], [4, 6], [4, 6]], 1: [[2], [5], [5]]}
    assert json.loads((tmp_path / "that" / "crew" / "1.json").read_text())["run"] == "now-that"


def failing(crew: Crew) -> None:
    raise UserError(f"nothing works in {crew.rank}")


@pytest.mark.usefixtures("quick")
def test_what_stops_one_process_stops_the_others(tmp_path: Path) -> None:
    job = staged([1, 2], [])
    ended = Together(tmp_path / "second").work(job, failing)
    assert str(ended[0]) == "process 1 has stopped: nothing works in 1"
    ended = Together(tmp_path / "first").work(failing, job)
    assert isinstance(ended[1], FirstGoneError)
    assert "nothing works in 0" in str(ended[1])


@pytest.mark.usefixtures("quick")
def test_who_waits_in_a_meeting_within_hears_what_ends_the_outer_one(tmp_path: Path) -> None:
    def waiting(crew: Crew) -> None:
        with crew.again("within").meet(tmp_path / "within"):
            pass

    ended = Together(tmp_path).work(failing, waiting)
    assert isinstance(ended[1], FirstGoneError)
    assert str(ended[1]) == "process 0 has stopped: nothing works in 0"
    ended = Together(tmp_path, run="later").work(waiting, failing)
    assert str(ended[0]) == "process 1 has stopped: nothing works in 1"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("met", [True, False])
def test_a_silent_process_is_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, met: bool
) -> None:
    first, silent = Crew(0, 2, "now"), Crew(1, 2, "now")
    folder = tmp_path / "crew"
    folder.mkdir()
    silent._folder = folder
    if met:
        silent._beat()
    begun = time.monotonic()
    wanted = "process 1 has given no sign of life for 0.4" if met else "for 0.8 seconds: the same"
    with pytest.raises(UserError, match=wanted), first.meet(tmp_path):
        staged([1, 2], [])(first)
    assert (0.4 if met else 0.8) < time.monotonic() - begun < 5


@pytest.mark.usefixtures("quick")
def test_processes_that_see_other_images_are_refused(tmp_path: Path) -> None:
    ended = Together(tmp_path).work(
        lambda crew: crew.check_alike({"images": (3, 4), "device": "cuda:0"}),
        lambda crew: crew.check_alike({"images": (3, 5), "device": "cuda:1"}),
    )
    assert "images is [3, 5] in process 1 and [3, 4] in the first" in str(ended[1])
    alike = Together(tmp_path / "alike").work(
        lambda crew: crew.check_alike({"images": (3, 4), "device": "cuda:0"}),
        lambda crew: crew.check_alike({"images": (3, 4), "device": "cuda:1"}),
    )
    assert alike == {0: None, 1: None}


@pytest.mark.parametrize(
    ("named", "first"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "4", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "0", "SLURM_PROCID": "3"}, True),
        ({"SLURM_PROCID": "3"}, False),
        ({"NODE_RANK": "1"}, False),
    ],
)
def test_the_first_process_knows_itself(
    monkeypatch: pytest.MonkeyPatch, named: dict[str, str], first: bool
) -> None:
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert is_first() is first


def test_a_run_of_one_process_is_its_own_first_whatever_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert leads(1, 1)
    assert not leads(2, 1)
    assert not leads(1, 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert not leads(1, 1), "torchrun has started others"
