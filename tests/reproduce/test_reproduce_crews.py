"""Several processes share a run of `sufficit reproduce`, and end with what one alone ends with."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_crews import Together, quick
from test_reproduce import SMALL, assert_same, small

from sufficit.crews import Crew
from sufficit.reproduce.chain import _begin_together
from sufficit.reproduce.plans import Plan, begin, read_plan

__all__ = ["quick"]

SOURCE = str(Path(sys.modules["sufficit"].__file__ or "").parents[1])
ADAPTERS = ("lax-paper-0", "lax-robust-0")
COMMAND = """
import os
import torch
from sufficit import crews
from sufficit.reproduce import chain
from sufficit.cli import main
from sufficit.comparing import groups
from sufficit.reproduce import writing
from test_reproduce import narrow_nets

crews.BEAT = 0.1
torch.set_num_threads(1)
whole, score_group = chain.reproduce, groups._score_group
def noting(job, parts, group, *rest):
    with open(f"scored-{os.environ.get('LOCAL_RANK', '0')}", "a") as file:
        file.write(f"{parts.folder.parent.name}-{group.number} ")
    score_group(job, parts, group, *rest)
groups._score_group = noting
writing._save_sheet = writing._alpha_figure = lambda *_: None  # take long
writing.figures.save = lambda *_: None
chain.reproduce = lambda *given, **more: whole(*given, **more, group=2)
with narrow_nets():
    main()
"""
DYING = """
import os, signal
from sufficit.reproduce import learning

whole_training = learning.train_lax
def dying(*given, progress, **more):
    def tell(done, total):
        if os.environ.get("LOCAL_RANK") == "1" and 2 * done > total:
            os.kill(os.getpid(), signal.SIGKILL)
        progress(done, total)
    return whole_training(*given, progress=tell, **more)
learning.train_lax = dying
"""


def processes(folder: Path, command: str, *more: object) -> subprocess.CompletedProcess[str]:
    """The small run by the command, in two processes of its own."""
    (folder / "command.py").write_text(command)
    asked = {name: value for name, value in SMALL.items() if name != "group"}
    words = [str(w) for k, v in asked.items() for w in (f"--{k.replace('_', '-')}", v)]
    words += ["--quick", "--device", "cpu", "--devices", "2", "--no-report", *map(str, more)]
    paths = os.pathsep.join([SOURCE, str(Path(__file__).parents[1])])
    named = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "SUFFICIT_TRACEBACK": "1"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "command.py", "reproduce", "synthetic-mnist", *words],
        cwd=folder,
        env={**{k: v for k, v in os.environ.items() if "RANK" not in k}, **named},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def weights(out: Path, adapter: str) -> dict[str, torch.Tensor]:
    return load_file(out / "adapters" / adapter / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    for adapter in ADAPTERS:
        first, second = weights(one, adapter), weights(other, adapter)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), adapter


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole") / "run"
    small(out, report=False)
    return out


def test_two_processes_end_with_the_numbers_of_one_to_the_bit(tmp_path: Path, whole: Path) -> None:
    done = processes(tmp_path, COMMAND, "--out", "two")
    assert done.returncode == 0, done.stderr
    two = tmp_path / "two"
    assert_same(whole, two)
    assert_same_weights(whole, two)
    assert not (two / "crew").exists()
    assert not (two / "compare").exists()
    assert done.stdout.count("Means over 4 test images") == 1
    assert done.stderr.count("classifier: ") == 1
    seconds = json.loads((two / "numbers" / "timings.json").read_text())
    assert "adapter lax-paper-0" in seconds
    assert "adapter lax-robust-0" not in seconds, "the second process trained it"
    note = json.loads((two / "adapters" / "lax-robust-0" / "trained.json").read_text())
    assert note["seconds"] > 0
    scored = [(tmp_path / f"scored-{rank}").read_text().split() for rank in (0, 1)]
    assert scored == [["compare-0", "search-0"], ["compare-1", "search-1"]]


def beginning(out: Path, **asked: object) -> Callable[[Crew], Plan]:
    return lambda crew: _begin_together(crew, out, "cifar10", asked, quick=True, cuda=False)


@pytest.mark.usefixtures("quick")
def test_the_first_process_makes_the_plan_and_all_have_it(tmp_path: Path) -> None:
    job = beginning(tmp_path, images=9, recipes=("paper",))
    plans = Together(tmp_path).work(job, job)
    assert plans[0] == plans[1] == read_plan(tmp_path)
    assert (plans[1].images, plans[1].recipes, plans[1].model) == (9, ("paper",), "small-net")
    assert (tmp_path / "crew" / "1.json").exists()
    asked = {"images": 10}
    again = begin(tmp_path, "cifar10", asked, quick=True, cuda=False)
    assert again.images == 10, "what the processes said to each other is no work done"


@pytest.mark.usefixtures("quick")
def test_machines_that_are_asked_for_something_else_are_refused(tmp_path: Path) -> None:
    jobs = beginning(tmp_path, images=9), beginning(tmp_path, images=8)
    ended = Together(tmp_path).work(*jobs)
    assert "images is 8 in process 1 and 9 in the first" in str(ended[1])


def test_when_a_process_dies_among_the_adapters_one_alone_goes_on(
    tmp_path: Path, whole: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole / "classifier", out / "classifier")
    for name in ("plan", "timings"):
        (out / "numbers").mkdir(exist_ok=True)
        shutil.copy(whole / "numbers" / f"{name}.json", out / "numbers")
    killed = processes(tmp_path, DYING + COMMAND, "--out", "out")
    assert killed.returncode != 0
    assert (out / "adapters" / "lax-robust-0" / "checkpoint.pt").exists(), "it was half done"
    assert not (out / "adapters" / "lax-robust-0" / "trained.json").exists()
    assert not (out / "numbers" / "scores.safetensors").exists()
    assert "Means over" not in killed.stdout
    small(out, report=False)
    assert_same(whole, out)
    assert_same_weights(whole, out)
    assert not (out / "crew").exists()
