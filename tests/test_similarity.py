"""Likeness of heatmaps against scipy, torchmetrics, and answers known by hand."""

import math
import warnings
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.stats import ConstantInputWarning, spearmanr
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from reference import HEATMAPS, heatmaps_like
from sufficit import UserError, similarity
from sufficit.similarity import (
    agreement,
    estimate,
    rank_correlation,
    region_overlap,
    structural_similarity,
)

FLAT = {"zeros", "ones", "half"}


def by_scipy(first: Tensor, second: Tensor) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        pairs = zip(first.flatten(1).numpy(), second.flatten(1).numpy(), strict=True)
        return [float(spearmanr(a, b).statistic) for a, b in pairs]


def overlap_by_sets(first: Tensor, second: Tensor, alpha: float) -> float:
    ours, theirs = (
        {place for place, value in np.ndenumerate(m.numpy()) if value > np.float32(alpha)}
        for m in (first, second)
    )
    return len(ours & theirs) / len(ours | theirs) if ours | theirs else 1.0


@pytest.mark.parametrize("kind", HEATMAPS)
@pytest.mark.parametrize("other", ["random", "tied", "zeros"])
def test_rank_correlation_is_scipys(kind: str, other: str) -> None:
    first, second = heatmaps_like(kind, 4, (9, 7)), heatmaps_like(other, 4, (9, 7), seed=5)
    found = rank_correlation(first, second).numpy()
    np.testing.assert_allclose(found, by_scipy(first, second), atol=1e-12, equal_nan=True)
    assert np.isnan(found).all() == (kind in FLAT or other in FLAT)


def test_equal_maps_correlate_to_one_exactly_and_turned_ones_to_minus_one() -> None:
    maps = heatmaps_like("on_the_grid", 5, (40, 31))
    assert rank_correlation(maps, maps).tolist() == [1.0] * 5
    assert rank_correlation(maps, -maps).tolist() == [-1.0] * 5


def test_one_constant_map_leaves_the_other_images_alone() -> None:
    first, second = heatmaps_like("random", 3, (5, 5)), heatmaps_like("random", 3, (5, 5), seed=1)
    first[1] = 0.25
    found = rank_correlation(first, second)
    assert found.isnan().tolist() == [False, True, False]
    assert estimate(found).n == 2
    assert estimate(found).n_nan == 1
    assert estimate(found).mean == pytest.approx(float((found[0] + found[2]) / 2))


@pytest.mark.parametrize("kind", HEATMAPS)
@pytest.mark.parametrize("size", [(6, 6), (11, 17), (40, 23)])
def test_ssim_is_torchmetrics(kind: str, size: tuple[int, int]) -> None:
    first, second = heatmaps_like(kind, 3, size), heatmaps_like("saturated", 3, size, seed=9)
    expected = structural_similarity_index_measure(
        first[:, None].double(), second[:, None].double(), data_range=1.0, reduction="none"
    )
    found = structural_similarity(first, second)
    np.testing.assert_allclose(found, expected, atol=1e-10)
    assert structural_similarity(first, first).tolist() == pytest.approx([1.0] * 3)


def test_maps_too_small_for_the_window_have_no_ssim() -> None:
    maps = heatmaps_like("random", 2, (5, 20))
    assert structural_similarity(maps, maps).isnan().all()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("kind", HEATMAPS)
def test_overlap_of_regions_is_that_of_sets_of_pixels(kind: str, alpha: float) -> None:
    first, second = heatmaps_like(kind, 3, (6, 5)), heatmaps_like("on_the_grid", 3, (6, 5), seed=2)
    expected = [overlap_by_sets(a, b, alpha) for a, b in zip(first, second, strict=True)]
    assert region_overlap(first, second, alpha).tolist() == expected


def test_two_empty_regions_agree_and_an_empty_one_overlaps_with_nothing() -> None:
    empty, full = torch.full((1, 2, 2), 0.5), torch.ones(1, 2, 2)
    assert region_overlap(empty, empty).tolist() == [1.0]
    assert region_overlap(empty, full).tolist() == [0.0]


def test_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = torch.stack([heatmaps_like("tied", 7, (8, 8), seed=s) for s in range(3)])
    whole = agreement(maps, 0.3)
    ranks = rank_correlation(maps[0], maps[1])
    monkeypatch.setattr(similarity, "_GROUP_ELEMENTS", 130)  # two images at a time
    parts = agreement(maps, 0.3)
    assert torch.equal(ranks, rank_correlation(maps[0], maps[1]))
    assert torch.equal(whole.rank_correlation, parts.rank_correlation)
    assert torch.equal(whole.iou, parts.iou)
    torch.testing.assert_close(whole.ssim, parts.ssim, rtol=0, atol=1e-12)


def test_agreement_is_the_mean_over_pairs_of_seeds() -> None:
    maps = [heatmaps_like("saturated", 4, (9, 8), seed=seed) for seed in range(4)]
    found = agreement(maps, alpha_min=0.4)
    for i in range(4):
        pairs = [(a[i], b[i]) for a, b in combinations(maps, 2)]
        assert len(pairs) == 6
        ranks = [by_scipy(a[None], b[None])[0] for a, b in pairs]
        overlaps = [overlap_by_sets(a, b, 0.4) for a, b in pairs]
        ssims = [float(structural_similarity(a[None], b[None])) for a, b in pairs]
        assert float(found.rank_correlation[i]) == pytest.approx(np.mean(ranks))
        assert float(found.iou[i]) == pytest.approx(np.mean(overlaps))
        assert float(found.ssim[i]) == pytest.approx(np.mean(ssims))
    assert torch.equal(agreement(torch.stack(maps), 0.4).iou, found.iou)


def test_agreement_comes_with_intervals_and_counts_what_has_no_value() -> None:
    maps = torch.stack([heatmaps_like("random", 6, (8, 8), seed=seed) for seed in range(3)])
    maps[1, 2] = 0
    summary = agreement(maps).summary()
    assert list(summary) == ["rank_correlation", "ssim", "iou"]
    rank = summary["rank_correlation"]
    assert (rank.n, rank.n_nan) == (5, 1)
    assert rank.low < rank.mean < rank.high
    assert summary["ssim"].n == 6
    same = agreement([maps[0], maps[0]]).summary()
    assert [found.mean for found in same.values()] == pytest.approx([1, 1, 1])
    assert same["rank_correlation"].low == same["rank_correlation"].high == 1


def test_one_image_has_a_mean_and_no_interval() -> None:
    maps = heatmaps_like("random", 2, (8, 8))
    found = agreement([maps[:1], maps[1:]]).summary()["iou"]
    assert not math.isnan(found.mean)
    assert math.isnan(found.low)


@pytest.mark.parametrize(
    ("maps", "words"),
    [
        (torch.rand(2, 4, 4), r"\[S,N,H,W\]"),
        (torch.rand(1, 2, 4, 4), "two seeds or more, got 1"),
        ([torch.rand(2, 4, 4), torch.rand(2, 4, 5)], "must have one shape"),
        ([torch.rand(2, 4, 4), torch.full((2, 4, 4), math.nan)], "finite"),
        ([torch.rand(2, 1, 4, 4), torch.rand(2, 1, 4, 4)], r"\[N,H,W\]"),
    ],
)
def test_what_can_not_be_compared_is_refused(maps: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        agreement(maps)
