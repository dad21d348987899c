"""The images to show: chosen while their scores come in, the same as of all at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from report_content import choose
from sufficit.report.content import Choice

NAN = float("nan")


def chosen_plainly(msi: np.ndarray, most: int, seed: int) -> dict[int, str]:
    """The definition, image by image, over all images: [methods,N]."""
    methods, n = msi.shape
    chosen: dict[int, str] = {}
    known = [i for i in range(n) if not np.isnan(msi[:, i]).any()]
    keys = {
        "best": lambda i: -msi[:, i].mean(),
        "worst": lambda i: msi[:, i].mean(),
        "most disputed": lambda i: -(msi[:, i].max() - msi[:, i].min()),
    }
    for reason, key in keys.items():
        if reason == "most disputed" and methods == 1:
            continue
        free = sorted((i for i in known if i not in chosen), key=key)
        chosen |= dict.fromkeys(free[: most // 4], reason)
    drawn = [int(i) for i in np.random.default_rng(seed).permutation(n) if i not in chosen]
    return chosen | dict.fromkeys(sorted(drawn[: most - len(chosen)]), "drawn by seed")


def made_up(methods: int, n: int, seed: int) -> np.ndarray:
    """Coarse values, so that many tie, some missing."""
    random = np.random.default_rng(seed)
    values = random.integers(-4, 5, (methods, n)) / 4
    return np.where(random.random((methods, n)) < 0.05, NAN, values)


def by_name(msi: np.ndarray) -> dict[str, np.ndarray]:
    return {f"method {k}": values for k, values in enumerate(msi)}


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 120), st.sampled_from([4, 9, 24]), st.integers(0, 30))
def test_images_are_chosen_by_the_definition(methods: int, n: int, most: int, seed: int) -> None:
    msi = made_up(methods, n, seed)
    assert choose(by_name(msi), most=most, seed=seed) == chosen_plainly(msi, most, seed)


@settings(deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([4, 8, 24]),
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(0, 99),
)
def test_workers_keep_all_images_that_are_chosen_in_the_end(
    methods: int, most: int, sizes: list[int], seed: int
) -> None:
    """Units in any order, divided among two workers, each with lists of its own."""
    n = sum(sizes)
    msi, random = made_up(methods, n, seed), np.random.default_rng(seed)
    units = np.split(np.arange(n), np.cumsum(sizes)[:-1])
    workers, kept, whole = (Choice(most), Choice(most)), set[int](), Choice(most)
    for k in random.permutation(len(units)):
        unit = units[k]
        may_be_shown = workers[random.integers(2)].add(unit, by_name(msi[:, unit]))
        kept |= may_be_shown & {*unit.tolist()}
        whole.add(unit, by_name(msi[:, unit]))
    expected = chosen_plainly(msi, most, seed)
    drawn = np.random.default_rng(seed).permutation(n).tolist()
    assert whole.chosen(drawn) == expected
    assert {row for row, why in expected.items() if why != "drawn by seed"} <= kept


def test_of_many_images_few_are_kept() -> None:
    random, choice, kept = np.random.default_rng(0), Choice(), 0
    for start in range(0, 100_000, 50):
        rows = range(start, start + 50)
        found = choice.add(rows, {m: random.normal(size=50) for m in "ab"})
        kept += len(found & {*rows})
    # Of k first places, image n takes one with the chance k / n: k (1 + ln(N / k)) in all.
    expected = sum(k * (1 + np.log(100_000 / k)) for k in (6, 12, 18))
    assert kept == pytest.approx(expected, rel=0.2)
