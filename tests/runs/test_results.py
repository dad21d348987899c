"""Intervals, summaries and what is written to disk."""

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from pyarrow import parquet
from sufficit.results import save_scores, summarise
from torch import nn

from sufficit import Classifier, Scores, UserError, evaluate
from sufficit.files import writing
from sufficit.plots import curves_figure
from sufficit.provenance import provenance, save_json


@pytest.fixture
def scores() -> Scores:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3))
    return evaluate(Classifier(model), torch.rand(12, 3, 8, 8), torch.rand(12, 8, 8))


def test_a_summary_repeats_and_holds_the_mean(scores: Scores) -> None:
    summary = summarise(scores, seed=4)
    assert summary == summarise(scores, seed=4)
    for name, estimate in summary.items():
        assert estimate.mean == pytest.approx(scores[name].mean().item())
        assert estimate.low <= estimate.mean <= estimate.high
        assert (estimate.n, estimate.n_nan) == (12, 0)
    assert summary["msi"].higher_is_better
    assert not summary["deletion_pixel"].higher_is_better


def test_rows_and_curves_can_be_read_back(scores: Scores, tmp_path: Path) -> None:
    names = [f"{i}.png" for i in range(12)]
    save_scores(tmp_path, scores, names)
    frame = pandas.read_parquet(tmp_path / "scores.parquet")
    assert frame["image"].tolist() == names
    assert np.array_equal(frame["msi"], scores.msi.numpy())
    table = parquet.read_table(tmp_path / "curves.parquet")
    grids = json.loads(table.schema.metadata[b"grids"])
    stored = np.stack(table["insertion_pixel_confidence"].to_numpy())
    # The stored curve gives the column again.
    area = np.trapezoid(stored, grids["insertion_pixel"], axis=1)
    confident = evaluate_confidence(scores)
    assert area == pytest.approx(confident, abs=1e-6)
    assert grids["hide"][0] == scores.alpha_min


def evaluate_confidence(scores: Scores) -> np.ndarray:
    curve = scores.curves()["insertion_pixel"]
    return np.trapezoid(curve.confidence.numpy(), curve.grid, axis=1)


def test_json_has_null_for_nan_and_names_in_any_script(tmp_path: Path) -> None:
    save_json(tmp_path / "a.json", {"x": float("nan"), "名": [1.5, float("inf")]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None, "名": [1.5, None]}


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")

    def break_off() -> None:
        with writing(path) as part:
            part.write_text("half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        break_off()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"a\.txt could not be written: No space left"),
        writing(tmp_path / "a.txt"),
    ):
        raise OSError(28, "No space left on device")


def test_provenance_says_what_ran_where() -> None:
    run = provenance({"seed": 1}, torch.device("cpu"), torch.float32)
    assert run["config"] == {"seed": 1}
    assert run["versions"]["torch"] == torch.__version__.split("+")[0]
    assert run["device"]["type"] == "cpu"
    assert run["device"]["dtype"] == "torch.float32"


def test_the_search_panel_shows_negative_scores() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3))
    searched = evaluate(
        Classifier(model), torch.rand(6, 3, 8, 8), torch.rand(6, 8, 8), alpha_min="search"
    )
    assert searched.search is not None
    panel = curves_figure(searched).axes[5]
    low, high = panel.get_ylim()
    assert low < searched.search.means.min() < 0
    assert high > searched.search.means.max()
    assert panel.lines[0].get_ydata() == pytest.approx(searched.search.means.numpy())


def test_progress_is_told_while_one_group_is_scored() -> None:
    told: list[tuple[float, float]] = []
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3))
    images = torch.rand(3, 3, 8, 8)
    evaluate(
        Classifier(model), images, images[:, 0], batch_size=50,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    done = [share for share, _ in told]
    assert len(done) > 5
    assert done == sorted(done)
    assert told[-1] == (3, 3)
