"""Sums over groups of images: single images up to 10,000, hashed groups beyond, parts added."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sufficit import sums as module
from sufficit.sums import GROUPS, Sums, both, sums_of, with_pairs

NAN = float("nan")


def made_up(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Skewed values that rise with the number, some missing."""
    random = np.random.default_rng(seed)
    found = {name: np.sort(random.exponential(size=n) ** 2) for name in "ab"}
    found["b"][random.random(n) < 0.2] = np.nan
    return found


def split(columns: dict[str, np.ndarray], cuts: list[int], order: list[int]) -> Sums:
    """The columns added in parts, which are added in some order."""
    n = len(columns["a"])
    edges = [0, *sorted(cut % (n + 1) for cut in cuts), n]
    parts = [*pairwise(edges)]
    whole = Sums([*columns], seed=3)
    for k in sorted(range(len(parts)), key=lambda k: order[k % len(order)]):
        start, end = parts[k]
        whole.add(np.arange(start, end), {name: v[start:end] for name, v in columns.items()})
    return whole


@settings(deadline=None)
@given(
    st.sampled_from([0, 1, 30, 64, 65, 300]),
    st.lists(st.integers(0, 400), max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
)
def test_parts_added_in_any_order_are_the_whole(n: int, cuts: list[int], order: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "GROUPS", 64)
        columns = made_up(n)
        expected = sums_of(columns, seed=3)
        found = split(columns, cuts, order)
        assert found.n == expected.n == n
        for one, other in zip(found.groups(), expected.groups(), strict=True):
            assert np.allclose(one, other, rtol=1e-12, atol=0)
        assert found.means() == pytest.approx(expected.means(), rel=1e-12, nan_ok=True)


def test_up_to_10_000_images_each_is_its_own_group() -> None:
    columns = made_up(GROUPS)
    sums, counts = sums_of(columns).groups(["b", "a"])
    assert np.array_equal(sums[:, 1], columns["a"])
    assert np.array_equal(counts[:, 0], ~np.isnan(columns["b"]))
    assert np.array_equal(sums[:, 0], np.nan_to_num(columns["b"]))


def test_the_groups_of_more_images_hold_all_of_them_at_random() -> None:
    n = 4 * GROUPS
    columns = made_up(n)
    found = sums_of(columns)
    sums, counts = found.groups()
    assert sums.shape == counts.shape == (GROUPS, 2)
    assert counts.sum(axis=0).tolist() == [n, int((~np.isnan(columns["b"])).sum())]
    assert sums.sum(axis=0) == pytest.approx([np.nansum(v) for v in columns.values()])
    # Sizes of random groups are Poisson's, and no group has more than its share of late images.
    sizes = counts[:, 0]
    assert sizes.var() == pytest.approx(4, abs=0.3)
    assert (sizes == 0).mean() == pytest.approx(np.exp(-4), abs=0.005)
    late = sums_of({"": (np.arange(n) >= n / 2).astype(float)}).groups()[0][:, 0]
    assert late.var() == pytest.approx(2, abs=0.15)
    assert np.corrcoef(late, sizes - late)[0, 1] == pytest.approx(0, abs=0.03)


def test_another_seed_makes_other_groups() -> None:
    alone = {"": np.arange(2 * GROUPS, dtype=np.float64)}
    ones = [sums_of(alone, seed=seed).groups()[0][:, 0] for seed in (0, 1)]
    assert np.corrcoef(np.sort(ones[0]), np.sort(ones[1]))[0, 1] > 0.99
    shared = np.intersect1d(*ones)  # of the same images, so the same sum
    assert len(shared) < 0.3 * GROUPS


def test_pairs_and_ratios_count_images_with_both_values() -> None:
    columns = {"x": np.array([4.0, 3, 2, NAN]), "y": np.array([1.0, 2, NAN, 9])}
    sums = sums_of(with_pairs(columns))
    assert sums.means(["x", "y", ("x", "y")]) == pytest.approx([3, 4, 2])
    assert sums_of(both(**dict(zip(("own", "chance"), columns.values(), strict=True)))).means() == (
        pytest.approx([3.5, 1.5])
    )
