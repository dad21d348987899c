"""The tables of the documentation are made from the JSON of measurements."""

import json
from pathlib import Path
from typing import Any

import measured_tables
import pytest
import results_tables


def estimate(mean: float | None, half: float = 0.1) -> dict[str, Any]:
    ends = (None, None) if mean is None else (mean - half, mean + half)
    return {"mean": mean, "low": ends[0], "high": ends[1]}


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def reference() -> dict[str, Any]:
    def method(msi: float, ratio: float | None) -> dict[str, Any]:
        return {
            "msi": estimate(msi), "msi_held_out": estimate(msi - 0.1),
            "msi_twin": estimate(msi - 0.2), "mask_penalty": estimate(0.3),
            "leak_ratio": estimate(ratio), "iou": estimate(0.25), "pointing": estimate(0.5),
        }  # fmt: skip

    cost = {"calls": 3.0, "seconds": 0.0025}
    return {
        "n": 500, "calls": 26, "alpha_min": 0.4, "commit": "0123456789",
        "config": {"cost_images": 16},
        "device": {"name": "NVIDIA H200", "dtype": "torch.bfloat16"},
        "words": {"gradcam": "gradcam", "rise": "rise:masks=300"},
        "cost": {"gradcam": cost, "rise": cost | {"calls": 300.0}, "lrp": {"failed": "no"}},
        "methods": {"rise": method(0.5, 1.25), "gradcam": method(-0.125, None)},
        "conditions": [
            {"key": "", "ranking": ["rise", "gradcam"]},
            {"key": "held_out", "masks": 8},
            {"key": "twin"},
        ],
        "rank_correlations": [
            {"first": "", "second": "held_out", "spearman": 0.5},
            {"first": "", "second": "twin", "spearman": None},
            {"first": "held_out", "second": "twin", "spearman": 0.9},
        ],
    }  # fmt: skip


def test_a_row_of_the_reference_comparison(tmp_path: Path) -> None:
    assert measured_tables.reference("cifar10", tmp_path) == ""
    assert measured_tables.reference_figure("cifar10", tmp_path) is None
    write(tmp_path / "reference" / "cifar10.json", reference())
    lines = measured_tables.reference("cifar10", tmp_path).splitlines()
    row = "0.500 ± 0.10 | 0.400 | 0.300 | - | 0.300 | 1.25 | 0.25 | 0.50 | 300 | 2.5 |"
    assert lines[2] == f"| `rise` | {row}"
    row = "-0.125 ± 0.10 | -0.225 | -0.325 | - | 0.300 | - | 0.25 | 0.50 | 3 | 2.5 |"
    assert lines[3] == f"| Grad-CAM | {row}"
    assert "500 test images, 26 masks per image and method (8 with blur)" in lines[-1]
    assert "bfloat16, commit 0123456. MSI" in lines[-1]
    assert "to explain, 16 at a time" in lines[-1]
    assert "Smaller budgets than the defaults: `rise:masks=300`." in lines[-1]
    assert "Failed, and left out: lrp." in lines[-1]
    assert lines[-1].endswith("Rank correlation with the order above: with blur 0.50.")
    page = results_tables.page(tmp_path, "{{cifar10 reference}}")
    assert page.startswith("### All methods\n")
    assert page.endswith("(../results/reference/cifar10.png)\n")
    assert (tmp_path / "reference" / "cifar10.png").stat().st_size > 10_000


def test_how_alike_the_orders_of_methods_are(tmp_path: Path) -> None:
    assert measured_tables.orders(tmp_path) == ""
    write(tmp_path / "reference" / "cifar10.json", reference())
    page = results_tables.page(tmp_path, "{{all orders}}")
    assert page.splitlines()[2:] == ["| CIFAR-10, ResNet18 | 2 | 0.50 | - | 0.90 |"]


def test_how_far_scores_hang_on_the_fill_for_model_and_twin(tmp_path: Path) -> None:
    assert measured_tables.twins(tmp_path) == ""
    means = {"": 0.1, "_blur": 0.3, "_noise": 0.2, "_mean_fill": 0.15}
    columns = {f"msi{end}": estimate(v) for end, v in means.items()}
    columns |= {f"msi_twin{end}": estimate(v / 10) for end, v in means.items()}
    accuracies = {"original": {"masked_accuracy": 0.5}, "twin": {"masked_accuracy": 0.75}}
    found = {
        "methods": {"gradcam": columns, "center": columns | {"msi": estimate(-9)}},
        "conditions": [
            {"key": "", "ranking": ["gradcam"]},
            {"key": "twin", "ranking": ["kpca-cam"]},
        ],
        "rank_correlations": [{"first": "", "second": "twin", "spearman": 0.25}],
        "twin": {"test_accuracy": {"model": 0.9, "twin": 0.8}, **accuracies},
    }
    write(tmp_path / "twins" / "cub200.json", found)
    (row,) = measured_tables.twins(tmp_path).splitlines()[2:]
    accuracy = "90.0% | 80.0% | 50.0% | 75.0%"
    assert row == f"| CUB-200, ResNet50 | {accuracy} | 0.200 | 0.020 | 0.25 | Grad-CAM | KPCA-CAM |"
    assert "0.100 | 0.300" in measured_tables.twin_orders("cub200", tmp_path)


def test_columns_are_sorted_by_the_share_of_pairs_in_order(tmp_path: Path) -> None:
    kinds = {"noise": 1.0, "shift": 0.75, "erode": 0.5, "dilate": 0.25}
    checks = [
        {"column": column, "kind": kind, "by_mean": estimate(mean), "by_image": estimate(0.6)}
        for column, whole in (("msi", 0.625), ("iou", 0.875))
        for kind, mean in {**kinds, "all": whole}.items()
    ]
    write(tmp_path / "check" / "cub200.json", {"n": 100, "checks": checks})
    text = measured_tables.check("cub200", tmp_path)
    assert text.startswith(
        "## CUB-200, ResNet50\n\n100 test images, the truth (the box of the bird)"
    )
    first, second = text.splitlines()[-2:]
    assert first == "| `iou` | 0.88 | 0.78 to 0.97 | 1.00 | 0.75 | 0.50 | 0.25 | 0.60 |"
    assert second.startswith("| `msi` | 0.62 | 0.53 to 0.72 |")


def test_an_interval_that_is_not_known_is_not_written(tmp_path: Path) -> None:
    mean = estimate(0.5) | {"low": None}
    checks = [
        {"column": "msi", "kind": kind, "by_mean": mean, "by_image": mean}
        for kind in ("noise", "shift", "erode", "dilate", "all")
    ]
    write(tmp_path / "check" / "cub200.json", {"n": 100, "checks": checks})
    row = measured_tables.check("cub200", tmp_path).splitlines()[-1]
    assert row.startswith("| `msi` | 0.50 | - | 0.50 |")


def test_a_row_for_every_adapter(tmp_path: Path) -> None:
    assert measured_tables.adapters(tmp_path) == ""
    one = {
        "arm": "robust", "seed": 3, "config": {"epochs": 12, "images": 1000}, "msi": 0.25,
        "time": "2026-11-18T02:00:21+0000", "msi_smoothed": 0.0625,
        "msi_blur": 0.5, "msi_blur_twin": -0.125, "mask_penalty": 0.375, "leak_ratio": 1.25,
        "grid_energy": 2.0, "grid_energy_smoothed": 1.5, "fragments_mean": 0.75,
    }  # fmt: skip
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "cub200.json").write_text(json.dumps([one]))
    (row,) = measured_tables.adapters(tmp_path).splitlines()[2:]
    scores = "0.250 | 0.500 | - | -0.125 | 0.062 | 0.375 | 1.25 | 2.00 (1.50) | 0.75"
    assert row == f"| CUB-200, ResNet50, `robust`, 3 | 18 | 12 | 1,000 | {scores} |"


def test_ways_to_an_interval(tmp_path: Path) -> None:
    spent = {"images": 1234.4, "calls": 34567.8, "seconds": 5.25, "column": "msi", "mean": 0.1}
    one = {"columns": ["msi", "base_score"], "calls_per_image": 25.9, "all its columns": spent}
    write(tmp_path / "certainty-cpu.json", {"results": {"26 calls": one}})
    found = measured_tables.certainty("Small_net=cpu", "Other=gpu", results=tmp_path)
    (row,) = found.splitlines()[2:]
    assert row == "| Small net: 26 calls | 2 | 26 | 1,234 | 34,568 | 5.2 |"


def test_a_page_keeps_its_text_and_gets_its_places_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measured_tables.PLACES, "twice", lambda word="": word * 2)
    start, end = "<!-- measured: twice ab -->", "<!-- end of measured -->"
    text = f"before\n{start}\nold\nlines\n{end}\nbetween\n<!-- measured: twice -->\n{end}\nafter\n"
    filled = measured_tables.filled(text)
    assert filled == text.replace("old\nlines", "\nabab\n")
    assert measured_tables.filled(filled) == filled
    with pytest.raises(SystemExit, match="the page asks for 'thrice'"):
        measured_tables.filled(text.replace("twice ab", "thrice"))


@pytest.mark.parametrize("page", measured_tables.PAGES)
def test_the_pages_are_those_of_the_results(page: str) -> None:
    text = (measured_tables.ROOT / page).read_text()
    assert measured_tables.filled(text) == text, "run python tools/measured_tables.py"
