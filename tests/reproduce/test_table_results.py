"""The files of a table: rows of seeds pooled, the paper's row below ours, the page of results."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sufficit.errors import UserError
from sufficit.reproduce.table_results import TableResults, seconds_in, table_lines
from sufficit.similarity import region_overlap


@pytest.fixture(scope="module")
def results(table: Path) -> TableResults:
    return TableResults.read(table)


def two_seeds(results: TableResults) -> TableResults:
    """The table as if the robust adapter were a second seed of the paper's recipe."""
    plan = replace(results.plan, recipes=("paper",), seeds=2)
    columns = {n: c for n, c in results.columns.items() if not n.startswith("lax")}
    first = results.columns["lax-paper-0"]
    columns |= {f"lax-paper-{s}": {c: v + 0.2 * s for c, v in first.items()} for s in (0, 1)}
    search = results.searched.record["search"]
    means = dict(search["mean_msi"])
    ramp = np.linspace(0, 1, len(search["alphas"]))
    means |= {"lax-paper-0": list(ramp), "lax-paper-1": list(ramp[::-1] + 0.5)}
    record = {**results.searched.record, "search": search | {"mean_msi": means}}
    searched = replace(results.searched, record=record)
    return replace(results, plan=plan, columns=columns, searched=searched)


def test_the_seeds_of_a_recipe_are_one_row(results: TableResults) -> None:
    changed, first = two_seeds(results), results.columns["lax-paper-0"]["msi"]
    assert {*changed.pooled} == {*results.plan.peers, "lax-paper", "random", "center"}
    np.testing.assert_allclose(changed.pooled["lax-paper"]["msi"], first + 0.1)
    np.testing.assert_allclose(changed.alpha_curves()["mean_msi"]["lax-paper"], 0.75)


def test_the_spread_of_the_seeds_is_in_the_summary(results: TableResults, tmp_path: Path) -> None:
    two_seeds(results).write(tmp_path, report=False)
    seeds = json.loads((tmp_path / "summary.json").read_text())["seeds"]["paper"]
    assert seeds["msi"][1] - seeds["msi"][0] == pytest.approx(0.2)
    assert seeds["sd"] == pytest.approx(0.2 / 2**0.5)
    assert not (tmp_path / "report.html").exists()


def test_the_table_has_the_papers_row_below_ours() -> None:
    names = ("insertion_pixel", "deletion_pixel", "insertion_percent", "deletion_percent")
    more = ("fid_minus_pixel", "fid_plus_pixel", "fid_minus_percent", "fid_plus_percent")
    columns = (*names, *more, "base_score", "mask_penalty", "msi", "leak_ratio")
    ours = {name: {"mean": 0.3, "low": 0.2, "high": 0.4} for name in columns}
    missing = ours | {"leak_ratio": {"mean": None}}
    lines = table_lines("cifar10", {"lax-robust": missing, "lax-paper": ours, "gradcam": ours})
    assert lines[0].startswith("| method | ins. px ↑ | del. px ↓ | ins. % ↑")
    assert lines[2].startswith("| Grad-CAM | 0.300 | 0.300 | 0.300 |")
    assert lines[2].endswith("| 0.20 .. 0.40 | 0.30 |")
    assert lines[3].startswith("| *paper* | *0.637* | *0.384* | *0.668* | *0.339* | *0.301* |")
    assert lines[4].startswith("| LAX, paper's recipe | 0.300 |")
    assert "*0.007*" in lines[5]
    assert lines[6].startswith("| LAX, robust recipe |")
    assert lines[6].endswith("| - |")
    assert len(lines) == 7, "the paper has no robust recipe"
    assert len({line.count("|") for line in lines}) == 1


def test_overlap_by_hand() -> None:
    maps = torch.tensor([[[0.9, 0.6], [0.2, 0.1]], [[0.0, 0.0], [0.0, 0.0]]])
    truth = torch.tensor([[[True, False], [True, False]], [[True, False], [False, False]]])
    assert region_overlap(maps, truth.float()).tolist() == pytest.approx([1 / 3, 0])
    nothing = torch.zeros(1, 2, 2)
    assert region_overlap(nothing, nothing).tolist() == [1]
    assert region_overlap(nothing, nothing, empty=0.0).tolist() == [0]


def test_a_corrupt_file_of_seconds_is_no_error(tmp_path: Path) -> None:
    for content in ("", "[]", '{"data": "long"}', '{"data": 1e999}'):
        (tmp_path / "seconds.json").write_text(content)
        assert seconds_in(tmp_path) in ({}, {"data": float("inf")})


def without(path: Path, *keys: str) -> None:
    """Take entries out of a JSON file."""
    found = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in found.items() if key not in keys}))


def forget_a_method(out: Path) -> None:
    record = out / "compare" / "run.json"
    found = json.loads(record.read_text())
    found["methods"].remove("layercam")
    record.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (forget_a_method, "incomplete or corrupt .*layercam"),
        (lambda out: without(out / "compare" / "run.json", "methods"), "run of another kind"),
        (lambda out: without(out / "classifier" / "trained.json", "data"), "corrupt .*'data'"),
        (lambda out: (out / "classifier" / "trained.json").write_text("[]"), "corrupt"),
        (lambda out: (out / "search" / "run.json").unlink(), "no finished run"),
    ],
)
def test_a_damaged_folder_is_one_error(
    table: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    shutil.copytree(table, tmp_path / "run", ignore=shutil.ignore_patterns("adapters", "results"))
    damage(tmp_path / "run")
    with pytest.raises(UserError, match=words):
        TableResults.read(tmp_path / "run")


def test_the_page_of_results_is_made_from_files(table: Path, tmp_path: Path) -> None:
    import results_tables

    shutil.copytree(table / "results", tmp_path / "synthetic-mnist")
    page = results_tables.page(tmp_path, results_tables.TEMPLATE.read_text())
    assert "{{" not in page
    assert page.count(results_tables.NOT_YET) == 3, "the three other tables"
    for line in (table / "results" / "table.md").read_text().splitlines():
        assert line in page
    assert "small-net at 64 px from random weights, trained for 2 epochs on 38 images" in page
    assert "![MSI over alpha_min](../results/synthetic-mnist/alpha.png)" in page
    summary = json.loads((table / "results" / "summary.json").read_text())
    gap = summary["methods"]["kpca-cam"]["msi"]["mean"] - 0.128
    assert f"KPCA-CAM {gap:+.3f}" in page
    with pytest.raises(SystemExit, match="the template asks for 'tabel'"):
        results_tables.page(tmp_path, "{{synthetic-mnist tabel}}")
