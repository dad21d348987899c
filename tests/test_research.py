"""The tables of the laboratory's pages and of the results page are those of the rows."""

import json
from pathlib import Path

import pytest

import fill_tables
import results_page

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", fill_tables.PAGES)
def test_a_pages_tables_are_those_of_the_rows(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- measured: " in text
    assert fill_tables.filled(text) == text, "run python research/fill_tables.py"


@pytest.mark.slow
def test_the_results_page_is_that_of_the_rows() -> None:
    made, claims = results_page.page(ROOT / "results", results_page.TEMPLATE.read_text())
    assert (ROOT / "docs" / "results.md").read_text() == made, "run python paper/results_page.py"
    stored = json.loads((ROOT / "results" / results_page.CLAIMS).read_text())
    assert stored["page"] == json.loads(json.dumps(claims)), "run python paper/results_page.py"
    readme = (ROOT / "README.md").read_text()
    assert results_page.in_readme(readme, results_page.readme_part(ROOT / "results")[0]) == readme


def test_a_page_keeps_its_text_and_gets_its_places_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fill_tables.PLACES, "twice", lambda word="": word * 2)
    start, end = "<!-- measured: twice ab -->", "<!-- end of measured -->"
    text = f"before\n{start}\nold\nlines\n{end}\nbetween\n<!-- measured: twice -->\n{end}\nafter\n"
    filled = fill_tables.filled(text)
    assert filled == text.replace("old\nlines", "\nabab\n")
    assert fill_tables.filled(filled) == filled
    with pytest.raises(SystemExit, match="the page asks for 'thrice'"):
        fill_tables.filled(text.replace("twice ab", "thrice"))


def test_an_arm_is_a_row_of_means_over_its_seeds(tmp_path: Path) -> None:
    one = {"task": "cifar10", "arm": "robust", "base_score": 0.5, "mask_penalty": 0.25}
    rows = [
        {**one, "msi": 0.25, "leak": 0.03, "leak_chance": 0.02, "leak_ratio": 1.5},
        {**one, "msi": 0.125, "leak": 0.01, "leak_chance": 0.02, "leak_ratio": 0.5},
    ]
    (tmp_path / "lax").mkdir()
    (tmp_path / "lax" / "some.json").write_text(json.dumps({"rows": rows}))
    cells = "0.500 | 0.250 | 0.188 (0.250, 0.125) | 0.020 | 0.020 | 1.00 (1.50, 0.50) |"
    assert fill_tables.arms("some", tmp_path).splitlines()[2] == f"| cifar10 | robust | 2 | {cells}"
