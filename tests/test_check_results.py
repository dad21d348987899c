"""The checker of the results page: it finds what is wrong, and what the page prints is right."""

import json
from pathlib import Path
from typing import Any

import check_results
import numpy as np
import pandas
import pytest
from check_results import Tables, decimals, is_right, loose, part_of, problems
from scipy.stats import ttest_rel

import results_page
from ledger import Ledger, Rows, half_width, text_of

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "paper" / "tables.toml"


def test_every_number_of_the_pages_is_that_of_its_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["check_results.py"])
    check_results.main()
    assert "numbers are those of the rows" in capsys.readouterr().out


def made(folder: Path, n: int = 40, commit: str | None = "abcdef0") -> Path:
    """A table of made-up rows: CIFAR-10, two CAMs, three trainings, two controls."""
    drawn = np.random.default_rng(0)
    place = folder / "cifar10"
    place.mkdir(parents=True)
    methods = {"gradcam": -0.15, "layercam": -0.5, "everything": 0.0, "center": -0.3}
    methods |= {f"lax-robust-{seed}": 0.2 + 0.01 * seed for seed in range(3)}
    rows = []
    for method, level in methods.items():
        for image in range(n):
            value = level + 0.3 * drawn.standard_normal()
            rows.append(
                {
                    "method": method,
                    "image": f"{image}.png",
                    "msi": value,
                    "msi_twin": value - 0.1 if image % 7 else np.nan,
                    "leak": float(image % 3 == 0),
                    "leak_chance": float(image % 4 == 0),
                    **dict.fromkeys(results_page.COLUMNS, value) | {"msi": value},
                }
            )
    pandas.DataFrame(rows).to_parquet(place / "rows.parquet", index=False)
    run: dict[str, Any] = {
        **{"table": "cifar10", "commit": commit, "n": n, "alpha_min": 0.4, "gpu_minutes": 3.25},
        "config": {"network": "small-resnet18", "weights": "none", "side": 32, "epochs": 2}
        | {"seeds": 3, "step": 0.01},
        "classifier": {"test_accuracy": 0.912, "test_images": n, "train_images": 99, "data": "x"},
        "device": {"name": "CPU", "dtype": "torch.float32"},
        "versions": {"torch": "2.11.0"},
    }
    (place / "run.json").write_text(json.dumps(run))
    return folder


TEMPLATE = (
    "{{all first}}\n\n{{all fails}}\n\n{{all against}}\n\n{{cifar10 setup}}\n\n"
    "{{cifar10 table}}\n\n{{cifar10 tests}}\n\n{{if cub200}}\nno birds\n{{end}}\n"
)


@pytest.fixture
def page(tmp_path: Path) -> tuple[str, list[dict[str, Any]], Path]:
    text, claims = results_page.page(made(tmp_path / "results"), TEMPLATE)
    return text, json.loads(json.dumps(claims)), tmp_path / "results"


def said(text: str, claims: list[dict[str, Any]], results: Path) -> list[str]:
    return [*problems(text, claims, Tables(results, PAPER))]


def test_a_page_of_made_up_rows_is_right(page: tuple[str, list[dict[str, Any]], Path]) -> None:
    text, claims, results = page
    assert said(text, claims, results) == []
    assert len(claims) > 60
    assert {one["kind"] for one in claims} == {
        *("mean", "half", "ratio", "fact", "paper", "training"),
        *("difference", "difference_half", "p"),
    }
    assert "no birds" not in text
    assert "Its lead over Grad-CAM goes from" in text
    assert "**No CAM reaches `everything`**" in text
    assert "91.2 % right" in text


def test_a_changed_number_is_found(page: tuple[str, list[dict[str, Any]], Path]) -> None:
    text, claims, results = page
    number = decimals(text)[5]
    wrong = text.replace(number, "0.77", 1)
    assert "number 6 of the page is 0.77" in said(wrong, claims, results)[0]
    assert "1 numbers have no claim" in said(text + "\nand 0.5\n", claims, results)[0]
    claims[5]["text"] = "0.77"
    assert any(one.startswith("0.77 is ") for one in said(wrong, claims, results))


def test_changed_rows_and_a_missing_commit_are_found(
    page: tuple[str, list[dict[str, Any]], Path],
) -> None:
    text, claims, results = page
    path = results / "cifar10" / "rows.parquet"
    rows = pandas.read_parquet(path)
    rows.loc[rows["method"] == "gradcam", "msi"] += 0.1
    rows.to_parquet(path, index=False)
    assert any("'method': 'gradcam', 'column': 'msi'" in one for one in said(text, claims, results))
    facts = results / "cifar10" / "run.json"
    for commit in (None, "abcdef0+changes"):
        facts.write_text(json.dumps(json.loads(facts.read_text()) | {"commit": commit}))
        assert any("run.json has no commit" in one for one in said(text, claims, results))
        assert not Rows(results / "cifar10").is_complete
    assert results_page.page(results, "{{cifar10 setup}}")[0].strip() == results_page.NOT_YET


def test_numbers_are_those_of_scipy(tmp_path: Path) -> None:
    ledger = Ledger(made(tmp_path))
    rows = ledger.rows("cifar10")
    one, two = (rows.values(name, "msi") for name in ("lax-robust", "gradcam"))
    frame = rows.frame[rows.frame.method.str.startswith("lax-robust")]
    assert one["3.png"] == pytest.approx(frame[frame.image == "3.png"].msi.mean())
    p = ttest_rel(one, two).pvalue
    text = ledger.difference(rows, "lax-robust", "gradcam", "msi")
    gap = one - two
    assert text.startswith(f"{gap.mean():+.2f} ±{half_width(gap.to_numpy()):.2f} (p ")
    tables = Tables(tmp_path, PAPER)
    assert check_results.computed(ledger.claims[-1], tables) == pytest.approx(p, rel=1e-9)
    same = ledger.difference(rows, "gradcam", "gradcam", "msi")
    assert same == "+0.00 ±0.00 (p = 1.000)".replace("+0.00", text_of(0.0, 2, sign=True))
    assert not [*problems(" ".join([text, same]), ledger.claims, tables)]
    assert ledger.mean(rows, "nobody", "msi") == "-"
    assert ledger.estimate(rows, "gradcam", "msi_rank") == "-"


def test_rounding_is_half_a_last_digit() -> None:
    claim = {"text": "0.25", "kind": "mean", "digits": 2}
    assert is_right(claim, 0.2549)
    assert is_right(claim, 0.245)
    assert not is_right(claim, 0.2551)
    assert is_right({"text": "0.001", "kind": "p", "digits": 3}, 1e-9)
    assert not is_right({"text": "0.002", "kind": "p", "digits": 3}, 1e-9)


def test_numbers_without_rows_are_listed(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(
        "a 0.5\n<!-- results: first -->\n| 0.25 |\n<!-- end of results -->\n"
        "```\n0.7\n```\n`0.9` b\nand -0.125 more\n"
    )
    assert loose(page) == ["README.md:1: 0.5", "README.md:9: -0.125"]
    assert decimals(part_of(page.read_text())) == ["0.25"]


def test_readme_gets_the_first_table_where_it_has_a_place(tmp_path: Path) -> None:
    part, claims = results_page.readme_part(made(tmp_path))
    text = f"before\n{results_page.README_START}\nold 0.1\n{results_page.README_END}\nafter 0.5\n"
    filled = results_page.in_readme(text, part)
    assert "old" not in filled
    assert "](docs/results.md#cifar-10-cnn)" in filled
    assert said(part_of(filled), json.loads(json.dumps(claims)), tmp_path) == []
    assert results_page.in_readme("no place 0.5", part) == "no place 0.5"
