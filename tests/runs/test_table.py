"""The end of a run: units become rows, curves, means, tests and images to show."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
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
from sufficit.provenance import plain
from sufficit.runs import groups, table
from sufficit.runs.config import write_toml
from sufficit.runs.results import RunResults
from sufficit.runs.rows import StoredRows
from sufficit.runs.search import best_alpha
from sufficit.runs.store import Store
from sufficit.sources import sources_of
from sufficit.statistics import Chance, compare_values, estimates_of


def test_means_and_tests_are_those_of_the_rows(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    results = run_small(config_for(photos, seed=4), out)
    summary = json.loads((out / "summary.json").read_text())
    names = ("gradcam", "layercam", "everything", "random", "center")
    msi = {m: rows(out, m)["msi"].to_numpy() for m in names}
    for method in results.methods:
        assert summary[method]["msi"]["mean"] == pytest.approx(rows(out, method)["msi"].mean())
    expected = compare_values(msi, seed=4, controls=names[2:])
    assert results.standing == expected
    assert len(expected.pairs) == 7, "two methods, and each of them with three controls"
    assert summary["standing"]["ranking"] == list(expected.ranking)
    pairs = pandas.read_csv(out / "pairs.csv")
    pairs = pairs[pairs["column"] == "msi"]
    assert pairs["p_corrected"].tolist() == [pair.p_corrected for pair in expected.pairs]
    assert pairs["seed"].tolist() == [4] * 7
    ranked = [*expected.ranking, "everything", "random", "center"]
    assert results.record.methods == ranked
    assert results.record.controls == ["everything", "random", "center"]


@pytest.mark.parametrize("alpha_min", [0.5, "search"])
def test_units_merged_one_by_one_give_what_they_give_together(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alpha_min: Any
) -> None:
    config = config_for(photos, seed=4, alpha_min=alpha_min, save_heatmaps=True)
    together = run_small(config, tmp_path / "together")
    monkeypatch.setattr(groups, "TOGETHER", 1)
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
    for key in ("shown", "alpha_curve", "search", "model_calls", "leak_ratio", "n"):
        assert plain(getattr(together.record, key)) == plain(getattr(alone.record, key)), key


def test_stored_curves_give_the_columns_again(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_small(config_for(photos, checks="controls", score="confidence"), tmp_path / "out")
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
    monkeypatch.setattr(groups, "TOGETHER", 1)  # per unit
    run_small(config_for(photos, checks="controls", score="confidence"), tmp_path / "small")
    again = parquet.read_table(tmp_path / "small" / "gradcam" / "curves.parquet")
    assert again.equals(table)
    path = tmp_path / "small" / "gradcam" / "curves.parquet"
    assert parquet.read_metadata(path).num_row_groups == 3


def test_controls_have_no_part_in_the_search() -> None:
    alphas = (0.2, 0.4, 0.6)
    a, b, control = (0.5, 0.4, 0.0), (0.0, 0.4, 0.5), (0.0, 0.0, 9.0)
    assert best_alpha(alphas, [a, b]) == 0.4
    assert [best_alpha(alphas, [one]) for one in (a, b, control)] == [0.2, 0.6, 0.6]
    assert best_alpha(alphas, [a, b, control]) == 0.6
    assert best_alpha(alphas, [(0.1, 0.3, 0.3)]) == 0.4, "the smaller of two"
    assert best_alpha(alphas, [(math.nan, 0.1, 0.0)]) == 0.4, "an unknown mean is no best one"


def test_references_are_scored_and_not_ranked(photos: Path, tmp_path: Path) -> None:
    config = config_for(photos, checks="controls")
    (third,) = sources_of({"kpca-cam": "kpca-cam"}, controls=False)
    sources = [*sources_of(config.methods), replace(third, role="reference")]
    results = run_small(config, tmp_path / "out", sources=sources)
    assert results.standing is not None
    assert set(results.standing.ranking) == {"gradcam", "layercam"}
    assert results.unranked == ("everything", "random", "center", "kpca-cam")
    assert results.controls == ("everything", "random", "center")
    assert "msi" in results.summaries["kpca-cam"]


def test_saved_heatmaps_are_those_that_were_scored(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    results = run_small(config_for(photos, save_heatmaps=True, checks="controls"), out)
    names = [image.name for image in list_images(photos)]
    kept = results.heatmaps(range(11), results.methods)
    for method in results.methods:
        with HeatmapFile(out / method / "heatmaps.npz") as maps:
            assert [*maps.keys] == names
            for name, expected in zip(names, kept[method], strict=True):
                assert torch.equal(maps.read(name), expected)


def test_the_images_shown_are_chosen_by_the_runs_msi(tmp_path: Path) -> None:
    photos = write_photos(tmp_path, 40)
    results = run_small(config_for(photos, checks="controls", seed=2), tmp_path / "out", unit=9)
    msi = {m: results.rows[m]["msi"].to_numpy() for m in ("gradcam", "layercam")}
    expected = choose(msi, seed=2)
    assert results.record.shown == {results.names[row]: why for row, why in expected.items()}
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
    config = config_for(photos, checks="controls", alpha_min=alpha_min)
    results = run_small(config, tmp_path / "out", unit=9)
    assert results.shown is not None
    msi = {m: results.rows[m]["msi"].to_numpy() for m in ("gradcam", "layercam")}
    assert dict(zip(results.shown.rows, results.shown.reasons, strict=True)) == choose(msi)


def test_classes_without_names_are_called_by_their_folders(photos: Path, tmp_path: Path) -> None:
    from sufficit import Classifier

    made = Classifier.load(config_for(photos).model)
    nameless = Classifier(made.model, layer=made.layer)
    results = run_small(
        config_for(photos, checks="controls"), tmp_path / "out", classifier=nameless
    )
    assert results.record.class_names == ["ant", "bee", "cat"]
    assert results.class_names([0, 10]) == ["ant", "cat"]


def test_the_end_of_a_run_reads_all_rows_twice(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once to choose what all images choose together, once to write."""
    whole, reads = Store.read, Counter[tuple[int, bool]]()

    def read(self: Store, unit: int, *, answers: bool = False) -> Any:
        reads[unit, answers] += 1
        return whole(self, unit, answers=answers)

    monkeypatch.setattr(Store, "read", read)
    monkeypatch.setattr(table, "write_shown", lambda *_: {})
    run_small(config_for(photos, checks="controls"), tmp_path / "out")
    assert reads == {(unit, answers): 1 for unit in range(3) for answers in (False, True)}


def test_runs_of_more_images_than_groups_have_the_intervals_of_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = write_photos(tmp_path, 40)
    single = run_small(config_for(photos, seed=3), tmp_path / "single", unit=9)
    monkeypatch.setattr(sums, "GROUPS", 25)
    grouped = run_small(config_for(photos, seed=3), tmp_path / "grouped", unit=9)
    names = ("gradcam", "layercam", "everything", "random", "center")
    msi = {m: grouped.rows[m]["msi"].to_numpy() for m in names}
    assert grouped.standing == compare_values(msi, seed=3, controls=names[2:])
    assert grouped.standing != single.standing
    headings = grouped.headings
    for method in single.methods:
        columns = {c: grouped.rows.column(method, c) for c in grouped.rows.columns(method)}
        numbers = np.arange(40)
        own = sums.Sums([*columns], seed=3)
        own.add(numbers, columns)
        expected = estimates_of(
            own,
            {name: headings[name].higher_is_better for name in columns},
            Chance(3),
            lambda name: headings[name].limits,
        )
        known = {c: one for c, one in grouped.summaries[method].items() if c in columns}
        assert plain(known) == plain(expected)
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
    whole = run_small(config_for(photos, checks="controls"), tmp_path / "whole")
    assert list(whole.skipped) == names
    listed = pandas.read_csv(tmp_path / "whole" / "skipped.csv")
    assert listed["image"].tolist() == names
    assert listed["reason"].tolist() == list(whole.skipped.values())
    monkeypatch.setattr(table, "NAMED", 2)
    config = tmp_path / "RUN.toml"
    write_toml(config, config_for(photos, checks="controls"))
    told = sufficit("compare", "--config", config, "--out", tmp_path / "out")
    assert "3 images skipped; skipped.csv names all of them." in told.err
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["n_skipped"], [one["name"] for one in record["skipped"]]) == (3, names[:2])
    assert len(pandas.read_csv(tmp_path / "out" / "skipped.csv")) == 3
    assert "3 skipped" in (tmp_path / "out" / "report.html").read_text()


def test_a_report_of_many_images_reads_only_the_rows_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_small(config_for(write_photos(tmp_path, 40), checks="controls"), tmp_path / "out", unit=9)

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
