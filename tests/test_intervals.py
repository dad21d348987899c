"""Intervals of means and ratios: by hand, by definition, against scipy, and by simulation."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from reference import intervals
from sufficit.statistics import Estimate, ratio_of
from sufficit.sums import both, few_images, moments, sums_of

Generator = np.random.Generator


def ratio_estimate(own: np.ndarray, chance: np.ndarray, *, seed: int = 0) -> Estimate:
    """The ratio of two means over the same images, with its interval: [N], [N]."""
    return ratio_of(sums_of(both(own, chance), seed=seed))


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float64)[:, None]


def ends(values: np.ndarray, level: float = 0.05) -> tuple[float, float]:
    low, high = intervals(values[:, None], level)
    return float(low[0]), float(high[0])


# The interval of a mean


@pytest.mark.parametrize("level", [0.05, 0.005])
def test_symmetric_values_have_students_interval(level: float) -> None:
    half = np.random.default_rng(3).normal(size=7)
    values = np.concatenate([2 + half, 2 - half])
    error = values.std(ddof=1) / np.sqrt(14)
    expected = stats.t.interval(1 - level, 13, values.mean(), error)
    assert ends(values, level) == pytest.approx(expected, rel=1e-9)


def plainly(values: np.ndarray, level: float = 0.05) -> tuple[float, float]:
    """From the definitions: where Student's interval ends, or Hall's where that is farther out."""
    n, mean, error = len(values), values.mean(), values.std(ddof=1) / np.sqrt(len(values))
    skew, t = stats.skew(values), stats.t.ppf(1 - level / 2, len(values) - 1)

    def hall(shift: float) -> float:
        """Hall's transformation of the t statistic if mean + shift * error is the truth."""
        s = -shift
        return s + skew * s**2 / 3 / np.sqrt(n) + skew**2 * s**3 / 27 / n + skew / 6 / np.sqrt(n)

    below = optimize.brentq(lambda shift: hall(shift) - t, -1e5, 1e5)
    above = optimize.brentq(lambda shift: hall(shift) + t, -1e5, 1e5)
    return mean + min(below, -t) * error, mean + max(above, t) * error


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from([3, 5, 20, 300]), st.sampled_from([0.05, 0.01]))
def test_skewed_values_have_the_interval_of_the_definition(seed: int, n: int, level: float) -> None:
    values = np.random.default_rng(seed).exponential(size=n) ** 2
    assert ends(values, level) == pytest.approx(plainly(values, level), rel=1e-6)
    low, high = ends(-values, level)
    assert (-high, -low) == pytest.approx(ends(values, level), rel=1e-9), "no side is preferred"


def test_the_p_value_is_the_level_at_which_the_interval_ends_at_0() -> None:
    for seed in range(20):
        values = np.random.default_rng(seed).exponential(size=9) - 0.4
        (p,) = moments(values[:, None], np.ones((9, 1), np.int64)).p_values()
        low, high = ends(values, float(p))
        assert min(abs(low), abs(high)) < 1e-6


def test_intervals_by_hand() -> None:
    # Two values have no skew: the mean 4, its error 1, and t = 12.706 for one degree of freedom.
    assert ends(np.array([3.0, 5.0])) == pytest.approx((4 - 12.7062, 4 + 12.7062), abs=1e-4)
    assert ends(np.full(10, 0.1)) == (0.1, 0.1)


def test_nan_is_left_out_of_intervals_wherever_it_stands() -> None:
    values = np.random.default_rng(3).normal(size=(50, 3))
    holed = np.full((80, 3), np.nan)
    holed[::2][:40, 0] = values[:40, 0]
    holed[30:, 1:] = values[:, 1:]
    low, high = intervals(holed)
    one, others = intervals(values[:40, :1]), intervals(values[:, 1:])
    assert low == pytest.approx([*one[0], *others[0]], rel=1e-12)
    assert high == pytest.approx([*one[1], *others[1]], rel=1e-12)


def test_fewer_than_two_values_have_no_interval() -> None:
    assert np.isnan(intervals(np.ones((1, 2)))).all()
    assert np.isnan(intervals(np.ones((0, 2)))).all()
    low, high = intervals(np.array([[1.0, np.nan, 1.0], [np.nan, np.nan, 3.0]]))
    assert np.isnan([low[:2], high[:2]]).all()
    assert (low[2], high[2]) == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4)


# How often they hold the truth


def msi_like(random: Generator, shape: tuple[int, int]) -> np.ndarray:
    """A base score near 1 or near 0 for most images, less the size of the mask; mean 0.4020."""
    kind = random.random(shape)
    good, bad, other = (random.random(shape) for _ in range(3))
    base = np.where(kind < 0.55, 1 - 0.15 * good, np.where(kind < 0.8, 0.1 * bad, other))
    return base - random.beta(2, 5, shape)


MSI = 0.55 * 0.925 + 0.25 * 0.05 + 0.2 * 0.5 - 2 / 7


def percentiles(values: np.ndarray, random: Generator) -> tuple[np.ndarray, np.ndarray]:
    """The percentile bootstrap of each row's mean: [trials,n]."""
    trials, n = values.shape
    drawn = random.integers(n, size=(trials, 400, n))
    means = np.take_along_axis(values[:, None], drawn, axis=2).mean(axis=2)
    low, high = np.quantile(means, [0.025, 0.975], axis=1)
    return low, high


Draw = Callable[[Generator, tuple[int, int]], np.ndarray]


@pytest.mark.parametrize(
    ("draw", "truth", "n", "least"),
    [
        (msi_like, MSI, 5, 0.89),
        (msi_like, MSI, 10, 0.94),
        (msi_like, MSI, 20, 0.95),
        (Generator.lognormal, math.exp(0.5), 5, 0.85),
        (Generator.lognormal, math.exp(0.5), 10, 0.89),
        (Generator.lognormal, math.exp(0.5), 20, 0.90),
        (Generator.lognormal, math.exp(0.5), 50, 0.93),
    ],
)
def test_few_and_skewed_values_hold_the_truth_where_the_bootstrap_does_not(
    draw: Draw, truth: float, n: int, least: float
) -> None:
    random = np.random.default_rng(5)
    values = draw(random, size=(1000, n)) if draw is not msi_like else draw(random, (1000, n))
    for (low, high), holds in ((intervals(values.T), True), (percentiles(values, random), False)):
        share = np.mean((low <= truth) & (truth <= high))
        assert (share >= least) == holds, share


def test_many_values_hold_the_truth_in_95_percent() -> None:
    random = np.random.default_rng(6)
    low, high = intervals(msi_like(random, (3000, 200)).T)
    assert np.mean((low <= MSI) & (high >= MSI)) == pytest.approx(0.95, abs=0.012)


def test_few_images_come_with_a_caution_and_how_rare_an_event_they_may_lack() -> None:
    assert few_images(50) is None
    assert "Only 49 images: with fewer than 50" in str(few_images(49))
    assert "Only 1 image:" in str(few_images(1))
    assert "paired tests have little power (a real difference may not be" in str(few_images(12))
    # An event on one image in 7 is missing from 18 images in 6 % of the cases, in 7.2 in 5 %.
    found = str(few_images(18))
    assert "one image in 7," in found
    assert (1 - 1 / 6) ** 18 < 0.05 < (1 - 1 / 7) ** 18


# The interval of a ratio


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([6, 30]))
def test_a_ratio_holds_what_a_t_test_does_not_reject(seed: int, n: int) -> None:
    random = np.random.default_rng(seed)
    own, chance = random.binomial(16, 0.2, n) / 16, random.binomial(16, 0.3, n) / 16
    found = ratio_estimate(own, chance)
    assert found.mean == pytest.approx(own.mean() / chance.mean())
    for end in (found.low, found.high):
        if 0 < end < math.inf:
            assert stats.ttest_1samp(own - end * chance, 0).pvalue == pytest.approx(0.05)
    inside = (found.low + min(found.high, found.low + 5)) / 2
    assert stats.ttest_1samp(own - inside * chance, 0).pvalue >= 0.05


def test_a_ratio_without_end() -> None:
    rare = ratio_estimate(np.array([1.0] * 9 + [0.0]), np.array([0.0] * 9 + [0.5]))
    assert rare.mean == pytest.approx(18)
    assert 0 < rare.low < 18
    assert rare.high == math.inf
    unknown = ratio_estimate(np.array([1.0] + [0.0] * 9), np.array([0.0] * 9 + [0.5]))
    assert (unknown.low, unknown.high) == (0, math.inf)


@pytest.mark.parametrize("n", [10, 20, 50])
def test_ratios_hold_the_truth_in_95_percent(n: int) -> None:
    random = np.random.default_rng(7)

    def some() -> np.ndarray:
        return random.binomial(16, random.beta(0.5, 9.5, n)) / 16

    found = [ratio_estimate(2 * some(), some()) for _ in range(600)]
    # The error of a share of 600 is 0.9 %; the percentile bootstrap has 0.88, 0.91 and 0.93.
    assert np.mean([one.low <= 2 <= one.high for one in found]) >= 0.93
