"""Kill runs at any moment, start them again, and see whether they end with the same rows.

Commands in this process's place, and Ray's workers, nodes and drivers:

python tools/kill.py --kills 200
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from digit_folder import main as write_digits

from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.images import list_images
from sufficit.files import is_unfinished
from sufficit.runs.store import MAPS

COARSE = ("--value-step", "0.25", "--percent-step", "0.25", "--device", "cpu")
DIGITS = ("--model", "sufficit:digits")
IMAGES = 10
NOWHERE = Path("nowhere")
STARTED = multiprocessing.get_context("forkserver")
"""Starts processes that have all imported: a start takes a moment, not seconds."""
PRELOADED = [
    *("sufficit.cli", "sufficit.runs.engine"),
    *("sufficit.training", "lightning.fabric"),
    *("matplotlib.backends.backend_agg", "pandas", "pyarrow.parquet", "kill"),
]


@dataclass(frozen=True)
class Moment:
    """When to kill: after some seconds, or at the n-th file, before or after it has its name."""

    seconds: float = 0.0
    write: int = 0
    named: bool = False
    drawn: bool = True  # whether pictures and reports, which take the most time, are drawn


@dataclass(frozen=True)
class Command:
    """A command, what of its folder must be the same at the end, and how far a folder is."""

    words: Callable[[Path, Path], Sequence[object]]  # of the data and of --out
    rows: Callable[[Path], dict[str, Any]]
    stage: Callable[[Path], str]


def start(words: Sequence[object], log: Path, moment: Moment | None = None) -> int:
    """Run a command in a process of its own, kill it at a moment, and give its exit code."""
    STARTED.set_forkserver_preload(PRELOADED)
    told = (*map(str, words),)
    process = STARTED.Process(target=_run, args=(told, log, moment or Moment()))
    process.start()
    process.join(moment.seconds if moment and moment.seconds else None)
    if process.is_alive():
        process.kill()
        process.join()
    code = process.exitcode
    process.close()
    return 0 if code is None else code


def _run(words: Sequence[str], log: Path, moment: Moment) -> None:
    from sufficit.cli import main
    from sufficit.runs.job import make_job

    torch.set_num_threads(1)
    make_job.__kwdefaults__["unit"] = 3  # several units of few images
    if not moment.drawn:
        _draw_nothing()
    if moment.write:
        _kill_at(moment)
    file = log.open("w")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.argv = ["sufficit", *words]
    main()


def _draw_nothing() -> None:
    """Files stand in for pictures and reports."""
    from sufficit import plots, report
    from sufficit.files import writing

    def stand_in(path: Path) -> None:
        with writing(path) as part:
            part.write_text("a picture")

    plots.save = lambda figure, path, **_: stand_in(path)
    for figure in ("sheet_figure", "methods_figure"):
        setattr(plots, figure, lambda *_, **__: None)
    report.write_report = lambda path, content: stand_in(path)


def _kill_at(moment: Moment) -> None:
    """Kill this process at a file: every one gets its name by a rename."""
    left = [moment.write]
    real = Path.replace

    def killing(part: Path, path: Path) -> Path:
        left[0] -= 1
        if left[0] == 0 and not moment.named:
            os.truncate(part, part.stat().st_size // 2)  # it was still being written
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(part, path)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Path.replace = killing  # type: ignore[method-assign]


def files(out: Path, *patterns: str) -> dict[str, Any]:
    """The bytes of some files."""
    found = sorted(path for pattern in patterns for path in out.glob(pattern))
    return {str(path.relative_to(out)): path.read_bytes() for path in found}


def trained_rows(out: Path) -> dict[str, Any]:
    """The weights of an adapter or a twin and its history, without the seconds."""
    history = json.loads((out / "run.json").read_text())["history"]
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in history]
    return files(out, "*.safetensors") | {"history": rows}


def first_missing(*marks: tuple[str, str]) -> Callable[[Path], str]:
    """The stage whose last file is not there yet."""

    def stage(out: Path) -> str:
        return next((name for name, mark in marks if not any(out.glob(mark))), "after the end")

    return stage


def _compare(data: Path, out: Path) -> Sequence[object]:
    words = ("compare", *DIGITS, "--data", data / "digits", "--out", out, *COARSE)
    return (*words, "--methods", "gradcam")


def _evaluate(data: Path, out: Path) -> Sequence[object]:
    words = ("evaluate", *DIGITS, "--data", data / "digits", "--out", out, *COARSE)
    return (*words, "--heatmaps", data / "maps.npz")


def _explain(data: Path, out: Path) -> Sequence[object]:
    words = ("explain", data / "digits", *DIGITS, "--out", out, "--device", "cpu")
    return (*words, "--methods", "gradcam,center")


def _sanity(data: Path, out: Path) -> Sequence[object]:
    words = ("sanity", *DIGITS, "--data", data / "digits", "--out", out, "--device", "cpu")
    return (*words, "--images", 3, "--steps", 2)


def _train(command: str, data: Path, out: Path) -> Sequence[object]:
    words = (command, *DIGITS, "--data", data / "digits", "--out", out, "--device", "cpu")
    return (*words, "--epochs", 3, "--batch-size", 4)


COMMANDS = {
    "compare": Command(
        _compare,
        lambda out: files(out, "*/scores.parquet", "*/curves.parquet", "*.csv", "summary.json"),
        first_missing(("start", "units"), ("scores", "summary.json"), ("results", "run.json")),
    ),
    "evaluate": Command(
        _evaluate,
        lambda out: files(out, "*/*.parquet", "summary.json"),
        first_missing(("scores", "*"), ("results", "run.json")),
    ),
    "train-lax": Command(
        partial(_train, "train-lax"),
        trained_rows,
        first_missing(("first epoch", "checkpoint.pt"), ("later", "run.json")),
    ),
    "train-twin": Command(
        partial(_train, "train-twin"),
        trained_rows,
        first_missing(("first epoch", "checkpoint.pt"), ("later", "run.json")),
    ),
    "explain": Command(
        _explain,
        lambda out: files(out, "*.npz", "regions/**/*.jpg", "certificates.csv"),
        first_missing(("start", MAPS), ("heatmaps", "*.npz"), ("results", "run.json")),
    ),
    "sanity": Command(
        _sanity,
        lambda out: files(out, "sanity.csv"),
        first_missing(("start", "sanity.csv"), ("results", "run.json")),
    ),
}


@dataclass(frozen=True)
class Bench:
    """A folder with data and with one run of each command that nothing disturbed."""

    folder: Path
    seconds: dict[str, float]
    drawn: bool = True

    def survive(self, name: str, moments: Sequence[Moment]) -> list[str]:
        """Kill a run at each moment and let it end; raise unless it ends as the undisturbed one.

        Gives the stage of each kill.
        """
        command, out = COMMANDS[name], self.folder / f"{name}-killed"
        shutil.rmtree(out, ignore_errors=True)
        words, log, stages = command.words(self.folder, out), self.folder / "log", []
        for moment in [*moments, Moment()]:
            code = start(words, log, replace(moment, drawn=self.drawn))
            if code != -signal.SIGKILL:
                break  # it came to the end
            stages.append(command.stage(out) if out.exists() else "begin")
        told = " ".join(log.read_text().split())
        done = code == 0 or "holds a finished run" in told
        assert done, f"{name} after {moments}: {code}, {told[-500:]}"
        rows, wanted = (command.rows(place) for place in (out, self.folder / name))
        differing = [key for key in {**rows, **wanted} if rows.get(key) != wanted.get(key)]
        assert not differing, f"{name} after {moments}: {differing} differ"
        left = [path for path in out.rglob("*") if is_unfinished(path.name)]
        assert not left or "after the end" in stages, f"{name} after {moments}: {left} is left"
        return stages


def make_bench(folder: Path, *, drawn: bool = True) -> Bench:
    """Write the data and run every command once."""
    write_digits(folder / "digits", IMAGES)
    pictures = list_images(folder / "digits")
    maps = torch.rand(IMAGES, 8, 8, generator=torch.Generator().manual_seed(0))
    write_heatmaps(folder / "maps.npz", zip((p.name for p in pictures), maps, strict=True))
    seconds = {}
    for name, command in COMMANDS.items():
        begun = time.monotonic()
        code = start(command.words(folder, folder / name), folder / "log", Moment(drawn=drawn))
        assert code == 0, f"{name}: {(folder / 'log').read_text()[-500:]}"
        seconds[name] = time.monotonic() - begun
    return Bench(folder, seconds, drawn)


def draw(chance: random.Random, seconds: float, n: int) -> list[Moment]:
    """Moments by chance: a third of them anywhere in a run, the others at one of its next files."""
    found = []
    for _ in range(n):
        if chance.random() < 1 / 3:
            found.append(Moment(seconds=chance.uniform(0.02, seconds)))
        else:
            found.append(Moment(write=chance.randint(1, 12), named=chance.random() < 0.5))
    return found


def kill_commands(kills: int, chance: random.Random, *, drawn: bool) -> Counter[str]:
    """Kill every command until there were enough kills."""
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        bench = make_bench(Path(folder), drawn=drawn)
        while counts.total() < kills:
            for name in COMMANDS:
                most = max(1, min(6, kills - counts.total()))
                moments = draw(chance, bench.seconds[name], chance.randint(1, most))
                counts.update(f"{name}: {stage}" for stage in bench.survive(name, moments))
                print(dict(counts), flush=True)
    return counts


def kills(count: int, *, seed: int = 0, workers: float = 0.25, drawn: bool = True) -> Counter[str]:
    """Kill so many processes, a share of them Ray workers, nodes and drivers; count where.

    Raise unless every run ends with the rows of an undisturbed one.
    """
    from kill_workers import kill_workers

    chance, ray, counts = random.Random(seed), round(workers * count), Counter[str]()
    if count > ray:
        counts += kill_commands(count - ray, chance, drawn=drawn)
    if ray:
        found = kill_workers(ray, 60, chance)
        counts.update({f"Ray: {kind}": number for kind, number in found.items()})
    return counts


def main() -> None:
    """Kill so many processes, and count where."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=float, default=0.25, help="share of Ray's processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-drawing", action="store_true", help="more runs in the same time")
    told = parser.parse_args()
    options: Any = {"workers": told.workers, "drawn": not told.no_drawing}
    counts = kills(told.kills, seed=told.seed, **options)
    for stage, count in sorted(counts.items()):
        print(f"{stage:40} {count:5}")
    print("All runs ended with the same rows.")


if __name__ == "__main__":
    from kill import main as run  # under the name that its processes import it by

    run()
