"""One table of the paper, from data to report: the whole chain. Read this file first."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sufficit.crews import FOLDER, Crew
from sufficit.files import writing
from sufficit.progress import Progress
from sufficit.reproduce.clock import Clock
from sufficit.reproduce.learning import train_the_adapters, train_the_classifier
from sufficit.reproduce.outcome import Outcome, read_outcome
from sufficit.reproduce.plans import NUMBERS, TIMINGS, Plan, begin, leaving_nothing, plan_of
from sufficit.reproduce.scoring import (
    draw_some,
    find_the_digits,
    score_the_table,
    search_alpha,
    write_the_test_folder,
)
from sufficit.reproduce.work import Work
from sufficit.reproduce.writing import REPORT, absent, write_results

COMPLETE = f"{NUMBERS}/complete"
STAGES = (
    train_the_classifier,
    train_the_adapters,
    write_the_test_folder,
    score_the_table,
    search_alpha,
    find_the_digits,
    draw_some,
)
SHARED = (train_the_adapters, score_the_table, search_alpha)  # the others are the first process's


def reproduce(
    table: str,
    out: Path,
    *,
    data: Path | None = None,
    device: torch.device | None = None,
    quick: bool = False,
    report: bool = True,
    say: Callable[[str], None] = print,
    crew: Crew | None = None,
    progress: bool | Progress | None = None,
    **asked: Any,
) -> Outcome | None:
    """Train the classifier and LAX, score every method on test images, write results and report.

    Every stage is skipped where its files are in `out`; a stage that was stopped goes on. What is
    `asked` are fields of a Plan; the rest is what is usual for the table. Of a crew of several
    processes only the first has an outcome.
    """
    crew = crew or Crew()
    device = torch.device(crew.device) if crew.device else device or _usual_device()
    with leaving_nothing(out) if crew.first else nullcontext(), crew.meet(out):
        plan = _begin_together(crew, out, table, asked, quick=quick, cuda=device.type == "cuda")
        if crew.tell("left", not (out / COMPLETE).exists()):
            clock = Clock(out / TIMINGS, say if crew.first else _be_silent, mute=not crew.first)
            _do_all(Work(plan, out, data, device, clock, crew.voice(progress), crew))
    if not crew.first:
        return None
    shutil.rmtree(out / FOLDER, ignore_errors=True)
    return _written(out, report=report, say=say)


def _usual_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _be_silent(line: str) -> None:
    """What all processes but the first say."""


def _begin_together(
    crew: Crew, out: Path, table: str, asked: Mapping[str, Any], *, quick: bool, cuda: bool
) -> Plan:
    """The plan of the first process, in all of them."""
    crew.check_alike({"table": table, "--quick": quick, "torch": torch.__version__, **asked})
    if crew.first:
        plan = begin(out, table, asked, quick=quick, cuda=cuda)
        crew.tell("plan", asdict(plan))
        return plan
    return plan_of(crew.tell("plan", None))


def _do_all(work: Work) -> None:
    """Every stage in turn; no process begins one before the first has ended the one before it."""
    for stage in STAGES:
        if work.crew.first or stage in SHARED:
            stage(work)
        work.crew.tell(f"done-{stage.__name__}", True)
    if work.crew.first:
        with writing(work.out / COMPLETE) as path:
            path.touch()


def _written(out: Path, *, report: bool, say: Callable[[str], None]) -> Outcome:
    """The results of a run whose stages are done, as files, and the report if it is wanted."""
    outcome = read_outcome(out)
    folder = write_results(out, outcome)
    missing = absent(REPORT)
    if report and missing:
        say(
            f"no report: {' and '.join(missing)} not installed here. Copy {out / NUMBERS} to where"
            " they are and give the same command: it needs no data, no weights and no GPU."
        )
    elif report:
        from sufficit.reproduce.telling import report_run

        report_run(out, folder / "report.html", outcome)
    return outcome
