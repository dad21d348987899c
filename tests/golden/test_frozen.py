"""The rows are those of commit 44fb57b; see frozen.py, which also spells today's options."""

import os
from pathlib import Path

import frozen
import pytest
from gathering_results import without_source

from sufficit.metrics.columns import ZERO_LINE

TOLERANCE = 0 if os.environ.get("SUFFICIT_GOLDEN_EXACT") else 1e-6
"""How far a number may be from the recorded one; the variable asks for the same bits."""

CHANGED: dict[str, tuple[str, ...]] = {
    # Whole images are asked once per model, not once per fill; a search is a run of its own.
    **dict.fromkeys(("fills", "four-fills", "twin-and-fills", "columns-and-fills"), ("calls",)),
    **dict.fromkeys(("road-and-black", "black-and-drop", "python-nan-logits"), ("calls",)),
    **dict.fromkeys(("search", "search-and-fills"), ("calls",)),
    # Shares that tie in exact arithmetic: the first one is read, not the one that rounding favours.
    "python-adapter": ("msi_rank", "rank_shares"),
    # Mean curves of sampled masks pool neighbours; the curve over alpha_min is sampled, too.
    "calls": ("curves", "alpha_curve"),
}
"""Columns of a case, and facts of it, that have another definition since; the changelog says why.

"leak" is both the column and the fact; the key "" holds for all cases.
"""

SLOW = (
    *("within-some", "within-calls"),  # runs of hundreds of images
    # The parts of these are cases of their own, which are fast.
    *("four-fills", "twin-and-fills", "calls-twin-and-fills", "columns-and-fills"),
    *("search-and-fills", "road-and-black", "black-and-drop"),
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return frozen.write_inputs(tmp_path_factory.mktemp("frozen"))


@pytest.fixture(scope="module")
def recorded() -> dict[str, frozen.Result]:
    return frozen.recorded()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in frozen.COMMANDS]
)
def test_a_command_gives_the_recorded_rows(
    name: str, inputs: Path, recorded: dict[str, frozen.Result], tmp_path: Path, sufficit, undrawn
) -> None:
    ended = sufficit(*frozen.command_words(name, inputs), "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    assert_same(name, tmp_path / "out", recorded[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", frozen.PYTHON)
def test_compare_in_python_gives_the_recorded_rows(
    name: str, recorded: dict[str, frozen.Result], tmp_path: Path
) -> None:
    frozen.run_python(name, tmp_path / "out")
    assert_same(name, tmp_path / "out", recorded[name])


def test_every_case_is_recorded(recorded: dict[str, frozen.Result]) -> None:
    assert list(recorded) == list(frozen.CASES)


def assert_same(name: str, out: Path, then: frozen.Result) -> None:
    now = frozen.result_of(name, out)
    since = now.scores["source"] == ZERO_LINE  # a control that runs had not then
    now.scores = now.scores[~since].reset_index(drop=True)
    now.told = without_source(now.told, ZERO_LINE)
    for told in (now.told, then.told):
        # A run that stops early split the error over its looks then, so that intervals were wider.
        told.get("within", {}).pop("half_width", None)
    changed = (*CHANGED.get("", ()), *CHANGED.get(name, ()))
    wrong = frozen.row_differences(now.scores, then.scores, TOLERANCE, changed)
    told = {key: value for key, value in then.told.items() if key not in changed}
    told["means"] = {
        source: {column: mean for column, mean in own.items() if column not in changed}
        for source, own in told.get("means", {}).items()
    }
    wrong += frozen.differences("facts", now.told, told, TOLERANCE)
    assert not wrong, "\n".join(wrong[:20])
