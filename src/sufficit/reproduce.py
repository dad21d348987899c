"""One table of the paper, from data to report: the whole chain. Read this file first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sufficit.files import writing
from sufficit.reproducing.clock import Clock
from sufficit.reproducing.learning import train_the_adapters, train_the_classifier
from sufficit.reproducing.outcome import Outcome, read_outcome
from sufficit.reproducing.plans import NUMBERS, TIMINGS, begin
from sufficit.reproducing.scoring import (
    draw_some,
    find_the_digits,
    score_the_table,
    search_alpha,
    write_the_test_folder,
)
from sufficit.reproducing.work import Work
from sufficit.reproducing.writing import REPORT, absent, write_results
from sufficit.types import Progress

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


def reproduce(
    table: str,
    out: Path,
    *,
    data: Path | None = None,
    device: torch.device | None = None,
    quick: bool = False,
    report: bool = True,
    say: Callable[[str], None] = print,
    progress: bool | Progress | None = None,
    **asked: Any,
) -> Outcome:
    """Train the classifier and LAX, score every method on test images, write results and report.

    Every stage is skipped where its files are in `out`; a stage that was stopped goes on. What is
    `asked` are fields of a Plan; the rest is what is usual for the table.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = begin(out, table, asked, quick=quick, cuda=device.type == "cuda")
    if not (out / COMPLETE).exists():
        work = Work(plan, out, data, device, Clock(out / TIMINGS, say), progress)
        for stage in STAGES:
            stage(work)
        with writing(out / COMPLETE) as path:
            path.touch()
    outcome = read_outcome(out)
    folder = write_results(out, outcome)
    missing = absent(REPORT)
    if report and missing:
        say(
            f"no report: {' and '.join(missing)} not installed here. Copy {out / NUMBERS} to where"
            " they are and give the same command: it needs no data, no weights and no GPU."
        )
    elif report:
        from sufficit.reproducing.telling import report_run

        report_run(out, folder / "report.html", outcome)
    return outcome
