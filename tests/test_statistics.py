"""Bootstrap, sign flips and Holm's correction, against scipy, plain second writings and by hand."""

import time
import tracemalloc
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from sufficit.resampling import ENUMERATED, bootstrap, holm, sign_flip

QUARTERS = st.integers(-20, 20).map(lambda whole: whole / 4)  # exact in floating point, with ties
FEW = arrays.arrays(np.float64, st.integers(1, 9), elements=QUARTERS)
P_VALUES = arrays.arrays(np.float64, st.integers(0, 12), elements=st.floats(0, 1))


def column(*values: float) -> np.ndarray:
    return np.array(values)[:, None]


def test_intervals_agree_with_scipy() -> None:
    values = np.random.default_rng(3).normal([0.0, 2.0], [1.0, 0.1], size=(80, 2))
    values[:, 1] = values[:, 1] ** 3  # skewed
    low, high = bootstrap(values, resamples=20_000)
    for i in range(2):
        peer = stats.bootstrap(
            (values[:, i],), np.mean, n_resamples=20_000, method="percentile", rng=1
        ).confidence_interval
        # The edge of 20,000 draws errs by 1.4 % of the width, both of them by 2 %.
        width = peer.high - peer.low
        assert low[i] == pytest.approx(peer.low, abs=0.03 * width)
        assert high[i] == pytest.approx(peer.high, abs=0.03 * width)


def test_intervals_known_by_hand() -> None:
    # Of two values drawn both are the first in a quarter of the cases: more than 2.5 %.
    assert np.concatenate(bootstrap(column(3, 5))).tolist() == [3, 5]
    # Ones drawn out of 10, half of which are 1: at most 1 in 1.07 %, at most 2 in 5.5 %.
    low, high = bootstrap(column(*[0, 1] * 5))
    assert (low[0], high[0]) == pytest.approx((0.2, 0.8))
    # Ones drawn out of 4, one of which is 1: 4 in 0.4 %, 3 or 4 in 5.1 %.
    low, high = bootstrap(column(0, 0, 1, 0))
    assert (low[0], high[0]) == pytest.approx((0, 0.75))


def test_intervals_of_zeros_and_ones_are_the_binomials() -> None:
    for ones, n in [(12, 60), (30, 100), (5, 50)]:
        low, high = bootstrap(column(*[1] * ones, *[0] * (n - ones)), resamples=40_000)
        exact = stats.binom(n, ones / n).ppf([0.025, 0.975]) / n
        assert (low[0], high[0]) == pytest.approx(tuple(exact), abs=1e-9)


def test_intervals_of_equal_values_are_that_value() -> None:
    low, high = bootstrap(np.full((10, 1), 0.1))
    assert (low[0], high[0]) == (0.1, 0.1)


def test_nan_is_left_out_of_intervals_wherever_it_stands() -> None:
    values = np.random.default_rng(3).normal(size=(50, 3))
    holed = np.full((80, 3), np.nan)
    holed[::2][:40, 0] = values[:40, 0]
    holed[30:, 1:] = values[:, 1:]
    low, high = bootstrap(holed)
    one, others = bootstrap(values[:40, :1]), bootstrap(values[:, 1:])
    assert low.tolist() == [*one[0], *others[0]]
    assert high.tolist() == [*one[1], *others[1]]


def test_fewer_than_two_values_have_no_interval() -> None:
    assert np.isnan(bootstrap(np.ones((1, 2)))).all()
    assert np.isnan(bootstrap(np.ones((0, 2)))).all()
    low, high = bootstrap(np.array([[1.0, np.nan, 1.0], [np.nan, np.nan, 3.0]]))
    assert np.isnan([low[:2], high[:2]]).all()
    assert (low[2], high[2]) == (1, 3)


def test_intervals_do_not_depend_on_how_much_is_held_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = np.random.default_rng(4).normal(size=(30, 2))
    whole = bootstrap(values, resamples=999, seed=5)
    monkeypatch.setattr("sufficit.resampling.HELD", 100)
    assert np.allclose(whole, bootstrap(values, resamples=999, seed=5), rtol=1e-12)
    assert not np.allclose(whole, bootstrap(values, resamples=999, seed=6), rtol=1e-3)


def flipped_plainly(differences: np.ndarray) -> float:
    """The share of all sign patterns with a mean as far from 0, one after the other."""
    patterns = list(product([1, -1], repeat=len(differences)))
    far = [abs(np.dot(signs, differences)) >= abs(differences.sum()) for signs in patterns]
    return sum(far) / len(patterns)


def permuted_by_scipy(differences: np.ndarray, resamples: float = np.inf) -> float:
    found = stats.permutation_test(
        (differences, np.zeros_like(differences)),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        rng=2,
    )
    return float(found.pvalue)


@given(FEW)
def test_p_values_are_the_share_of_all_sign_patterns(differences: np.ndarray) -> None:
    assert sign_flip(differences) == (flipped_plainly(differences), True)


@pytest.mark.parametrize("n", [2, 3, 5, 11])
def test_p_values_of_few_images_are_scipys(n: int) -> None:
    for seed in range(4):
        differences = np.random.default_rng(seed).normal(0.5, 1, n)
        p, exact = sign_flip(differences)
        assert exact
        assert p == pytest.approx(permuted_by_scipy(differences), abs=1e-12)


def test_p_values_of_many_images_are_scipys_within_error() -> None:
    for shift in (0.1, 0.2, 0.3):
        differences = np.random.default_rng(7).normal(shift, 1, 83)
        p, exact = sign_flip(differences)
        peer = permuted_by_scipy(differences, 20_000)
        assert not exact
        # Three times the error of a share of 10,000 draws and one of 20,000.
        assert p == pytest.approx(peer, abs=3 * (peer * (1 - peer) * 1.5 / 10_000) ** 0.5 + 1e-4)


def test_drawn_p_values_are_near_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = np.random.default_rng(8).normal(0.4, 1, ENUMERATED)
    exact, _ = sign_flip(differences)
    monkeypatch.setattr("sufficit.resampling.ENUMERATED", 0)
    drawn, enumerated = sign_flip(differences, draws=40_000)
    assert not enumerated
    assert drawn == pytest.approx(exact, abs=3 * (exact * (1 - exact) / 40_000) ** 0.5)


def test_no_drawn_p_value_is_zero() -> None:
    assert sign_flip(np.ones(100), draws=999) == (1 / 1000, False)


def test_all_images_but_those_without_difference_decide_what_is_enumerated() -> None:
    few = np.concatenate([np.zeros(500), [1.0, 2.0, 3.0], np.full(4, np.nan)])
    assert sign_flip(few) == (0.25, True)
    assert sign_flip(np.ones(ENUMERATED)) == (2 / 2**ENUMERATED, True)
    assert not sign_flip(np.ones(ENUMERATED + 1))[1]


def test_nothing_to_compare_has_p_1() -> None:
    assert sign_flip(np.array([])) == (1, True)
    assert sign_flip(np.array([np.nan])) == (1, True)
    assert sign_flip(np.zeros(1000)) == (1, True)


def test_sums_equal_but_for_rounding_count_as_equal() -> None:
    # 0.1 + 0.2 - 0.3 is not quite 0 in floating point; as a sum of signs it must tie with 0.
    assert sign_flip(np.array([0.1, 0.2, -0.3]))[0] == 1
    # And as whole numbers do.
    assert sign_flip(np.array([0.1, 0.1, 0.1, 0.7]))[0] == sign_flip(np.array([1.0, 1, 1, 7]))[0]


@pytest.mark.parametrize("n", [15, 300])
@given(seed=st.integers(0, 99), factor=st.sampled_from([1e-6, 0.3, -1, 7, -1e5]))
@settings(max_examples=25)
def test_p_values_know_neither_sign_nor_scale(n: int, seed: int, factor: float) -> None:
    differences = np.random.default_rng(seed).normal(0.1, 1, n)
    assert sign_flip(differences * factor) == sign_flip(differences)


@pytest.mark.parametrize("n", [16, 60])
def test_without_a_difference_p_is_below_5_percent_in_5_percent(n: int) -> None:
    random = np.random.default_rng(9)
    below = [
        sign_flip(random.normal(size=n) ** 3, draws=999, seed=i)[0] <= 0.05 for i in range(400)
    ]
    assert np.mean(below) == pytest.approx(0.05, abs=0.03)


def test_50_000_images_and_10_000_draws_take_little_time_and_memory() -> None:
    differences = np.random.default_rng(10).normal(0.01, 1, 50_000)
    start = time.perf_counter()
    p, _ = sign_flip(differences)
    assert time.perf_counter() - start < 5
    # So many images make a mean normal.
    z = differences.mean() / np.sqrt((differences**2).mean() / 50_000)
    assert p == pytest.approx(2 * stats.norm.sf(abs(z)), abs=0.01)
    tracemalloc.start()
    sign_flip(differences, draws=1000)
    bootstrap(differences[:, None], resamples=40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64e6


def holm_plainly(p_values: list[float]) -> list[float]:
    """From the definition: the k-th smallest of m times m - k + 1, never below an earlier one."""
    corrected = []
    for p in p_values:
        smaller = sorted(q for q in p_values if q <= p)
        steps = [(len(p_values) - k) * q for k, q in enumerate(smaller)]
        corrected.append(min(1.0, max(steps)))
    return corrected


def test_holm_by_hand() -> None:
    # 0.01 * 4; 0.02 * 3; 0.03 * 2 = 0.06; 0.04 * 1 is lifted to 0.06.
    assert holm(np.array([0.04, 0.01, 0.03, 0.02])) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm(np.array([0.5, 0.6])).tolist() == [1, 1]
    assert holm(np.array([0.03])).tolist() == [0.03]
    assert holm(np.array([])).tolist() == []


@given(P_VALUES)
def test_holm_is_its_definition_keeps_order_and_never_lowers(p_values: np.ndarray) -> None:
    corrected = holm(p_values)
    assert corrected == pytest.approx(holm_plainly(p_values.tolist()), abs=1e-12)
    assert (corrected >= p_values).all()
    assert (corrected <= 1).all()
    assert (corrected <= np.minimum(1, p_values * len(p_values))).all()
    order = np.argsort(p_values, kind="stable")
    assert (np.diff(corrected[order]) >= 0).all()
