"""MSI over alpha_min, on a sample of the images."""

import numpy as np
import pytest
import torch
from sufficit.metrics.plan import coarse, make_plan, msi_by_method, spread

from reference import heatmaps_like, small_net
from sufficit import Classifier, evaluate

SIZE = (8, 6)


def test_some_of_all_rows_are_spread_evenly() -> None:
    assert spread(1000, 4) == (0, 250, 500, 750)
    for n in range(1, 60):
        rows = spread(n)
        assert len(set(rows)) == len(rows) == min(n, 16)
        assert set(np.diff(rows)) <= {n // 16, n // 16 + 1}
        assert 0 == rows[0] <= rows[-1] < n


def test_the_step_of_the_curves_is_never_finer_than_that_of_the_run() -> None:
    assert coarse(0.01) == 0.05
    assert coarse(0.25) == 0.25


@pytest.mark.parametrize("score", ["accuracy", "confidence"])
def test_the_curves_are_those_of_a_search_per_method(score: str) -> None:
    images = torch.rand(5, 3, *SIZE, generator=torch.Generator().manual_seed(2))
    targets = torch.arange(5) % 3
    maps = {kind: heatmaps_like(kind, 5, SIZE) for kind in ("random", "tied", "saturated")}
    classifier, told = Classifier(small_net(seed=2)), []
    plan = make_plan("search", score, 0.1, columns=["msi"])
    found, spent = msi_by_method(
        classifier, images, maps, targets, plan, fill="mean", batch_size=7,
        tick=lambda done, total: told.append(done / total),
    )  # fmt: skip
    calls = 0
    for method, heatmaps in maps.items():
        wanted = evaluate(
            classifier, images, heatmaps, targets, alpha_min="search", value_step=0.1,
            columns=["msi"], score=score, fill="mean",
        )  # fmt: skip
        assert tuple(s.alpha_min for s in plan.schedules) == wanted.search.alphas
        torch.testing.assert_close(found[method], wanted.search.msi, rtol=0, atol=1e-6)
        calls += int(wanted.calls.sum())
    assert spent == calls
    assert told == sorted(told)
    assert told[-1] == 1
