"""Runs that ask some of the masks: the same draws as evaluate, marked as estimates everywhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet

from small_runs import STEPS, config_for, interrupted, run_small
from sufficit import Classifier, UserError, evaluate, explain
from sufficit.data.images import list_images
from sufficit.perturbation.predictions import NO_CLASS
from sufficit.runs import config as module
from sufficit.runs import job
from sufficit.runs.config import (
    DONORS,
    FEW,
    FEW_DONORS,
    SAMPLED,
    SEARCHED,
    RunConfig,
    read_toml,
)
from sufficit.runs.results import RunResults

MASKS = {"masks": 354, "least": 18}


@pytest.mark.parametrize(
    ("images", "sources", "calls"),
    [
        (4, 7, "exact"),  # 357 masks fit into 10,000 passes
        (5, 7, 285),
        (50, 7, 28),
        (55, 7, SAMPLED),
        (9_999, 7, SAMPLED),
        (10_000, 7, 18),
        (10_000, 0, 18),
    ],
)
def test_masks_are_chosen_by_images_and_sources(images: int, sources: int, calls: Any) -> None:
    assert RunConfig(model="m", data="d").for_images(images, sources, **MASKS).calls == calls


def test_a_run_that_stops_once_it_is_certain_asks_the_fewest_masks() -> None:
    config = RunConfig(model="m", data="d", within=0.01)
    assert config.for_images(9_999, 7, **MASKS).calls == 18
    assert config.for_images(50, 7, **MASKS).calls == 28, "the budget of few images stays"


def test_few_masks_are_all_asked_and_none_is_left_out_that_a_column_needs() -> None:
    config = RunConfig(model="m", data="d")
    assert config.for_images(10**6, 7, masks=18, least=14).calls == 14
    assert config.for_images(10**6, 7, masks=14, least=14).calls == "exact"
    assert config.for_images(500, 7, masks=354, least=52).calls == 52


def test_a_run_says_how_many_masks_it_chose(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUDGET", 11 * 4 * 30)
    config = config_for(photos, checks="controls", value_step=0.05, percent_step=0.1)
    results = run_small(config, tmp_path / "out")
    assert results.config.calls == 30  # of 4 sources: the control `everything` is free
    assert results.rows["gradcam"]["calls"].max() <= 30
    assert read_toml(tmp_path / "out" / "RUN.toml")["calls"] == 30


def test_a_search_asks_more_masks_on_its_sample(photos: Path) -> None:
    sampled = job.make_job(config_for(photos, calls=20, alpha_min="search"))
    assert sampled.search_calls() == SEARCHED
    assert job.make_job(config_for(photos, alpha_min="search")).search_calls() is None


@pytest.mark.parametrize("calls", [9, "exact"])
def test_a_given_number_of_calls_stays(calls: Any) -> None:
    config = RunConfig(model="m", data="d", calls=calls)
    assert config.for_images(10**6, 7, **MASKS).calls == calls


@pytest.mark.parametrize(
    ("images", "calls", "donors"),
    [
        (FEW, SAMPLED, DONORS),
        (FEW + 1, SAMPLED, FEW_DONORS),
        (FEW + 1, "auto", FEW_DONORS),
        (FEW + 1, "exact", DONORS),
    ],
)
def test_a_sampled_run_of_many_images_has_few_donors(images: int, calls: Any, donors: int) -> None:
    config = RunConfig(model="m", data="d", calls=calls)
    assert config.for_images(images, 7, **MASKS).donors == donors
    assert replace(config, donors=7).for_images(images, 7, **MASKS).donors == 7


def test_only_masks_that_are_asked_make_compiling_pay(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(job, "pays", lambda _, __, calls, ___: counted.append(calls) or False)
    found = []
    for calls in (20, "exact"):
        made = job.make_job(config_for(photos, calls=calls, checks="controls"))
        assert not made.compiles
        # An empty image for the control that marks everything.
        found.append(11 * (len(made.asked_sources) * made.probes[0].calls + 1))
    assert counted == found
    assert found[0] == 11 * (4 * 20 + 1)


@pytest.fixture
def sampled(photos: Path, tmp_path: Path) -> RunResults:
    config = config_for(photos, calls=20, fills="black,mean", checks="controls,fill")
    return run_small(config, tmp_path / "sampled", unit=4)


def test_rows_are_those_of_evaluate_with_the_same_names(photos: Path, sampled: RunResults) -> None:
    classifier = Classifier.load(sampled.config.model)
    images = torch.stack([image.read(classifier.view) for image in list_images(photos)])
    labels = torch.tensor(sampled.rows["gradcam"]["target"].to_numpy())
    maps = explain(classifier, images, labels, method="gradcam")
    more = {"calls": 20, "names": sampled.names, "fills": ("black", "mean"), **STEPS}
    scores = evaluate(classifier, images, maps, labels, **more)
    wanted = scores.frame().drop(columns="calls")
    wanted = wanted.drop(columns=[name for name in wanted if name.startswith("msi_worst")])
    for column in wanted.columns:
        found = sampled.rows["gradcam"][column].to_numpy(np.float64)
        assert found == pytest.approx(wanted[column].to_numpy(np.float64), abs=1e-5), column


def test_estimates_are_marked_in_record_and_report(
    photos: Path, tmp_path: Path, sampled: RunResults
) -> None:
    words = sampled.record.sampled
    assert words.startswith("Each image was scored with at most 20 of ")
    assert "the scores of a single image are estimates." in words
    text = sampled.report(tmp_path / "report.html").read_text()
    assert "scores of a single image are estimates" in text
    rows = sampled.folder / "gradcam" / "scores.parquet"
    assert parquet.read_schema(rows).metadata[b"estimates"] == b"each image's values"
    exact = run_small(config_for(photos, checks="controls"), tmp_path / "exact")
    assert exact.record.sampled is None
    rows = exact.folder / "gradcam" / "scores.parquet"
    assert b"estimates" not in (parquet.read_schema(rows).metadata or {})
    assert "are estimates" not in exact.report(tmp_path / "exact.html").read_text()


def test_images_that_are_shown_have_whole_curves(sampled: RunResults) -> None:
    assert sampled.shown is not None
    for found in sampled.shown.predictions.values():
        assert found.named.shape == (len(sampled.shown.rows), len(found.bands))
        assert (found.named != NO_CLASS).all()
        assert found.drawn is None


def test_mean_curves_are_close_to_the_exact_ones(
    photos: Path, tmp_path: Path, sampled: RunResults
) -> None:
    exact = run_small(config_for(photos, checks="controls"), tmp_path / "exact")
    for name, curve in exact.scores["gradcam"].curves.items():
        found = sampled.scores["gradcam"].curves[name]
        assert found.grid == curve.grid
        known = ~found.values.isnan()
        assert known.any()
        # Eleven images, of which some are asked at each point.
        assert (found.values - curve.values)[known].abs().mean() < 0.5


def test_a_search_finds_alpha_min_from_sampled_masks(photos: Path, tmp_path: Path) -> None:
    config = config_for(photos, alpha_min="search", calls=120)
    found = run_small(config, tmp_path / "out")
    assert found.alpha_min in found.record.search.alphas
    assert (found.rows["gradcam"]["calls"] <= 121).all()
    assert "leak" in found.rows["gradcam"]
    assert found.report(tmp_path / "report.html").exists()


def test_other_calls_are_another_run(photos: Path, tmp_path: Path) -> None:
    interrupted(lambda: run_small(config_for(photos, calls=20), tmp_path / "out"))
    with pytest.raises(UserError, match="`calls` was 20, now 'exact'"):
        run_small(config_for(photos), tmp_path / "out")


def test_too_few_calls_are_refused_before_any_image_is_read(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"calls must be 18 or more for these columns, got 3"):
        run_small(config_for(photos, calls=3), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_checks_look_at_some_of_many_images(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(photos, checks=["fill", "leak"])
    whole = run_small(config, tmp_path / "whole")
    monkeypatch.setattr("sufficit.runs.probes_of.CHECKED", 2)  # of 11, in units of 4
    some = run_small(config, tmp_path / "some")
    for method in ("gradcam", "layercam"):
        all_rows = whole.rows[method].set_index("image")
        rows = some.rows[method].set_index("image")
        assert (rows["msi"] == all_rows["msi"]).all()
        for column in ("leak", "leak_chance", "msi_held_out", "fill_drop"):
            known = rows[column].dropna()
            assert len(known) == 2, column
            assert known.to_dict() == pytest.approx(all_rows[column][known.index].to_dict())
        assert some.summaries[method]["leak_ratio"].n == 2
        assert some.summaries[method]["msi"].n == 11
    assert some.record.model_calls < whole.record.model_calls
