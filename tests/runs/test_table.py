"""The end of a run: units become rows, curves, means, tests and images to show."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from pyarrow import parquet

from report_content import choose
from small_runs import config_for, rows, run_small, write_photos
from sufficit import sums
from sufficit.data.heatmap_files import HeatmapFile
from sufficit.data.images import list_images
from sufficit.metrics.scores import summarise
from sufficit.provenance import plain
from sufficit.runs import engine, merge
from sufficit.runs.config import write_toml
from sufficit.runs.engine import run
from sufficit.runs.job import make_job
from sufficit.runs.results import RunResults
from sufficit.runs.rows import StoredRows
from sufficit.runs.store import Store, UnitFile
from sufficit.statistics import compare_values


def test_means_and_tests_are_those_of_the_rows(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    results = run_small(config_for(photos, seed=4), out)
    summary = json.loads((out / "summary.json").read_text())
    names = ("gradcam", "layercam", "random", "center")
    msi = {m: rows(out, m)["msi"].to_numpy() for m in names}
    for method in results.methods:
        assert summary[method]["msi"]["mean"] == pytest.approx(rows(out, method)["msi"].mean())
    expected = compare_values(msi, seed=4, controls=names[2:])
    assert results.standing == expected
    assert len(expected.pairs) == 5, "two methods, and each of them with both controls"
    assert summary["standing"]["ranking"] == list(expected.ranking)
    pairs = pandas.read_csv(out / "pairs.csv")
    pairs = pairs[pairs["column"] == "msi"]
    assert pairs["p_corrected"].tolist() == [pair.p_corrected for pair in expected.pairs]
    assert pairs["seed"].tolist() == [4] * 5
    ranked = [*expected.ranking, "random", "center"]
    assert results.record["methods"] == ranked
    assert results.record["controls"] == ["random", "center"]


@pytest.mark.parametrize("alpha_min", [0.5, "search"])
def test_units_merged_one_by_one_give_what_they_give_together(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alpha_min: Any
) -> None:
    config = config_for(photos, seed=4, alpha_min=alpha_min, save_heatmaps=True)
    together = run_small(config, tmp_path / "together")
    monkeypatch.setattr(merge, "TOGETHER", 1)
    alone = run_small(config, tmp_path / "alone")
    assert together.methods == alone.methods
    for method in together.methods:
        pandas.testing.assert_frame_equal(
            rows(tmp_path / "together", method), rows(tmp_path / "alone", method), check_exact=True
        )
        for column, one in together.summaries[method].items():
            other = alone.summaries[method][column]
            assert (one.mean, one.low) == pytest.approx((other.mean, other.low), nan_ok=True)
        with (
            HeatmapFile(tmp_path / "together" / method / "heatmaps.npz") as one_file,
            HeatmapFile(tmp_path / "alone" / method / "heatmaps.npz") as other_file,
        ):
            for name in together.names:
                assert torch.equal(one_file.read(name), other_file.read(name))
    assert together.standing == alone.standing
    for key in ("shown", "alpha_curve", "own_alpha_min", "model_calls", "leak_ratio", "n"):
        assert together.record.get(key) == alone.record.get(key), key


def test_stored_curves_give_the_columns_again(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_small(config_for(photos, leak=False, score="confidence"), tmp_path / "out")
    table = parquet.read_table(tmp_path / "out" / "gradcam" / "curves.parquet")
    assert table["image"].to_pylist() == results.names
    grids = json.loads(table.schema.metadata[b"grids"])
    stored = np.stack(table["insertion_pixel_confidence"].to_numpy())
    area = np.trapezoid(stored, grids["insertion_pixel"], axis=1)
    assert area == pytest.approx(results.rows["gradcam"]["insertion_pixel"].to_numpy(), abs=1e-6)
    assert grids["hide"][0] == results.alpha_min
    mean = results.curves["gradcam"]["insertion_pixel"]
    assert mean.values.numpy() == pytest.approx(stored.mean(0), abs=1e-6)
    monkeypatch.setattr("sufficit.runs.rows.CURVES_GROUP", 1)  # bytes: a row group
    monkeypatch.setattr(merge, "TOGETHER", 1)  # per unit
    run_small(config_for(photos, leak=False, score="confidence"), tmp_path / "small")
    again = parquet.read_table(tmp_path / "small" / "gradcam" / "curves.parquet")
    assert again.equals(table)
    path = tmp_path / "small" / "gradcam" / "curves.parquet"
    assert parquet.read_metadata(path).num_row_groups == 3


def test_controls_have_no_part_in_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    alphas = (0.2, 0.4, 0.6, 0.8)
    msi = {"a": [0.5, 0.4, 0.0, 0.0], "b": [0.0, 0.4, 0.5, 0.0], "random": [0.0, 0.0, 0.0, 9.0]}
    tried = {name: {a: [m] * 2 for a, m in zip(alphas, msi[name], strict=True)} for name in msi}
    monkeypatch.setattr(merge, "_predictions", lambda job, kept, name: tried[name])
    monkeypatch.setattr(merge, "msi", lambda found, schedule: found[schedule.alpha_min])
    plan = SimpleNamespace(searching=True, schedules=[SimpleNamespace(alpha_min=a) for a in alphas])
    config = SimpleNamespace(seed=0)
    job: Any = SimpleNamespace(plan=plan, ranked=["a", "b"], units=[0], config=config)
    unit = UnitFile({}, {"names": ["x", "y"], "numbers": [0, 1]})
    store: Any = SimpleNamespace(read=lambda stage, number: unit)
    assert merge.best_alpha(job, merge.msi_tried(job, store, msi)) == 0.4


def test_references_are_scored_and_not_ranked(photos: Path, tmp_path: Path) -> None:
    job = make_job(config_for(photos, methods=["gradcam", "layercam", "kpca-cam"]), unit=4)
    results = run(replace(job, references=("kpca-cam",)), tmp_path / "out", progress=False)
    assert results.standing is not None
    assert set(results.standing.ranking) == {"gradcam", "layercam"}
    assert results.unranked == ("random", "center", "kpca-cam")
    assert results.controls == ("random", "center")
    assert "msi" in results.summaries["kpca-cam"]


def test_a_flat_run_has_its_files_in_the_folder_itself(photos: Path, tmp_path: Path) -> None:
    config = config_for(photos, methods=["gradcam"], controls=False, leak=False)
    flat = run_small(config, tmp_path / "flat", flat=True)
    deep = run_small(config, tmp_path / "deep")
    frame = pandas.read_parquet(tmp_path / "flat" / "scores.parquet")
    pandas.testing.assert_frame_equal(frame, rows(tmp_path / "deep", "gradcam"), check_exact=True)
    summary = json.loads((tmp_path / "flat" / "summary.json").read_text())
    deeper = json.loads((tmp_path / "deep" / "summary.json").read_text())
    assert summary == deeper["gradcam"]
    assert not (tmp_path / "flat" / "pairs.csv").exists()
    assert flat.standing == deep.standing


def test_saved_heatmaps_are_those_that_were_scored(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    results = run_small(config_for(photos, save_heatmaps=True, leak=False), out)
    names = [image.name for image in list_images(photos)]
    kept = results.heatmaps(range(11), results.methods)
    for method in results.methods:
        with HeatmapFile(out / method / "heatmaps.npz") as maps:
            assert [*maps.keys] == names
            for name, expected in zip(names, kept[method], strict=True):
                assert torch.equal(maps.read(name), expected)


def test_the_images_shown_are_chosen_by_the_runs_msi(tmp_path: Path) -> None:
    photos = write_photos(tmp_path, 40)
    results = run_small(config_for(photos, leak=False, seed=2), tmp_path / "out", unit=9)
    msi = {m: results.rows[m]["msi"].to_numpy() for m in ("gradcam", "layercam")}
    expected = choose(msi, seed=2)
    assert results.record["shown"] == {results.names[row]: why for row, why in expected.items()}
    assert results.shown is not None
    assert results.shown.rows == tuple(expected)
    assert results.shown.reasons == tuple(expected.values())
    assert len(expected) == 24


@pytest.mark.parametrize("alpha_min", [0.5, "search"])
def test_the_best_the_worst_and_the_disputed_are_shown_also_of_many_images(
    tmp_path: Path, alpha_min: Any
) -> None:
    """Only the pixels of candidates are kept."""
    photos = write_photos(tmp_path, 40)
    config = config_for(photos, leak=False, alpha_min=alpha_min)
    results = run_small(config, tmp_path / "out", unit=9)
    assert results.shown is not None
    msi = {m: results.rows[m]["msi"].to_numpy() for m in ("gradcam", "layercam")}
    assert dict(zip(results.shown.rows, results.shown.reasons, strict=True)) == choose(msi)


def test_classes_without_names_are_called_by_their_folders(photos: Path, tmp_path: Path) -> None:
    from sufficit import Classifier

    made = Classifier.load(config_for(photos).model)
    nameless = Classifier(made.model, layer=made.layer)
    results = run_small(config_for(photos, leak=False), tmp_path / "out", classifier=nameless)
    assert results.record["class_names"] == ["ant", "bee", "cat"]
    assert results.class_names([0, 10]) == ["ant", "cat"]


@pytest.mark.parametrize("alpha_min", [0.5, "search"])
def test_each_file_of_a_unit_is_read_once(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alpha_min: Any
) -> None:
    """Those of images shown are read again, and all scores once before, for a search."""
    config = config_for(photos, alpha_min=alpha_min, save_heatmaps=True)
    job, whole, reads = make_job(config, unit=4), Store.read, Counter[tuple[str, int]]()

    def read(self: Store, stage: str, unit: int, **more: Any) -> UnitFile:
        reads[stage, unit] += more.get("names") != []  # facts alone are a header
        return whole(self, stage, unit, **more)

    for name in ("compute", "msi_tried"):
        forgotten = call_and_forget(getattr(engine, name), reads)
        monkeypatch.setattr(f"sufficit.runs.engine.{name}", forgotten)
    monkeypatch.setattr(merge, "write_shown", lambda *_: {})
    monkeypatch.setattr(Store, "read", read)
    run(job, tmp_path / "out", progress=False)
    stages = ["scores", "heatmaps", *(["leak"] if alpha_min == "search" else [])]
    assert reads == {(stage, unit): 1 for stage in stages for unit in range(3)}


def call_and_forget(call: Any, reads: Counter[tuple[str, int]]) -> Any:
    def called(*given: Any, **more: Any) -> Any:
        found = call(*given, **more)
        reads.clear()
        return found

    return called


def test_runs_of_more_images_than_groups_have_the_intervals_of_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = write_photos(tmp_path, 40)
    single = run_small(config_for(photos, seed=3), tmp_path / "single", unit=9)
    monkeypatch.setattr(sums, "GROUPS", 25)
    grouped = run_small(config_for(photos, seed=3), tmp_path / "grouped", unit=9)
    names = ("gradcam", "layercam", "random", "center")
    msi = {m: grouped.rows[m]["msi"].to_numpy() for m in names}
    assert grouped.standing == compare_values(msi, seed=3, controls=names[2:])
    assert grouped.standing != single.standing
    for method in single.methods:
        plan = make_job(config_for(photos)).plan
        columns = {c: grouped.rows.column(method, c) for c in grouped.rows.columns(method)}
        expected = summarise(columns, plan, seed=3)
        assert plain(dict(grouped.summaries[method])) == plain(expected)
        for column in columns:
            means = [r.summaries[method][column].mean for r in (single, grouped)]
            assert means[0] == pytest.approx(means[1], rel=1e-12, nan_ok=True)


def test_all_skipped_images_are_listed_and_the_first_ones_in_the_record(
    sufficit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = write_photos(tmp_path, 11)
    broken = sorted((photos / "bee").iterdir())[:3]
    for path in broken:
        path.write_bytes(b"")
    names = [f"bee/{path.name}" for path in broken]
    whole = run_small(config_for(photos, leak=False), tmp_path / "whole")
    assert list(whole.skipped) == names
    listed = pandas.read_csv(tmp_path / "whole" / "skipped.csv")
    assert listed["image"].tolist() == names
    assert listed["reason"].tolist() == list(whole.skipped.values())
    monkeypatch.setattr(merge, "NAMED", 2)
    config = tmp_path / "RUN.toml"
    write_toml(config, config_for(photos, leak=False))
    told = sufficit("compare", "--config", config, "--out", tmp_path / "out")
    assert "3 images skipped; skipped.csv names all of them." in told.err
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["n_skipped"], [one["name"] for one in record["skipped"]]) == (3, names[:2])
    assert len(pandas.read_csv(tmp_path / "out" / "skipped.csv")) == 3
    assert "3 skipped" in (tmp_path / "out" / "report.html").read_text()


def test_a_report_of_many_images_reads_only_the_rows_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_small(config_for(write_photos(tmp_path, 40), leak=False), tmp_path / "out", unit=9)

    def fail(*_: object) -> None:
        pytest.fail("all rows are read")

    for name in ("__getitem__", "column", "names"):
        monkeypatch.setattr(StoredRows, name, fail)
    monkeypatch.setattr("sufficit.runs.results.MOST_ROWS", 159)  # 40 images of 4 sources are 160
    results = RunResults.read(tmp_path / "out")
    page = results.report(tmp_path / "report.html").read_text()
    assert "24 of 40 images" in page
    assert "images.csv" not in page
    assert results.table().loc["gradcam", "msi"] == results.summaries["gradcam"]["msi"].mean


def test_a_worker_may_keep_other_images_of_those_that_tie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another processor may round otherwise."""
    exact = engine.msi

    def rounded(*given: Any) -> torch.Tensor:
        values = exact(*given)
        return values + 1e-13 * (torch.arange(len(values)) * 37 % 97 - 48)

    monkeypatch.setattr(engine, "msi", rounded)
    more: dict[str, Any] = {"methods": ["center"], "controls": False, "leak": False}
    config = config_for(write_photos(tmp_path, 99), **more)
    results = run_small(config, tmp_path / "out", unit=99)
    msi = results.rows["center"]["msi"].to_numpy()
    wanted = choose({"center": msi})
    assert results.shown is not None
    assert 0 < len(results.shown.rows) < len(wanted)
    assert {*results.shown.rows} < {*wanted}
    assert list(results.record["shown"]) == results.names_of(results.shown.rows)
