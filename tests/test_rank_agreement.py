"""Rank correlations, and which leads survive another condition."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from sufficit.similarity import (
    RankedCondition,
    best_changes,
    correlations,
    kendall,
    lost_leads,
    spearman,
)
from sufficit.statistics import Standing, compare_values


@pytest.mark.parametrize("seed", range(6))
def test_correlations_are_scipys(seed: int) -> None:
    random = np.random.default_rng(seed)
    one, two = random.integers(0, 5, (2, 8)).astype(float)  # with ties
    assert spearman(one, two) == pytest.approx(spearmanr(one, two).statistic)


def test_kendall_counts_pairs_and_ties() -> None:
    # Of the 6 pairs 4 agree, 1 is reversed, 1 is tied in the first alone: 3 / sqrt(5 * 6).
    assert kendall([1, 1, 2, 3], [1, 2, 4, 3]) == pytest.approx(3 / 30**0.5)
    assert np.isnan(kendall([1, np.nan, 2], [1, 2, 3]))


def test_the_same_order_is_one_and_the_reverse_minus_one() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == kendall([1, 2, 3], [10, 20, 30]) == 1
    assert spearman([1, 2, 3], [3, 2, 1]) == kendall([1, 2, 3], [3, 2, 1]) == -1
    assert np.isnan(spearman([1], [2]))
    assert np.isnan(kendall([1, 1], [2, 3]))
    assert np.isnan(kendall([1], [2]))


def standing(**means: float) -> Standing:
    """Methods whose values over 40 images differ by their means and little else."""
    random = np.random.default_rng(0)
    values = {name: mean + 0.05 * random.standard_normal(40) for name, mean in means.items()}
    controls = ["center"] if "center" in means else []
    return compare_values(values, controls=controls)


def test_a_lead_is_lost_by_the_tests_and_not_by_eye() -> None:
    first = standing(a=0.9, b=0.5, c=0.1)
    other = standing(a=0.5, b=0.9, c=0.51)
    assert lost_leads(first, other) == {"a": ["b", "c"]}, "b is ahead of it now"
    assert best_changes(first, other)
    assert not lost_leads(first, first)
    assert not best_changes(first, first)


def test_a_difference_that_was_never_significant_cannot_be_lost() -> None:
    first, other = standing(a=0.501, b=0.5), standing(a=0.1, b=0.9)
    assert not first.beats("a", "b")
    assert lost_leads(first, other) == {}


def test_correlations_leave_the_controls_out() -> None:
    ranked = [
        RankedCondition(key, key or "black", False, 8, 1, 0.9, standing(**means))
        for key, means in (
            ("", {"a": 0.9, "b": 0.5, "c": 0.1, "center": 0.0}),
            ("blur", {"a": 0.5, "b": 0.9, "c": 0.1, "center": 2.0}),
            ("noise", {"a": 0.9, "b": 0.5, "c": 0.1, "center": 9.0}),
        )
    ]
    found = {
        (one["first"], one["second"]): (one["spearman"], one["kendall"])
        for one in correlations(ranked)
    }
    assert found["", "blur"] == pytest.approx((0.5, 1 / 3))
    assert found["", "noise"] == pytest.approx((1, 1))
    assert len(found) == 3
