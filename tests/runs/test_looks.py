"""Runs that stop when MSI is precise enough, with intervals that are valid in spite of looking."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas
import pytest
import torch

from reference import intervals
from small_runs import StopError, assert_same_rows, config_for, interrupted, run_small
from small_runs import write_photos as photos_in
from sufficit import Classifier, UserError, compare
from sufficit.data.images import list_images
from sufficit.metrics.columns import HEADINGS
from sufficit.probes.standard import MSI
from sufficit.runs import engine
from sufficit.runs.job import look_sizes
from sufficit.runs.results import RunResults
from sufficit.runs.stopping import UNMET, deciding_width
from sufficit.runs.store import UNIT, Store
from sufficit.runs.unit_rows import Rows
from sufficit.statistics import Chance, Estimate, estimates_of
from sufficit.sums import sums_of

METHODS = ("gradcam", "layercam", "random", "center")
N, LOOKS = 30, (8, 12, 16)  # images in units of 4, and the first looks


@pytest.mark.parametrize(
    ("images", "unit", "sizes"),
    [
        (1, 1, [1]),
        (200, 1, [200]),
        (201, 1, [200, 201]),
        (233, 10, [20, 21, 22, 24]),
        (10_000, 10_000, [1]),
    ],
)
def test_looks_go_from_200_images_to_all(images: int, unit: int, sizes: list[int]) -> None:
    assert look_sizes(images, unit) == sizes


def test_a_look_has_five_percent_more_images_or_one_unit() -> None:
    sizes = look_sizes(50_000, 32)
    assert (sizes[0], sizes[-1]) == (7, 1563)
    steps = [after - before for before, after in pairwise(sizes)]
    assert min(steps) == 1
    for step, before in zip(steps, sizes[:-1], strict=True):
        assert step <= max(1, math.ceil(0.05 * before) + 1)


Draw = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]


def failing(random: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
    """One image in 100 fails, so that with fewer of them the mean is higher, the spread smaller."""
    return np.where(random.random(n) < 0.01, -1.0, random.normal(0.5, 0.1, n))


def few_decide(random: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
    """A method that fails on nine images in ten."""
    base = np.where(random.random(n) < 0.9, 0.05 * random.standard_normal(n), 0.9)
    return base - 0.3 * random.beta(2, 5, n)


def stopped(values: npt.NDArray[np.float64], within: float, unmet: int) -> Estimate:
    """The interval at the look at which a run stops."""
    for n in look_sizes(len(values), 1):
        some = sums_of({MSI: values[:n]})
        if deciding_width(some, unmet) <= within:
            break
    return estimates_of(some, {MSI: True})[MSI]


def coverage(draw: Draw, truth: float, within: float, unmet: int, trials: int) -> float:
    """How many of the intervals at the end hold the truth."""
    random = np.random.default_rng(0)
    found = [stopped(draw(random, 2000), within, unmet) for _ in range(trials)]
    assert len({one.n for one in found}) > 5, "runs stop at many looks"
    return float(np.mean([one.low <= truth <= one.high for one in found]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "truth", "within"),
    [(failing, 0.485, 0.03), (failing, 0.485, 0.02), (few_decide, 0.09 - 0.6 / 7, 0.03)],
)
def test_the_interval_at_the_stop_holds_the_truth_in_95_percent(
    draw: Draw, truth: float, within: float
) -> None:
    trials = 800
    error = 2 * (0.05 * 0.95 / trials) ** 0.5
    assert coverage(draw, truth, within, UNMET, trials) >= 0.95 - error


def test_without_the_images_that_nobody_met_it_would_not() -> None:
    assert coverage(failing, 0.485, 0.02, 0, 800) < 0.95 - 2 * (0.05 * 0.95 / 800) ** 0.5


def test_the_deciding_width_is_that_of_the_values_and_both_ends() -> None:
    values = np.random.default_rng(2).normal(0.3, 0.2, 50)
    low, high = HEADINGS[MSI].limits
    whole = np.concatenate([values, [low] * UNMET, [high] * UNMET])
    low, high = peer_interval(whole)
    assert deciding_width(sums_of({MSI: values}), UNMET) == pytest.approx((high - low) / 2)
    assert deciding_width(sums_of({MSI: values[:0]}), UNMET) == np.inf


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photos_in(tmp_path_factory.mktemp("images"), n=N)


@pytest.fixture(scope="module")
def whole(photos: Path) -> RunResults:
    """The run of all images, in the order of the data."""
    return run_small(config_for(photos, seed=3), photos.parent / "whole")


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look at 8 images."""
    monkeypatch.setattr("sufficit.runs.job.FIRST_LOOK", LOOKS[0])


def in_order(whole: RunResults, method: str) -> npt.NDArray[np.float64]:
    """MSI in the random order of seed 3, by whole units."""
    return whole.rows[method]["msi"].to_numpy()[np.random.default_rng(3).permutation(N)]


@pytest.fixture(scope="module")
def within(whole: RunResults) -> float:
    """A precision that both methods have at the third look, and not before."""
    found = []
    for n in LOOKS:
        values = [in_order(whole, method)[:n] for method in METHODS[:2]]
        found.append(max(deciding_width(sums_of({MSI: one}), UNMET) for one in values))
    assert found[2] < 0.97 * min(found[:2])
    return (found[2] + min(found[:2])) / 2


def peer_interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The interval of the mean."""
    low, high = intervals(values[:, None], 0.05)
    return float(low[0]), float(high[0])


@pytest.fixture
def stopping(photos: Path, within: float, tmp_path: Path, early: None) -> Callable[..., RunResults]:
    def start(name: str = "out", **options: Any) -> RunResults:
        config = config_for(photos, **{"seed": 3, "within": within, **options})
        return run_small(config, tmp_path / name)

    return start


def test_a_run_stops_at_the_first_look_that_is_precise(
    stopping: Callable[..., RunResults], whole: RunResults, within: float
) -> None:
    found = stopping()
    assert found.n == LOOKS[2]
    said = found.record.within
    assert {key: said[key] for key in ("target", "reached", "images", "of")} == {
        "target": within, "reached": True, "images": 16, "of": 30,
    }  # fmt: skip
    assert said["words"] == (
        f"MSI of every method is known to ± {said['half_width']:.2g} (--within {within:g}) from 16"
        " of 30 images, in random order."
    )
    widths = [(one.high - one.low) / 2 for one in (found.summaries[m]["msi"] for m in METHODS[:2])]
    assert said["half_width"] == max(widths)
    assert not (found.folder / "units").exists()


def test_the_interval_is_that_of_the_look(
    stopping: Callable[..., RunResults], whole: RunResults
) -> None:
    found = stopping()
    for method in METHODS:
        msi = found.summaries[method]["msi"]
        low, high = peer_interval(in_order(whole, method)[: LOOKS[2]])
        assert (msi.low, msi.high) == pytest.approx((low, high), abs=0.03 * (high - low))
    assert found.standing is not None
    assert found.standing.chance == Chance(3)
    assert found.record.chance.level == 0.05


def test_an_image_has_the_numbers_of_a_whole_run(
    stopping: Callable[..., RunResults], whole: RunResults
) -> None:
    found = stopping()
    for method in METHODS:
        mine = found.rows[method].set_index("image")
        assert "leak" in mine
        same = whole.rows[method].set_index("image").loc[mine.index]
        pandas.testing.assert_frame_equal(mine, same, atol=1e-6, rtol=0)
    order = np.random.default_rng(3).permutation(N)[: LOOKS[2]]
    assert {*found.names} == {whole.names[k] for k in order}
    curve = found.record.alpha_curve["images"]
    assert 0 < curve <= 16, "all of them are among those of the first look"


def test_a_run_that_is_never_precise_scores_all_images_and_says_so(
    stopping: Callable[..., RunResults], whole: RunResults
) -> None:
    found = stopping(within=1e-3)
    assert found.n == N
    said = found.record.within
    assert not said["reached"]
    needed = 30 * (said["half_width"] / 1e-3) ** 2
    assert said["words"].startswith(
        f"All 30 images are scored, and MSI is known to ± {said['half_width']:.2g} only, not to ±"
        f" 0.001 (--within): that takes about {needed:,.0f} images."
    )
    assert said["words"] not in found.made()
    assert said["words"] in found.remarks()
    assert found.table()["msi"].to_dict() == pytest.approx(whole.table()["msi"].to_dict(), abs=1e-6)


def test_few_images_are_one_look_with_plain_intervals(
    stopping: Callable[..., RunResults], whole: RunResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sufficit.runs.job.FIRST_LOOK", N)
    found = stopping(within=1.0)
    assert found.record.within["images"] == N
    for method in METHODS:
        mine, plain = (vars(one.summaries[method]["msi"]) for one in (found, whole))
        assert mine == pytest.approx(plain, abs=1e-6)
    assert whole.record.within is None


@pytest.mark.parametrize("after", [1, 2, 3])  # before, at and after the first look
def test_a_run_killed_at_a_look_resumes_and_stops_at_the_same(
    stopping: Callable[..., RunResults], tmp_path: Path, after: int
) -> None:
    wanted = stopping("wanted")
    interrupted(lambda: stopping("killed"), after=after)
    before, written = Store.write, []

    def write(self: Store, rows: Rows, kind: str = UNIT) -> None:
        written.append((kind, rows.unit))
        before(self, rows, kind)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Store, "write", write)
        found = stopping("killed")
    assert [unit for kind, unit in written if kind == UNIT] == list(range(after, 4))
    assert_same_rows(tmp_path / "wanted", tmp_path / "killed", METHODS)
    assert found.summaries == wanted.summaries
    assert found.record.within == wanted.record.within


def test_a_run_killed_before_its_results_computes_nothing_again(
    stopping: Callable[..., RunResults], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StopError

    with monkeypatch.context() as patched:
        patched.setattr(engine, "write_results", fail)
        with pytest.raises(StopError):
            stopping()
    monkeypatch.setattr(engine, "score_unit", fail)
    assert stopping().n == LOOKS[2]


def test_another_precision_is_another_run(stopping: Callable[..., RunResults]) -> None:
    interrupted(stopping)
    with pytest.raises(UserError, match=r"`within` was 0\.\d+, now 0\.002"):
        stopping(within=0.002)


def test_images_that_are_shown_have_their_own_pixels(
    stopping: Callable[..., RunResults], photos: Path
) -> None:
    found = stopping(score="accuracy")
    assert found.shown is not None
    view = Classifier.load(found.config.model).view
    known = {image.name: image.read(view) for image in list_images(photos)}
    names = found.names_of(found.shown.rows)
    assert len({*names}) == len(names) > 4
    wanted = torch.stack([known[name] for name in names])
    assert torch.allclose(found.shown.images, wanted, atol=1 / 255)
    assert {*found.record.shown} == {*names}


def test_compare_takes_within(photos: Path, whole: RunResults, early: None) -> None:
    classifier = Classifier.load(whole.config.model)
    images = torch.stack([image.read(classifier.view) for image in list_images(photos)])
    options: dict[str, Any] = {"within": 1.0, "seed": 3, "unit_size": 4, "checks": "controls"}
    options |= {"value_step": 0.25, "percent_step": 0.25, "progress": False}
    targets = torch.tensor(whole.rows["gradcam"]["target"].to_numpy())
    found = compare(classifier, images, ["gradcam"], targets, **options)
    assert found.n == LOOKS[0]
    assert found.record.within["of"] == N


def test_skipped_images_count_as_looked_at(tmp_path: Path, early: None) -> None:
    photos = photos_in(tmp_path, n=N)
    first = list_images(photos)[int(np.random.default_rng(3).permutation(N)[0])]
    (photos / first.name).write_text("no image")
    found = run_small(config_for(photos, seed=3, within=1.0, checks="controls"), tmp_path / "out")
    assert (found.n, found.record.within["images"]) == (LOOKS[0] - 1, LOOKS[0])
    assert list(found.skipped) == [first.name]


@pytest.mark.parametrize("options", [{"alpha_min": "search"}, {"columns": ["base_score"]}])
def test_what_has_no_msi_to_look_at_is_refused(
    stopping: Callable[..., RunResults], tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=r"within needs MSI at one alpha_min.*add msi to columns"):
        stopping(**options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("within", [0.0, -1.0, float("nan")])
def test_a_width_that_cannot_be_reached_is_refused(photos: Path, within: float) -> None:
    with pytest.raises(UserError, match=r"within must be 1e-06 or more, got .*"):
        config_for(photos, within=within)


def test_the_commands_and_the_report_say_how_many_images_it_took(
    stopping: Callable[..., RunResults], photos: Path, tmp_path: Path, sufficit: Any
) -> None:
    common = ["--model", f"python:{photos.parent / 'model.py'}:make", "--data", photos]
    common += ["--unit-size", 4, "--seed", 3, "--device", "cpu", "--value-step", 0.25]
    common += ["--percent-step", 0.25, "--within", 0.9]
    out = tmp_path / "compare"
    toml = tmp_path / "RUN.toml"
    toml.write_text("save_heatmaps = true")
    methods = ["--methods", "gradcam", "--config", toml]
    told = sufficit("compare", *common, *methods, "--out", out)
    words = json.loads((out / "run.json").read_text())["within"]["words"]
    assert "from 8 of 30 images, in random order." in words
    assert words in told.words
    assert "from 8 of 30 images, in random order." in (out / "report.html").read_text()
    maps = out / "gradcam" / "heatmaps.npz"
    again = sufficit("evaluate", *common, "--heatmaps", maps, "--out", tmp_path / "evaluate")
    assert "from 8 of 30 images, in random order." in again.words
    assert "Warning: MSI of every" not in told.err + again.err
