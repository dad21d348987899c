"""What a run wrote is read again as it was returned, without the model and the images."""

import json
import math
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn

from report_content import Quarters, quarters
from small_runs import config_for, run_small
from sufficit import Classifier, UserError, compare, evaluate, explain_all
from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.images import list_images, read_image
from sufficit.provenance import plain
from sufficit.report.answer import verdict
from sufficit.report.html import render
from sufficit.report.interpretation import cautions
from sufficit.report.readings import readings
from sufficit.runs.results import RunResults
from sufficit.runs.shown import pack, rows_named, unpack
from sufficit.runs.store import MAPS
from sufficit.sources import noise
from sufficit.sums import few_images


def results_equal(one: RunResults, other: RunResults) -> None:
    assert plain(one.record) == plain(other.record)
    assert (one.config, one.standing, one.methods) == (other.config, other.standing, other.methods)
    for method in one.methods:
        pandas.testing.assert_frame_equal(one.rows[method], other.rows[method], check_exact=True)
        assert one.summaries[method].keys() == other.summaries[method].keys()
        for column, known in one.summaries[method].items():
            found = other.summaries[method][column]
            for field in fields(known):
                values = getattr(known, field.name), getattr(found, field.name)
                assert values[0] == values[1] or np.isnan(values).all()
        for name, curve in one.curves[method].items():
            there = other.curves[method][name].values
            torch.testing.assert_close(curve.values, there, rtol=0, atol=0, equal_nan=True)
        for column, values in one.scores[method].columns.items():
            there = other.scores[method].columns[column]
            torch.testing.assert_close(values, there, rtol=0, atol=0, equal_nan=True)
    assert (one.shown is None) == (other.shown is None)
    if one.shown is not None and other.shown is not None:
        assert torch.equal(one.shown.images, other.shown.images)
        for method in one.methods:
            assert torch.equal(one.shown.heatmaps[method], other.shown.heatmaps[method])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alpha_min": "search", "checks": "fill,leak", "score": "confidence"},
        {"columns": ["insertion_pixel"], "checks": "controls"},
        {"targets": "prediction", "fills": "black,noise", "checks": "all"},
    ],
    ids=["usual", "search", "without msi", "prediction"],
)
def test_reading_gives_what_the_run_returned(
    photos: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    returned = run_small(config_for(photos, **options), tmp_path / "out")
    results_equal(returned, RunResults.read(tmp_path / "out"))


def test_a_run_without_a_folder_returns_the_same(photos: Path, tmp_path: Path) -> None:
    kept = run_small(config_for(photos), tmp_path / "out")
    without = run_small(config_for(photos), None)
    assert not without.folder.exists()
    for method in kept.methods:
        pandas.testing.assert_frame_equal(without.rows[method], kept.rows[method])
    assert without.table().loc["gradcam", "msi"] == kept.summaries["gradcam"]["msi"].mean
    page = without.report(tmp_path / "report.html")
    assert "layercam" in page.read_text()


def test_report_and_figures_need_neither_the_model_nor_the_images(
    sufficit, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_small(config_for(photos), tmp_path / "out")
    best = results.standing.best if results.standing else ""
    shutil.rmtree(photos)
    (tmp_path / "model.py").unlink()

    def fail(*_: object, **__: object) -> None:
        pytest.fail("a report needs the model")

    monkeypatch.setattr(Classifier, "__init__", fail)
    monkeypatch.setattr("sufficit.classifier.loading.load_classifier", fail)
    monkeypatch.setattr("sufficit.runs.job.load_classifier", fail)
    told = sufficit("report", tmp_path / "out", "--title", "My birds")
    assert told.code == 0, told.err
    page = (tmp_path / "out" / "report.html").read_text()
    assert "My birds" in page
    assert f"{results.summaries[best]['msi'].mean:.3f}" in page
    for show in ("sheet", "curves", "alpha", "sizes"):
        drawn = sufficit(
            "figure", tmp_path / "out", "--show", show, "--out", tmp_path / f"{show}.png"
        )
        assert drawn.code == 0, drawn.err
        assert (tmp_path / f"{show}.png").stat().st_size > 3000


def test_heatmaps_are_those_that_were_scored_to_the_bit(photos: Path, tmp_path: Path) -> None:
    methods = ["gradcam", "kpca-cam"]
    config = config_for(photos, methods=methods, checks="controls", seed=5)
    results = run_small(config, tmp_path / "out", unit=4)
    classifier = Classifier.load(config.model)
    images = torch.stack([read_image(photos / name, None) for name in results.names])
    targets = torch.tensor(results.rows["gradcam"]["target"].to_numpy())
    drawn: dict[str, list[torch.Tensor]] = {name: [] for name in (*methods, "center")}
    for some, goals in zip(images.split(4), targets.split(4), strict=True):  # as the units were
        for name, found in explain_all(classifier, some, goals, [*drawn]).items():
            drawn[name].append(found)
    expected = {name: torch.cat(parts) for name, parts in drawn.items()}
    expected["random"] = noise((12, 10), 5, range(11))
    expected["everything"] = torch.ones(11, 12, 10)
    rows = [7, 0, 3]
    found = results.heatmaps(rows, [*expected])
    for name, maps in expected.items():
        assert torch.equal(found[name], maps[rows]), name
        scores = evaluate(classifier, images, maps, targets, columns=["mask_penalty"])
        penalties = results.rows[name]["mask_penalty"].to_numpy()
        assert np.array_equal(penalties, scores.mask_penalty.numpy()), "the same masks"
    assert results.shown is not None
    for name, maps in results.shown.heatmaps.items():
        assert torch.equal(maps, expected[name][list(results.shown.rows)])


def test_images_are_those_that_were_scored(photos: Path, tmp_path: Path) -> None:
    results = run_small(config_for(photos, checks="controls"), tmp_path / "out")
    assert results.shown is not None
    expected = torch.stack([read_image(photos / name, None) for name in results.names])
    assert torch.equal(results.shown.images, expected[list(results.shown.rows)])
    assert torch.equal(results.images([4, 2]), expected[[4, 2]])
    read = RunResults.read(tmp_path / "out")
    object.__setattr__(read, "shown", None)  # as of an image that is not shown
    assert torch.equal(read.images([4, 2]), expected[[4, 2]])
    moved = tmp_path / "moved"
    photos.rename(moved)
    assert torch.equal(read.images([4, 2], moved), expected[[4, 2]])
    (moved / "ant" / "06.png").unlink()
    with pytest.raises(UserError, match=r"ant/06\.png is not in .*: give --data"):
        read.images([results.names.index("ant/06.png")], moved)


def test_the_caution_about_few_images_is_said_once(photos: Path, tmp_path: Path) -> None:
    run_small(config_for(photos, checks="controls"), tmp_path / "out")
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    record["few_images"] = "Only 11 images: as an earlier version said it."
    (tmp_path / "out" / "run.json").write_text(json.dumps(record))
    content = RunResults.read(tmp_path / "out").content()
    (said,) = (one for one in cautions(content) if one.text.startswith("Only 11 images"))
    assert said.details == (few_images(11),)


def test_rows_are_chosen_by_name_number_or_rank(photos: Path, tmp_path: Path) -> None:
    results = run_small(config_for(photos, checks="controls"), tmp_path / "out")
    methods = ["gradcam", "layercam"]
    msi = np.stack([results.rows[m]["msi"] for m in methods])
    spread = np.ptp(msi, axis=0)
    assert msi.mean(0)[rows_named(results, ["best"], methods)] == [msi.mean(0).max()]
    assert msi.mean(0)[rows_named(results, ["worst"], methods)] == [msi.mean(0).min()]
    disputed = spread[rows_named(results, ["disputed:3"], methods)].tolist()
    assert disputed == sorted(spread)[::-1][:3]
    record = replace(results.record, references=["layercam"])  # scored, not ranked
    results = replace(results, record=record)
    for words, wanted in (("best", msi[0].argmax()), ("worst", msi[0].argmin())):
        assert rows_named(results, [words], methods) == [wanted]
    assert rows_named(results, ["best"], ["layercam"]) == [msi[1].argmax()]
    assert rows_named(results, ["99"], methods) == list(range(11))
    chosen = rows_named(results, ["06.png", "1", "ant/00.png"], methods)
    assert chosen == [results.names.index("ant/06.png"), 0]


def test_json_has_the_summary_and_no_nan(photos: Path, tmp_path: Path) -> None:
    results = run_small(config_for(photos), tmp_path / "out")
    printed = json.loads(json.dumps(results.as_json(), allow_nan=False))
    assert printed["n"] == 11
    mean = results.summaries["gradcam"]["msi"].mean
    assert printed["columns"]["gradcam"]["msi"]["mean"] == mean
    assert printed["standing"]["best"] in ("gradcam", "layercam")
    assert "config" not in printed


def test_what_makes_scores_worthless_is_a_remark(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def own(model, images, targets): return images[:, 0] * 0")
    config = config_for(photos, methods=[f"python:{tmp_path / 'mine.py'}:own"], checks="controls")
    results = run_small(config, tmp_path / "out")
    assert results.record.empty_heatmaps["own"] == 11
    assert results.unmarked["own"] == 11
    said = [one.text for one in cautions(results.content())]
    assert sum("nothing" in one for one in said) == 1  # it is said once


def dim_maps(count: int, **options: Any) -> RunResults:
    """Of 12 images, `dim` stays at 0.2 in so many and marks the bright quarter of the others.

    `dark` marks the three quarters that are not bright.
    """
    images, targets = quarters(12)
    bright = (images.mean(1) > 0.3).float()
    bright = nn.functional.avg_pool2d(bright[:, None], 8).round()[:, 0]
    bright = nn.functional.interpolate(bright[:, None], scale_factor=8)[:, 0]
    dim = bright.clone()
    dim[12 - count :] = 0.2
    given: dict[str, Any] = {"checks": "none"} | options
    maps = {"dim": dim, "dark": 1 - bright}
    return compare(Classifier(Quarters()), images, maps, targets, progress=False, **given)


def test_a_map_that_marks_nothing_at_alpha_min_is_not_the_best_without_a_word(
    tmp_path: Path,
) -> None:
    dim_maps(9, out=tmp_path / "out")
    found = RunResults.read(tmp_path / "out")  # nothing of it is stored but the columns
    msi = found.rows["dim"]["msi"].tolist()
    # Of black the model says class 0, of which it needs no region: (1 - 1) / 2, else (0 - 1) / 2.
    assert msi[3:] == [-0.5, 0.0, -0.5, -0.5, -0.5, 0.0, -0.5, -0.5, -0.5]
    assert found.unmarked == found.as_json()["unmarked"] == {"dim": 9}
    said = "dim marks nothing at alpha_min 0.5 in 9 of 12 images"
    content = found.content()
    assert [one.text for one in cautions(content)].count(f"{said}.") == 1
    assert f"{said}." in found.verdict.warnings
    assert f"{said}." in str(found).splitlines()
    dim, dark = readings(content)
    assert dim.why.endswith(f"{said}: MSI there is that of an empty mask.")
    assert "nothing" not in dark.why
    page = render(content)
    assert page.count("marks nothing in 9 of 12</span>") == 1
    assert f"{said}." in page


@pytest.mark.parametrize(
    ("count", "options"),
    [(1, {}), (9, {"alpha_min": 0.2}), (9, {"columns": ["msi", "base_score"]})],
    ids=["one in twelve", "alpha_min", "unknown"],
)
def test_few_maps_that_mark_nothing_bring_no_warning(count: int, options: dict[str, Any]) -> None:
    found = dim_maps(count, **options)
    assert found.unmarked == {}
    assert not any("marks nothing" in one.text for one in cautions(found.content()))


def test_maps_that_mark_nothing_are_counted_at_the_alpha_min_found_and_for_ranked_sources() -> None:
    assert dim_maps(2).unmarked == {"dim": 2}
    found = dim_maps(9, alpha_min="search")
    assert found.alpha_min > 0.2  # an empty mask is better than a mask of everything
    assert found.unmarked == {"dim": 9}
    found = dim_maps(9)
    for kind in ("references", "controls"):  # as an answer of an adapter, as center
        record: Any = replace(found.record, **{kind: ["dim"]})
        assert replace(found, record=record).unmarked == {}


def test_a_folder_without_a_finished_run_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished run: sufficit compare makes one"):
        RunResults.read(tmp_path)
    (tmp_path / "started" / "units").mkdir(parents=True)
    with pytest.raises(UserError, match="run the same command again to resume it"):
        RunResults.read(tmp_path / "started")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match="a run of another kind or version"):
        RunResults.read(tmp_path)


@pytest.mark.parametrize("name", ["summary.json", "gradcam/scores.parquet", "shown.safetensors"])
def test_a_run_with_a_corrupt_file_is_one_error(photos: Path, tmp_path: Path, name: str) -> None:
    run_small(config_for(photos, checks="controls"), tmp_path / "out")
    (tmp_path / "out" / name).write_bytes(b"x")
    with pytest.raises(UserError, match=r"could not be read|is not complete .*run it again"):
        RunResults.read(tmp_path / "out")


def test_a_run_without_its_heatmaps_says_so(photos: Path, tmp_path: Path) -> None:
    results = run_small(config_for(photos, checks="controls"), tmp_path / "out")
    kept = results.heatmaps([0], ["gradcam"])["gradcam"]
    shutil.rmtree(tmp_path / "out" / MAPS)
    shown = results.heatmaps([0], ["gradcam"])["gradcam"]  # of the images that the report shows
    assert torch.equal(shown, kept)
    with pytest.raises(UserError, match=r"has no heatmaps of ant/00\.png: run it again"):
        replace(results, shown=None).heatmaps([0], ["gradcam"])


def test_an_interval_without_an_end_is_read_as_one(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_small(config_for(photos, checks="controls"), out)
    path = out / "summary.json"
    summary = json.loads(path.read_text())
    first = next(iter(summary))
    summary[first]["leak_ratio"] = {
        **{"mean": 1.1, "low": 0.2, "high": None, "n": 5, "n_nan": 0, "higher_is_better": False}
    }
    summary[first]["msi"] |= {"low": None, "high": None}
    path.write_text(json.dumps(summary))
    found = RunResults.read(out).summaries[first]
    assert (found["leak_ratio"].low, found["leak_ratio"].high) == (0.2, math.inf)
    assert math.isnan(found["msi"].low)
    assert math.isnan(found["msi"].high), "of a single image"


def test_leakage_that_never_happens_by_chance_is_read_as_leakage(tmp_path: Path) -> None:
    halves = nn.Sequential(nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten())  # which half is brighter
    images, heatmaps = torch.full((60, 1, 8, 8), 0.5), torch.zeros(60, 8, 8)
    images[::2, :, :4], images[1::2, :, 4:] = 0.7, 0.7
    heatmaps[::2, :4], heatmaps[1::2, 4:] = 1, 1
    given: Any = {"checks": "leak", "progress": False}
    found = compare(
        Classifier(halves), images, {"own": heatmaps}, torch.arange(60) % 2, out=tmp_path, **given
    )
    for results in (found, RunResults.read(tmp_path)):
        summary = results.summaries["own"]
        assert (summary["leak"].mean, summary["leak_chance"].mean) == (1, 0)
        ratio = summary["leak_ratio"]
        assert (ratio.mean, ratio.low, ratio.high) == (math.inf, math.inf, math.inf)
        (said,) = (c for c in cautions(results.content()) if c.text.startswith("Leakage"))
        assert said.text == "Leakage: the masks of own reveal the class by their shape."
        assert "in 100.0% of the cases, masks of other classes in 0.0%" in said.details[0]
        assert said.text in verdict(results.content()).warnings
    page = found.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<span class="mean leaks">' in page


def test_packed_images_lose_nothing() -> None:
    whole = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    floats = unpack(whole)
    assert torch.equal(pack(floats), whole)
    assert pack(floats).dtype == torch.uint8
    between = floats + 1e-4
    assert torch.equal(pack(between), between), "values between two bytes stay as they are"


@pytest.mark.parametrize("checks", ["none", "leak"])
def test_maps_of_other_proportions_are_counted(photos: Path, tmp_path: Path, checks: str) -> None:
    names = [image.name for image in list_images(photos)]
    maps = {name: torch.rand(5, 10) for name in names}
    write_heatmaps(tmp_path / "maps.npz", maps)
    config = config_for(photos, methods=[str(tmp_path / "maps.npz")], checks=checks)
    results = run_small(config, tmp_path / "out")
    assert sorted(results.record.stretched_heatmaps) == names
    assert any("11 heatmaps (first ant/00.png) have other" in one for one in results.remarks())
