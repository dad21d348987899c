"""Bands of heatmaps: ranks and runs by one sort are those of each alone."""

import pytest
import torch

from sufficit.perturbation.bands import (
    all_but_top,
    at_least,
    hide,
    ranks,
    ranks_and_runs,
    rest,
    runs,
    show,
    top,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_sort_gives_the_same_ranks_and_runs(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    maps = (torch.rand(4, 9, 7, generator=random, dtype=dtype) * 20).round() / 20  # with ties
    bands = [show(0.2), rest(0.55), hide(0.2, 0.5), at_least(0.5), top(0.3), all_but_top(0.3)]
    places, spans = ranks_and_runs(maps, bands)
    assert torch.equal(places, ranks(maps))
    assert torch.equal(spans, runs(maps.float(), bands))
