"""The notebooks of docs/ run from top to bottom in a kernel, and are committed as they ran."""

from pathlib import Path

import nbformat
import pytest
import run_notebooks

QUICK = {
    "first-look": {"n": 2, "calls": 10},
    "own-method": {"n": 4, "step": 0.25},
    "train-lax": {"n": 33, "epochs": 1, "calls": 10},
}


def pictures(notebook: nbformat.NotebookNode) -> int:
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", ())]
    return sum("image/png" in one.get("data", {}) for one in outputs)


def tables(notebook: nbformat.NotebookNode) -> int:
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", ())]
    return sum("<table" in one.get("data", {}).get("text/html", "") for one in outputs)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the notebook's own libraries
@pytest.mark.parametrize("path", run_notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    found = run_notebooks.executed(path, tmp_path, **QUICK[path.stem])
    kept = nbformat.read(path, 4)
    assert [cell.source for cell in found.cells] == [cell.source for cell in kept.cells]
    assert pictures(found) == pictures(kept) > 1
    assert tables(found) == tables(kept) > 0
    assert path.stat().st_size < 1_000_000


@pytest.mark.parametrize("path", run_notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_it_ran(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [one for cell in code for one in cell.outputs]
    assert not [one for one in outputs if one.output_type == "error"]
    assert not any("/site-packages/" in str(one) or "/home/" in str(one) for one in outputs)
