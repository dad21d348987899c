"""What chance could have done: bootstrap intervals, sign-flip p-values, Holm's correction."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
RESAMPLES = 2000  # of a bootstrap
EDGES = (0.025, 0.975)  # of a 95 % interval
DRAWS = 10_000  # of a sign-flip test
ENUMERATED = 20  # differences up to which all ways of flipping signs are tried
HELD = 1_000_000  # numbers held at a time


def bootstrap(
    values: Floats, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[Floats, Floats]:
    """95 % percentile interval of the mean of each column, NaN left out: [N,columns] -> low, high.

    Columns with values in the same rows are resampled together. A column with fewer than two
    values has no interval: NaN.

    >>> low, high = bootstrap(np.array([[0.0], [0.0], [0.0], [1.0]]))
    >>> low.tolist(), high.tolist()                 # of four drawn, 0 to 3 are the 1; rarely all
    ([0.0], [0.75])
    """
    edges = np.full((2, values.shape[1]), np.nan)
    present = ~np.isnan(values)
    for rows in {column.tobytes(): column for column in present.T}.values():
        if rows.sum() > 1:
            alike = (present == rows[:, None]).all(axis=0)
            means = resampled_means(values[rows][:, alike], resamples, seed)
            edges[:, alike] = np.quantile(means, EDGES, axis=0)
    return edges[0], edges[1]


def sign_flip(differences: Floats, *, draws: int = DRAWS, seed: int = 0) -> tuple[float, bool]:
    """Two-sided p-value of a mean difference, and whether it is exact; NaN left out: [N] -> p.

    The share of the ways to flip signs that bring the mean as far from 0 as it is: of all ways up
    to 20 differences that are not 0, else (1 + hits) / (1 + draws) of ways drawn by chance.

    >>> sign_flip(np.array([1.0, 2.0, 3.0]))       # of eight ways, +++ and --- reach 6
    (0.25, True)
    """
    moved = differences[~np.isnan(differences) & (differences != 0)]
    # Sums that are equal but for rounding count as equal.
    far = abs(moved.sum()) - 1e-12 * np.abs(moved).sum()
    if len(moved) <= ENUMERATED:
        return float((np.abs(_signed_sums(moved)) >= far).mean()), True
    hits = int((np.abs(_drawn_sums(moved, draws, seed)) >= far).sum())
    return (1 + hits) / (1 + draws), False


def holm(p_values: Floats) -> Floats:
    """P-values corrected for their number by Holm's step-down: [P] -> [P].

    >>> holm(np.array([0.04, 0.01, 0.03])).tolist()
    [0.06, 0.03, 0.06]
    """
    order = np.argsort(p_values, kind="stable")
    steps = p_values[order] * np.arange(len(p_values), 0, -1)
    corrected = np.empty_like(p_values)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return corrected


def resampled_means(values: Floats, resamples: int, seed: int) -> Floats:
    """Means of rows drawn with replacement: [N,columns] -> [resamples,columns]."""
    random, n = np.random.default_rng(seed), len(values)
    at_once = max(1, HELD // n)
    centred = values - values[0]  # equal values stay exactly equal
    means = []
    for start in range(0, resamples, at_once):
        size = min(at_once, resamples - start)
        drawn = random.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n)
        means.append(values[0] + counts @ centred / n)
    return np.concatenate(means)


def _signed_sums(values: Floats) -> Floats:
    """The sum under every way to choose signs: [M] -> [2^M]."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def _drawn_sums(values: Floats, draws: int, seed: int) -> Floats:
    """The sum under signs drawn by chance: [M] -> [draws].

    Eight values at a time: one random byte a draw picks one of their 256 signed sums.
    """
    random, totals = np.random.default_rng(seed), np.zeros(draws)
    padded = np.pad(values, (0, -len(values) % 8))
    for eight in padded.reshape(-1, 8):
        ways = np.frombuffer(random.bytes(draws), np.uint8)
        totals += _signed_sums(eight)[ways]
    return totals
