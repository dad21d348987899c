"""Sign flips, Holm's correction and rankings: against scipy, plain loops, by hand."""

import math
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import asdict
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from reference import intervals, three_methods
from sufficit import UserError
from sufficit.statistics import (
    DRAWS,
    ENUMERATED,
    Estimate,
    Limits,
    Pair,
    Standing,
    compare_values,
    estimates_of,
    holm,
    ratio_of,
    sign_flip,
)
from sufficit.sums import both, moments, sums_of

NAN = math.nan

QUARTERS = st.integers(-20, 20).map(lambda whole: whole / 4)  # exact in floating point, with ties
FEW = arrays.arrays(np.float64, st.integers(1, 9), elements=QUARTERS)
P_VALUES = arrays.arrays(np.float64, st.integers(0, 12), elements=st.floats(0, 1))


def estimates(
    columns: Mapping[str, np.ndarray],
    directions: Mapping[str, bool | None],
    *,
    seed: int = 0,
    limits: Limits | None = None,
) -> dict[str, Estimate]:
    """Mean and interval of every column in memory: each [N]."""
    return estimates_of(sums_of(columns, seed=seed), directions, limits=limits)


def ratio_estimate(own: np.ndarray, chance: np.ndarray, *, seed: int = 0) -> Estimate:
    """The ratio of two means over the same images, with its interval: [N], [N]."""
    return ratio_of(sums_of(both(own, chance), seed=seed))


def test_groups_without_a_value_are_left_out() -> None:
    assert sign_flip(np.array([1.0, 2.0, np.nan, 3.0])) == (0.25, True)


def flip_images(
    differences: np.ndarray, *, draws: int = DRAWS, seed: int = 0
) -> tuple[float, bool]:
    """The sign-flip test of one difference per image, in the groups of a comparison: [N]."""
    groups, _ = sums_of({"": differences}, seed=seed).groups()
    return sign_flip(groups[:, 0], draws=draws, seed=seed)


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
    assert flip_images(differences) == (flipped_plainly(differences), True)


@pytest.mark.parametrize("n", [2, 3, 5, 11])
def test_p_values_of_few_images_are_scipys(n: int) -> None:
    for seed in range(4):
        differences = np.random.default_rng(seed).normal(0.5, 1, n)
        p, exact = flip_images(differences)
        assert exact
        assert p == pytest.approx(permuted_by_scipy(differences), abs=1e-12)


def test_p_values_of_many_images_are_scipys_within_error() -> None:
    for shift in (0.1, 0.2, 0.3):
        differences = np.random.default_rng(7).normal(shift, 1, 83)
        p, exact = flip_images(differences)
        peer = permuted_by_scipy(differences, 20_000)
        assert not exact
        # Three times the error of a share of 10,000 draws and one of 20,000.
        assert p == pytest.approx(peer, abs=3 * (peer * (1 - peer) * 1.5 / 10_000) ** 0.5 + 1e-4)


def test_drawn_p_values_are_near_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = np.random.default_rng(8).normal(0.4, 1, ENUMERATED)
    exact, _ = flip_images(differences)
    monkeypatch.setattr("sufficit.statistics.ENUMERATED", 0)
    drawn, enumerated = flip_images(differences, draws=40_000)
    assert not enumerated
    assert drawn == pytest.approx(exact, abs=3 * (exact * (1 - exact) / 40_000) ** 0.5)


def test_one_image_that_loses_outweighs_what_ranks_say() -> None:
    gains = np.array([*np.linspace(0.6, 0.8, 11), -0.3])
    (pair,) = compare_values({"a": gains, "b": np.zeros(12)}).pairs
    assert stats.wilcoxon(gains).pvalue == flip_images(gains)[0] == 4 / 2**12
    assert pair.p == pytest.approx(0.058, abs=5e-4)
    assert pair.low < 0 < pair.high


def test_the_test_in_use_sees_fewer_false_differences_than_ranks_do() -> None:
    random, hits = np.random.default_rng(3), np.zeros(2)
    for _ in range(400):
        below = np.exp(0.5) - random.lognormal(size=12)  # of mean 0, with a tail below it
        (pair,) = compare_values({"a": below, "b": np.zeros(12)}).pairs
        hits += [pair.p < 0.05, stats.wilcoxon(below).pvalue < 0.05]
    ours, ranks = hits / 400
    assert 0.03 < ours < 0.11, "0.07, and three times the error of 400 samples"
    assert ranks > 0.12


def test_no_drawn_p_value_is_zero() -> None:
    assert flip_images(np.ones(100), draws=999) == (1 / 1000, False)


def test_all_images_but_those_without_difference_decide_what_is_enumerated() -> None:
    few = np.concatenate([np.zeros(500), [1.0, 2.0, 3.0], np.full(4, np.nan)])
    assert flip_images(few) == (0.25, True)
    assert flip_images(np.ones(ENUMERATED)) == (2 / 2**ENUMERATED, True)
    assert not flip_images(np.ones(ENUMERATED + 1))[1]


def test_nothing_to_compare_has_p_1() -> None:
    assert flip_images(np.array([])) == (1, True)
    assert flip_images(np.array([np.nan])) == (1, True)
    assert flip_images(np.zeros(1000)) == (1, True)


def test_sums_equal_but_for_rounding_count_as_equal() -> None:
    # 0.1 + 0.2 - 0.3 is not quite 0 in floating point; as a sum of signs it must tie with 0.
    assert flip_images(np.array([0.1, 0.2, -0.3]))[0] == 1
    # And as whole numbers do.
    tenths, wholes = np.array([0.1, 0.1, 0.1, 0.7]), np.array([1.0, 1, 1, 7])
    assert flip_images(tenths)[0] == flip_images(wholes)[0]


@pytest.mark.parametrize("n", [15, 300])
@given(seed=st.integers(0, 99), factor=st.sampled_from([1e-6, 0.3, -1, 7, -1e5]))
@settings(max_examples=25)
def test_p_values_know_neither_sign_nor_scale(n: int, seed: int, factor: float) -> None:
    differences = np.random.default_rng(seed).normal(0.1, 1, n)
    assert flip_images(differences * factor) == flip_images(differences)


@pytest.mark.parametrize("n", [16, 60])
def test_without_a_difference_p_is_below_5_percent_in_5_percent(n: int) -> None:
    random = np.random.default_rng(9)
    below = [
        flip_images(random.normal(size=n) ** 3, draws=999, seed=i)[0] <= 0.05 for i in range(400)
    ]
    assert np.mean(below) == pytest.approx(0.05, abs=0.03)


def test_50_000_images_and_10_000_draws_take_little_time_and_memory() -> None:
    differences = np.random.default_rng(10).normal(0.01, 1, 50_000)
    start = time.perf_counter()
    p, _ = flip_images(differences)
    assert time.perf_counter() - start < 5
    # So many images make a mean normal.
    z = differences.mean() / np.sqrt((differences**2).mean() / 50_000)
    assert p == pytest.approx(2 * stats.norm.sf(abs(z)), abs=0.01)
    tracemalloc.start()
    flip_images(differences, draws=1000)
    intervals(differences[:, None])
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


# Methods ranked by one value per image


def pair_of(standing: Standing, *names: str) -> Pair:
    return next(pair for pair in standing.pairs if {pair.first, pair.second} == set(names))


def test_pairing_tells_what_the_intervals_of_the_means_do_not() -> None:
    values = three_methods()
    standing = compare_values(values)
    assert (standing.best, standing.not_different) == ("a", ("b",))
    assert standing.ranking == ("a", "b", "c")
    # The images differ so much more than the methods that the means' intervals overlap.
    low, high = intervals(np.stack([values["a"], values["c"]], axis=1))
    assert low[0] < high[1]
    far = pair_of(standing, "a", "c")
    assert 0.9 < far.low < far.difference < far.high < 1.1
    assert far.p_corrected == pytest.approx(3 / 10_001)


def test_a_pair_is_the_interval_and_the_tests_of_its_differences() -> None:
    values = three_methods()
    standing = compare_values(values, seed=3, draws=700)
    tests = []
    for pair in standing.pairs:
        difference = values[pair.first] - values[pair.second]
        low, high = intervals(difference[:, None])
        assert pair.difference == pytest.approx(difference.mean())
        assert (pair.low, pair.high) == pytest.approx((low[0], high[0]))
        flipped, exact = flip_images(difference, draws=700, seed=3)
        by_interval = moments(difference[:, None], np.ones((40, 1), np.int64)).p_values()[0]
        assert (pair.p, pair.exact) == (pytest.approx(max(flipped, by_interval)), exact)
        assert (pair.n, pair.n_nan) == (40, 0)
        tests.append(pair.p)
    assert [pair.p_corrected for pair in standing.pairs] == holm(np.array(tests)).tolist()
    assert asdict(standing.chance) == {
        "seed": 3, "draws": 700, "correction": "holm", "level": 0.05,
    }  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.sampled_from([3, 8, 25]), st.floats(-1, 1))
def test_what_is_significant_has_an_interval_without_0(seed: int, n: int, shift: float) -> None:
    values = np.random.default_rng(seed).exponential(size=n) ** 2 + 2 * shift
    (pair,) = compare_values({"x": values, "y": np.zeros(n)}, draws=200).pairs
    assert pair.p >= 0.05 or not pair.low <= 0 <= pair.high


@pytest.mark.parametrize(("n", "most"), [(10, 0.11), (30, 0.10), (60, 0.09)])
def test_skewed_differences_are_rarely_significant_by_chance(n: int, most: float) -> None:
    random = np.random.default_rng(21)
    found, flipped = [], []
    for seed in range(500):
        differences = random.lognormal(size=n) - np.exp(0.5)
        (pair,) = compare_values({"x": differences, "y": 0 * differences}, draws=299).pairs
        found.append(pair.p < 0.05)
        flipped.append(flip_images(differences, draws=299, seed=seed)[0] < 0.05)
    assert np.mean(found) < most < np.mean(flipped), "signs alone are fooled by skewness"


def test_equal_differences_are_as_significant_as_their_signs() -> None:
    (pair,) = compare_values({"x": [1.5] * 6, "y": [1.0] * 6}).pairs
    assert (pair.difference, pair.low, pair.high, pair.p) == (0.5, 0.5, 0.5, 2 / 64)


def test_lower_may_be_better() -> None:
    standing = compare_values(three_methods(), "deletion_percent", higher_is_better=False)
    assert standing.ranking == ("c", "b", "a")
    assert (standing.best, standing.not_different) == ("c", ())
    assert pair_of(standing, "a", "c").difference < 0


def test_what_is_significant_depends_on_the_number_of_pairs() -> None:
    better, worse = [1.0] * 6, [0.0] * 6  # p = 2 / 64 = 0.03125
    assert compare_values({"x": better, "y": worse}).not_different == ()
    three = compare_values({"x": better, "y": worse, "z": [0.0] * 6})
    assert pair_of(three, "x", "y").p == 1 / 32
    assert pair_of(three, "x", "y").p_corrected == 3 / 32
    assert three.not_different == ("y", "z")


def test_pairs_of_methods_and_of_each_control_are_corrected_apart() -> None:
    """By hand: p of six images of one sign is 2 / 64, that of five is 1 / 16."""
    values = {
        "x": [1.0] * 6,
        "y": [1.0] * 5 + [0.0],
        "blank": [0.0] * 6,
        "noise": [0.0] * 6,
    }
    standing = compare_values(values, controls=["blank", "noise"])
    corrected = {
        frozenset((pair.first, pair.second)): (pair.p, pair.p_corrected) for pair in standing.pairs
    }
    six, five = 2 / 64, pytest.approx(pair_of(standing, "y", "blank").p)
    assert corrected[frozenset("xy")] == (1, 1), "the one pair of methods is a family of one"
    for control in ("blank", "noise"):
        # Two methods against one control: the smaller p counts twice, however many controls.
        assert corrected[frozenset(("x", control))] == (six, 2 * six)
        assert corrected[frozenset(("y", control))] == (five, max(2 * six, five.expected))
    assert frozenset(("blank", "noise")) not in corrected


def test_a_false_lead_over_a_control_is_as_rare_with_several_methods() -> None:
    """Of methods that are no better than the control one seems so in 5 % of runs at most."""
    random = np.random.default_rng(4)
    names = [f"m{k}" for k in range(6)]
    found = []
    for _ in range(200):
        values = {name: random.normal(size=12) for name in (*names, "control")}
        standing = compare_values(values, controls=["control"])
        found.append(any(standing.beats(name, "control") for name in names))
    assert np.mean(found) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 200)


def test_images_where_either_has_no_value_are_left_out_and_counted() -> None:
    standing = compare_values(
        {"x": [4.0, 3, 2, NAN], "y": [1.0, 2, NAN, 9], "z": [NAN, NAN, NAN, NAN]}
    )
    pair = pair_of(standing, "x", "y")
    # Their own means are 3 and 4; where both have a value x is ahead by 3 and by 1.
    assert standing.means == pytest.approx({"y": 4, "x": 3, "z": NAN}, nan_ok=True)
    assert (pair.first, pair.difference, pair.n, pair.n_nan) == ("y", -2, 2, 2)
    assert (pair.low, pair.high) == pytest.approx(stats.t.interval(0.95, 1, -2, 1))
    assert pair.p == 0.5
    nothing = pair_of(standing, "x", "z")
    assert (nothing.n, nothing.n_nan, nothing.p) == (0, 4, 1)
    assert np.isnan([nothing.difference, nothing.low, nothing.high]).all()
    assert standing.ranking == ("y", "x", "z")
    assert standing.not_different == ("x",)  # what has no value is not marked as good


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.floats(-2, 1)] * 2), min_size=2, max_size=30), st.integers(0, 9))
def test_swapping_two_methods_or_the_direction_changes_signs_alone(
    rows: list[tuple[float, float]], seed: int
) -> None:
    a, b = (list(values) for values in zip(*rows, strict=True))
    few = {"seed": seed, "draws": 50}
    (one,) = compare_values({"x": a, "y": b}, **few).pairs
    (swapped,) = compare_values({"x": b, "y": a}, **few).pairs
    (turned,) = compare_values({"x": a, "y": b}, higher_is_better=False, **few).pairs
    assert one.p == one.p_corrected
    assert (swapped.p, turned.p) == pytest.approx((one.p, one.p), rel=1e-6, abs=1e-9)
    # The method with the better mean comes first, x where they are equal.
    sign = -1 if swapped.first == one.first else 1
    assert swapped.difference == sign * one.difference
    sign = 1 if turned.first == one.first else -1
    assert turned.difference == sign * one.difference
    mirrored = (turned.low, turned.high) if sign == 1 else (-turned.high, -turned.low)
    assert mirrored == pytest.approx((one.low, one.high), abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(-2, 1), min_size=1, max_size=40))
def test_identical_methods_differ_by_0_with_p_1(values: list[float]) -> None:
    standing = compare_values({"x": values, "y": values})
    (pair,) = standing.pairs
    assert (pair.difference, pair.p, pair.p_corrected) == (0, 1, 1)
    assert standing.not_different == ("y",)
    if len(values) > 1:
        assert (pair.low, pair.high) == (0, 0)


@pytest.mark.parametrize("factor", [0.125, 3.0, 1e-9])
def test_a_standing_does_not_depend_on_the_unit(factor: float) -> None:
    values = three_methods()
    one = compare_values(values)
    other = compare_values({name: factor * found + 5 * factor for name, found in values.items()})
    assert (other.ranking, other.not_different) == (one.ranking, one.not_different)
    for a, b in zip(one.pairs, other.pairs, strict=True):
        assert (b.p, b.p_corrected) == (a.p, a.p_corrected)
        assert (b.difference, b.low, b.high) == pytest.approx(
            tuple(factor * v for v in (a.difference, a.low, a.high)), abs=1e-9 * factor
        )


def test_a_method_is_clearly_best_if_it_beats_all_others() -> None:
    values = three_methods()
    assert not compare_values(values).is_clear
    assert compare_values({name: values[name] for name in "ac"}).is_clear
    assert not compare_values({"a": values["a"]}).is_clear, "there is nothing to compare it with"


def test_controls_are_tested_and_not_ranked() -> None:
    values = three_methods()  # a and b alike, c far below
    standing = compare_values(values, controls=["b"])
    assert (standing.best, standing.ranking, standing.controls) == ("a", ("a", "c"), ("b",))
    assert [(pair.first, pair.second) for pair in standing.pairs] == [
        *(("a", "c"), ("a", "b"), ("b", "c")),
    ]
    plain = compare_values(values)
    assert pair_of(standing, "a", "b") == pair_of(plain, "a", "b"), "the same test and correction"
    assert standing.means == plain.means
    assert standing.not_different == ()
    assert (standing.beats("a", "c"), standing.beats("c", "a")) == (True, False)
    assert (standing.beats("a", "b"), standing.beats("b", "a")) == (False, False)
    assert (standing.beats("b", "c"), standing.is_clear) == (True, False)
    below = compare_values(values, controls=["a"])
    assert (below.best, below.leader, below.beats("a", "b")) == ("b", "a", False)
    clear = compare_values({name: values[name] for name in "ac"}, controls=["c"])
    assert (clear.is_clear, clear.rivals, clear.not_different) == (True, ("c",), ())
    worse = compare_values({name: values[name] for name in "ac"}, controls=["a"])
    assert (worse.best, worse.leader, worse.beats("a", "c")) == ("c", "a", True)
    with pytest.raises(UserError, match="Unknown method 'x'"):
        compare_values(values, controls=["x"])


def test_a_control_may_be_beaten_by_a_lower_value() -> None:
    values = {name: found for name, found in three_methods().items() if name in "ac"}
    lower = compare_values(values, "deletion_percent", higher_is_better=False, controls=["a"])
    assert (lower.leader, lower.best, lower.beats("c", "a")) == ("c", "c", True)


@pytest.mark.parametrize("values", [{"a": [1, NAN], "b": [NAN, 0]}, {"a": [NAN] * 2, "b": [0, 1]}])
def test_methods_without_a_common_image_cannot_be_told_apart(values) -> None:
    standing = compare_values(values)
    best, other = standing.ranking
    assert standing.pair(best, other) is None
    assert standing.leader == best
    assert standing.not_different == ()


def test_infinite_values_are_refused() -> None:
    with pytest.raises(UserError, match="finite or NaN, got inf for b"):
        compare_values({"a": [0.0, 1.0], "b": [0.0, float("inf")]})


# More images than groups


@pytest.mark.parametrize("n", [30, 2000])
def test_up_to_as_many_images_as_groups_each_image_counts(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sufficit.sums.GROUPS", 2000)
    values = np.random.default_rng(11).exponential(size=n) ** 2
    found = estimates({"a": values}, {"a": True}, seed=4)["a"]
    low, high = intervals(values[:, None])
    assert (found.low, found.high) == pytest.approx((low[0], high[0]), rel=1e-12)
    monkeypatch.setattr("sufficit.sums.GROUPS", n - 1)
    grouped = estimates({"a": values}, {"a": True}, seed=4)["a"]
    assert grouped.low != pytest.approx(found.low, rel=1e-12)
    assert (grouped.mean, grouped.n) == (pytest.approx(found.mean, rel=1e-12), n)


def sorted_by_class(random: np.random.Generator, n: int) -> np.ndarray:
    """Skewed values with the mean 1, sorted by a class that decides half of them; a fifth NaN."""
    classes = np.sort(random.integers(10, size=n))
    values = 0.5 * random.exponential(size=n) + 0.5 * classes / 4.5
    values[random.random(n) < 0.2] = np.nan
    return values


@pytest.mark.parametrize("n", [260, 2000])
def test_intervals_of_groups_hold_the_truth_in_95_percent(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also right above the number of groups, where a third of them is empty."""
    monkeypatch.setattr("sufficit.sums.GROUPS", 250)
    random, inside = np.random.default_rng(15), []
    for seed in range(1000):
        found = estimates({"a": sorted_by_class(random, n)}, {"a": True}, seed=seed)["a"]
        inside.append(found.low <= 1 <= found.high)
    # The error of a share of 1,000 is 0.7 %.
    assert 0.93 < np.mean(inside) < 0.97


@pytest.mark.parametrize("n", [260, 2000])
def test_without_a_difference_groups_differ_significantly_in_5_percent(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sufficit.sums.GROUPS", 250)
    random, below = np.random.default_rng(13), []
    for seed in range(1000):
        values = sorted_by_class(random, n)
        differences = (values - np.nanmean(values)) * random.choice([-1, 1], n)
        below.append(flip_images(differences, draws=499, seed=seed)[0] <= 0.05)
    assert 0.04 < np.mean(below) < 0.06


def test_two_methods_of_many_images_are_told_apart_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(14)
    first = sorted_by_class(random, 6000)
    second = first + random.normal(0.02, 0.5, 6000)
    second[random.random(6000) < 0.1] = np.nan
    single = compare_values({"x": first, "y": second}, seed=5)
    monkeypatch.setattr("sufficit.sums.GROUPS", 2000)
    grouped = compare_values({"x": first, "y": second}, seed=5)
    assert grouped.ranking == single.ranking
    assert grouped.means == pytest.approx(single.means, rel=1e-12)
    (one,), (two,) = single.pairs, grouped.pairs
    assert (two.n, two.n_nan, two.exact) == (one.n, one.n_nan, False)
    assert two.difference == pytest.approx(one.difference, rel=1e-9)
    # The width errs by 1.6 % for 2,000 groups.
    width = one.high - one.low
    assert (two.low, two.high) == pytest.approx((one.low, one.high), abs=0.08 * width)
    assert two.p == pytest.approx(one.p, abs=0.03)


def test_ratios_of_many_images_have_the_interval_of_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(15)
    chance = sorted_by_class(random, 6000)
    own = 2 * chance + random.exponential(size=6000)
    own[::7] = np.nan
    single = ratio_estimate(own, chance, seed=5)
    monkeypatch.setattr("sufficit.sums.GROUPS", 2000)
    grouped = ratio_estimate(own, chance, seed=5)
    assert (grouped.n, grouped.n_nan) == (single.n, single.n_nan)
    assert grouped.mean == pytest.approx(single.mean, rel=1e-12)
    width = single.high - single.low
    assert (grouped.low, grouped.high) == pytest.approx((single.low, single.high), abs=0.08 * width)


def test_few_differences_among_many_images_keep_their_exact_test() -> None:
    differences = np.zeros(50_000)
    differences[::10_000] = [1, 1, 1, 1, 1]
    assert flip_images(differences) == (2 / 32, True)


def test_methods_that_are_equal_on_many_images_differ_by_0() -> None:
    values = np.random.default_rng(16).normal(size=20_000)
    (pair,) = compare_values({"x": values, "y": values}).pairs
    assert (pair.difference, pair.low, pair.high, pair.p, pair.exact) == (0, 0, 0, 1, True)


def test_intervals_end_where_the_values_of_a_column_end() -> None:
    values = {"share": np.array([0.9, 1.0, 1.0, 0.8, 1.0]), "own": np.array([0.9, 3, 0, 0.1, 0])}
    free = estimates(values, {"share": True, "own": True})
    assert free["share"].high > 1
    assert free["own"].low < 0
    ends = {"share": (0.0, 1.0), "own": (-math.inf, math.inf)}
    found = estimates(values, {"share": True, "own": True}, limits=ends.__getitem__)
    assert (found["share"].low, found["share"].high) == (free["share"].low, 1.0)
    assert found["own"] == free["own"]
    # An estimate drawn from few masks may itself be outside: its interval still holds it.
    beyond = estimates({"share": values["share"] + 0.5}, {"share": True}, limits=ends.__getitem__)
    assert beyond["share"].low < beyond["share"].mean == beyond["share"].high
