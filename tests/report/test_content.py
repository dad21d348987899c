"""The images to show: chosen while their scores come in, the same as of all at once."""

import numpy as np
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
def test_units_in_any_order_give_the_same_images(
    methods: int, most: int, sizes: list[int], seed: int
) -> None:
    n = sum(sizes)
    msi = made_up(methods, n, seed)
    units = np.split(np.arange(n), np.cumsum(sizes)[:-1])
    random = np.random.default_rng(seed)
    choice = Choice(most)
    for k in random.permutation(len(units)):
        choice.add(units[k], by_name(msi[:, units[k]]))
    drawn = np.random.default_rng(seed).permutation(n).tolist()
    assert choice.chosen(drawn) == chosen_plainly(msi, most, seed)
