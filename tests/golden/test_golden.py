"""The numbers are those of the engine as it was before it was rewritten; see record.py."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import record
from gathering_results import Result, gather, without_source
from make_inputs import write_all

from sufficit.metrics.columns import ZERO_LINE

# Each case as today's command line spells it (record.py has the spelling of then); IN is the folder
# of inputs.
CAMS = "gradcam,gradcam++,layercam,kpca-cam,finer-cam"
LAX = record.LAX  # an adapter of version 0.1
DIGITS = ["--model", "sufficit:digits", "--device", "cpu"]
COARSE = ["--value-step", "0.1", "--percent-step", "0.2"]
TWO = [*DIGITS, *COARSE, "--methods", "gradcam,layercam"]
LEAK = ["--checks", "controls,leak"]
CASES: dict[str, list[str]] = {
    "compare": [
        *(
            "compare",
            *DIGITS,
            *COARSE,
            "--data",
            "IN/images-8",
            "--methods",
            f"{CAMS},{LAX}",
        ),
    ],
    "default-steps": [
        *(
            "compare",
            *DIGITS,
            "--data",
            "IN/images-4",
            "--methods",
            f"gradcam,layercam,{LAX}",
        ),
        *LEAK,
    ],
    "evaluate": [
        *("evaluate", *DIGITS, "--data", "IN/images-12", "--heatmaps", "IN/hills.npz"),
        *("--checks", "leak", "--score", "confidence"),
        *("--value-step", "0.05", "--percent-step", "0.1"),
    ],
    "evaluate-search": [
        *("evaluate", *DIGITS, *COARSE, "--data", "IN/images-6", "--heatmaps", "IN/hills.npz"),
        *("--normalize", "minmax", "--alpha-min", "search"),
    ],
    "search": [
        *("compare", *DIGITS, *COARSE, "--data", "IN/images-6"),
        *("--methods", f"gradcam,layercam,{LAX}", "--alpha-min", "search"),
    ],
    "many": [
        *("compare", *DIGITS, *COARSE, "--data", "IN/images-16"),
        *("--methods", "gradcam,layercam,kpca-cam", "--checks", "none"),
    ],
    "held-out-noise": ["compare", *TWO, *LEAK, "--data", "IN/images-6", "--seed", "5"],
    "fill-mean": [
        *("compare", *TWO, *LEAK, "--data", "IN/images-6", "--fills", "mean"),
        *("--targets", "prediction"),
    ],
    "shards": ["compare", *TWO, *LEAK, "--data", "IN/shards/{0..1}.tar"],
    "broken": ["compare", *TWO, "--data", "IN/images-broken", "--checks", "controls"],
    "save-heatmaps": [
        *("compare", *TWO, "--data", "IN/images-4", "--checks", "none"),
        *("--config", "IN/save.toml"),
    ],
    "explain": [
        *("explain", "IN/images-4", "--no-fit", *DIGITS, "--methods", f"gradcam,finer-cam,{LAX}"),
    ],
}
CHANGED: dict[str, tuple[str, ...]] = {
    # The held-out fill is chosen by the run and asked few masks.
    "evaluate": ("msi_held_out", "fill_drop", "calls", "model_calls"),
    "held-out-noise": ("msi_held_out", "fill_drop", "calls", "model_calls"),
    # A search for alpha_min is a run of its own, whose passes do not count with the scores.
    "search": ("calls", "model_calls"),
    "evaluate-search": ("calls", "model_calls"),
}
"""Columns and facts that have another definition since; the changelog says why."""
SLOW = ("compare",)  # above twenty seconds
UNDRAWN = ("default-steps", "many", "held-out-noise", "fill-mean", "save-heatmaps")
"""Without pictures and report, which take half the time; the others draw what these would."""

RECORDED = Path(__file__).with_name("recorded")
TOLERANCE = 0 if os.environ.get("SUFFICIT_GOLDEN_EXACT") else 1e-6
"""How far a number may be from the recorded one; the variable asks for the same bits."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("golden"))


@pytest.mark.filterwarnings("ignore:.*too few to tell whether the masks leak")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES]
)
def test_a_command_gives_the_recorded_numbers(
    name: str, inputs: Path, tmp_path: Path, sufficit, request: pytest.FixtureRequest
) -> None:
    if name in UNDRAWN:
        request.getfixturevalue("undrawn")
    words = [word.replace("IN/", f"{inputs}/") for word in CASES[name]]
    if words[0] == "compare" and "--checks" not in words:
        words += ["--checks", "controls,leak"]  # the default asks more
    ended = sufficit(*words, "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    now, then = gather(tmp_path / "out"), Result.load(RECORDED, name)
    for kind in ("scores", "curves"):  # a control that runs had not then
        frame = getattr(now, kind)
        if frame is not None:
            setattr(now, kind, frame[frame["method"] != ZERO_LINE].reset_index(drop=True))
    now.told = without_source(now.told, ZERO_LINE)
    for one in (now, then):
        without(one, CHANGED.get(name, ()))
    assert_same(now, then)


def without(result: Result, changed: tuple[str, ...]) -> None:
    """Drop columns and facts from a result."""
    if result.scores is not None:
        result.scores = result.scores.drop(columns=[*changed], errors="ignore")
    for own in (result.told.get("run", {}), *result.told.get("summary", {}).values()):
        if isinstance(own, dict):
            for name in changed:
                own.pop(name, None)
    if "calls" in changed and result.curves is not None and not len(result.curves):
        result.curves = None


def test_the_library_gives_the_recorded_numbers() -> None:
    now, then = record.api(), Result.load(RECORDED, "api")
    for source in ("gradcam", "lax"):  # the passes of a search are counted apart from the scores'
        then.maps.pop(f"evaluate/{source}/search/calls")
    assert_same(now, then)


INTERVALS = ("low", "high", "p", "p_corrected", "tied", "chance", "draws", "resamples")
"""Not held: intervals and tests have other formulas since, and controls are among the pairs."""


def held(told: Any, controls: list[str]) -> Any:
    """What JSON holds without intervals, corrections, and pairs with a control."""
    if isinstance(told, list):
        pairs = [one for one in told if isinstance(one, dict) and "second" in one]
        outside = [one for one in pairs if {one["first"], one["second"]} & {*controls}]
        return [held(one, controls) for one in told if one not in outside]
    if isinstance(told, dict):
        return {key: held(one, controls) for key, one in told.items() if key not in INTERVALS}
    if isinstance(told, str):  # a row of a table of the paper
        return re.sub(r"-?\d\.\d\d \.\. -?\d\.\d\d", "interval", told)
    return told


def assert_same(now: Result, then: Result) -> None:
    """All that was recorded is there, and no number is farther off than TOLERANCE."""
    for one in (now, then):
        # On fewer images since, where it cost more than the scores.
        one.told.get("run", {}).pop("alpha_curve", None)
        one.told = held(one.told, one.told.get("run", {}).get("outside_the_contest", []))
    wrong = [
        *frame_differences("scores", now.scores, then.scores),
        *frame_differences("curves", now.curves, then.curves),
        *mapping_differences("heatmaps", now.maps, then.maps),
        *differences("", now.told, then.told),
    ]
    shown = "\n".join(wrong[:20])
    assert not wrong, f"{len(wrong)} values differ from the recorded ones:\n{shown}"


def frame_differences(
    place: str, now: pandas.DataFrame | None, then: pandas.DataFrame | None
) -> list[str]:
    """Where a table's columns are others; a new column is allowed, another order of rows is not."""
    if then is None:
        return []
    if now is None:
        return [f"{place}: none"]
    columns = [{name: frame[name] for name in frame.columns} for frame in (now, then)]
    arrays = [{name: column_values(found) for name, found in each.items()} for each in columns]
    return mapping_differences(place, *arrays)


def column_values(column: pandas.Series) -> np.ndarray:
    """A column's values, those of all rows one after the other where each is a list."""
    values = column.to_numpy()
    if len(values) and isinstance(values[0], np.ndarray):
        return np.concatenate(list(values))
    return values.astype(str) if values.dtype == object else values


def mapping_differences(
    place: str, now: dict[str, np.ndarray], then: dict[str, np.ndarray]
) -> list[str]:
    missing = [f"{place}: no {key!r}" for key in then if key not in now]
    shared = [key for key in then if key in now]
    return missing + [w for k in shared for w in array_differences(f"{place} {k}", now[k], then[k])]


def array_differences(place: str, now: np.ndarray, then: np.ndarray) -> list[str]:
    """What differs between two arrays: nothing, or one line."""
    if now.shape != then.shape:
        return [f"{place}: shape {now.shape}, recorded {then.shape}"]
    if now.dtype.kind != then.dtype.kind:
        return [f"{place}: {now.dtype}, recorded {then.dtype}"]
    if then.dtype.kind not in "fiu":
        return [] if np.array_equal(now, then) else [f"{place}: {now}, recorded {then}"]
    if np.array_equal(now, then, equal_nan=then.dtype.kind == "f"):
        return []
    if then.dtype.kind == "f" and now.dtype == then.dtype:
        apart = np.where(now == then, 0, np.abs(now.astype(float) - then.astype(float)))
        apart[np.isnan(now) & np.isnan(then)] = 0
        if (apart <= TOLERANCE).all():
            return []
    return [f"{place}: {now.ravel()[:6]}, recorded {then.ravel()[:6]}"]


def differences(place: str, now: Any, then: Any) -> list[str]:
    """Where what JSON holds is another; a new key is allowed."""
    if isinstance(then, dict) and isinstance(now, dict):
        missing = [f"{place}/{key}: missing" for key in then if key not in now]
        shared = [key for key in then if key in now]
        return missing + [w for k in shared for w in differences(f"{place}/{k}", now[k], then[k])]
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = enumerate(zip(now, then, strict=True))
        return [w for i, (n, t) in pairs for w in differences(f"{place}/{i}", n, t)]
    if isinstance(then, float) and isinstance(now, float):
        both_nan = np.isnan(then) and np.isnan(now)
        same = now == then or both_nan or abs(now - then) <= TOLERANCE
    else:
        same = now == then and isinstance(now, bool) == isinstance(then, bool)
    return [] if same else [f"{place}: {now}, recorded {then}"]
