"""The control `everything` marks the whole image: its MSI is the zero line, and nearly free."""

from typing import Any

import numpy as np
import pytest
import torch

from report_content import Quarters, quarters
from sufficit import Classifier, compare, evaluate
from sufficit.metrics.columns import COLUMNS
from sufficit.plots import sizes_figure
from sufficit.runs.results import RunResults

N = 8
BY_RANK = [name for name in COLUMNS if name.endswith("percent")]
BY_VALUE = [name for name in COLUMNS if name not in BY_RANK]


def brightness(classifier: Classifier, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return images.mean(1)


def run(**options: Any) -> RunResults:
    images, targets = quarters(N)
    given: dict[str, Any] = {"checks": ("controls", "leak", "fill"), "donors": 2, **options}
    model = Classifier(Quarters())
    return compare(model, images, {"bright": brightness}, targets, progress=False, **given)


@pytest.fixture(scope="module")
def exact() -> RunResults:
    return run(calls="exact")


def test_its_value_is_known_by_hand(exact: RunResults) -> None:
    # The model takes a black image for class 0: there the rest of a map of ones suffices too, and
    # the base score is 0. Elsewhere it is 1 but for the last point of the grid, of 101.
    msi = exact.rows["everything"]["msi"].to_numpy()
    target = exact.rows["everything"]["target"].to_numpy()
    assert msi == pytest.approx(np.where(target == 0, -1, -0.01))
    assert exact.content().zero_line == pytest.approx(msi.mean())


def test_columns_by_value_are_those_of_a_map_of_ones_and_cost_nothing(exact: RunResults) -> None:
    images, targets = quarters(N)
    ones = torch.ones(N, *images.shape[2:])
    wanted = evaluate(Classifier(Quarters()), images, ones, targets, progress=False).frame()
    rows = exact.rows["everything"]
    for name in BY_VALUE:
        assert rows[name].to_numpy() == pytest.approx(wanted[name].to_numpy(), abs=1e-6), name
    # One pass for the held-out fill, whose masks are drawn: the empty image is not among all.
    assert rows["calls"].tolist() == [1] * N


def test_columns_by_rank_and_the_leak_are_empty(exact: RunResults) -> None:
    rows = exact.rows["everything"]
    assert rows[[*BY_RANK, "msi_rank"]].isna().all(axis=None)
    assert not any(name.startswith("leak") for name in rows.columns)
    assert "leak_ratio" in exact.summaries["bright"]
    assert "leak_ratio" not in exact.summaries["everything"]


def test_where_masks_are_sampled_it_is_exact_for_one_pass(exact: RunResults) -> None:
    sampled = run(calls=26, checks="controls")
    rows = sampled.rows["everything"]
    assert rows["msi"].to_numpy() == pytest.approx(exact.rows["everything"]["msi"].to_numpy())
    assert rows["calls"].tolist() == [1] * N


def test_figures_draw_it(exact: RunResults) -> None:
    figure = exact.plot("sizes")
    words = [text.get_text() for text in figure.axes[0].texts]
    assert "zero line" in words
    names = [line.get_label() for line in exact.plot("sizes").axes[0].lines]
    assert "everything (zero line)" in names
    plain = sizes_figure({"bright": exact.summaries["bright"]})
    assert "zero line" not in [text.get_text() for text in plain.axes[0].texts]
