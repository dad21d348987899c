"""How often 95 % intervals hold the truth, and how often tests see a difference that is not there.

    python benchmarks/coverage.py --out benchmarks/results/coverage-cpu.json

Values like MSI, sampled values, skewed values, and rare events, for few and many images: the
percentile bootstrap, BCa, the bootstrap-t, Student's t, and the interval in use. Then what paired
tests find in few skewed differences, with a mean of 0 and of 1.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from scipy import stats

from sufficit.statistics import sign_flip
from sufficit.sums import LEVEL, moments

COUNTS, RESAMPLES, DRAWS = (5, 10, 20, 50, 200), 600, 400


def msi(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """A base score near 1 or near 0 for most images, less the size of the mask."""
    kind, good, bad, other = (random.random(shape) for _ in range(4))
    base = np.where(kind < 0.55, 1 - 0.15 * good, np.where(kind < 0.8, 0.1 * bad, other))
    return base - random.beta(2, 5, shape)


def few_decide(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """A method that fails on nine images in ten."""
    base = np.where(random.random(shape) < 0.9, 0.05 * random.standard_normal(shape), 0.9)
    return base - 0.3 * random.beta(2, 5, shape)


def skewed(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """A difference that is small for most images and large for some."""
    return random.lognormal(size=shape)


def half_equal(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """A skewed difference between methods that are equal on half of the images."""
    return np.where(random.random(shape) < 0.5, 0, random.gamma(0.7, 1, shape) - 0.7)


def rare(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """An event on one image in twenty."""
    return (random.random(shape) < 0.05).astype(float)


CASES = {
    "MSI": (msi, 0.55 * 0.925 + 0.25 * 0.05 + 0.2 * 0.5 - 2 / 7),
    "few decide": (few_decide, 0.1 * 0.9 - 0.3 * 2 / 7),
    "skewed": (skewed, np.exp(0.5)),
    "half equal": (half_equal, 0.0),
    "rare": (rare, 0.05),
}


def bootstraps(values: np.ndarray, random: np.random.Generator) -> dict[str, tuple[float, float]]:
    """The percentile, BCa and bootstrap-t intervals of a mean: [n]."""
    n, mean = len(values), values.mean()
    rest, edges = values - mean, [0.025, 0.975]
    times = random.multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    means = times @ rest / n
    errors = np.sqrt(np.maximum(times @ rest**2 / n - means**2, 0) / (n - 1))
    found = {"percentile": tuple(mean + np.quantile(means, edges))}
    if not rest.any():
        return found | dict.fromkeys(("BCa", "bootstrap-t"), found["percentile"])
    below = np.clip(
        ((means < 0).mean() + (means <= 0).mean()) / 2, 1 / RESAMPLES, 1 - 1 / RESAMPLES
    )
    bias, speed = stats.norm.ppf(below), (rest**3).sum() / 6 / (rest**2).sum() ** 1.5
    shifted = bias + stats.norm.ppf(edges)
    found["BCa"] = tuple(
        mean + np.quantile(means, stats.norm.cdf(bias + shifted / (1 - speed * shifted)))
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = np.nan_to_num(np.where(errors > 1e-12, means / errors, np.sign(means) * np.inf))
    low, high = np.quantile(drawn, edges, method="nearest")
    error = values.std(ddof=1) / np.sqrt(n)
    return found | {"bootstrap-t": (mean - high * error, mean - low * error)}


def measured(draw, truth: float, n: int) -> dict[str, float]:
    """The share of intervals that hold the truth, and of tests that find a difference."""
    trials = 1000 if n < 200 else 400
    random = np.random.default_rng(n)
    values = draw(random, (trials, n))
    error = values.std(axis=1, ddof=1) / np.sqrt(n) * stats.t.ppf(0.975, n - 1)
    ends = {
        "Student's t": (values.mean(axis=1) - error, values.mean(axis=1) + error),
        "in use": moments(values.T, np.ones_like(values.T, np.int64)).interval(LEVEL),
    }
    drawn = [bootstraps(row, random) for row in values]
    for name in drawn[0]:
        ends[name] = tuple(np.array([one[name] for one in drawn]).T)
    rounding = 1e-12
    shares = {
        name: float(np.mean((low <= truth + rounding) & (truth <= high + rounding)))
        for name, (low, high) in ends.items()
    }
    flips = np.array([sign_flip(row - truth, draws=DRAWS, seed=k)[0] if n != 20 else
                      permuted(row - truth, random) for k, row in enumerate(values)])  # fmt: skip
    both = np.fmax(flips, moments(values.T - truth, np.ones_like(values.T, np.int64)).p_values())
    tests = {"sign flips": flips, "test in use": both}
    return shares | {name: float((p < 0.05).mean()) for name, p in tests.items()}


def permuted(differences: np.ndarray, random: np.random.Generator) -> float:
    """The sign-flip test by draws, where all patterns take too long for a simulation."""
    signs = random.choice([-1.0, 1.0], size=(DRAWS, len(differences)))
    far = np.abs(signs @ differences) >= abs(differences.sum()) * (1 - 1e-12)
    return float((1 + far.sum()) / (1 + DRAWS))


def found_by(n: int, shift: float) -> dict[str, float]:
    """The share of samples in which each test finds a difference, if its tail is below its mean."""
    trials = 2000 if n < 50 else 500
    random = np.random.default_rng(n)
    values = shift + np.exp(0.5) - skewed(random, (trials, n))
    flips = np.array([sign_flip(row, draws=DRAWS, seed=k)[0] for k, row in enumerate(values)])
    own = moments(values.T, np.ones_like(values.T, np.int64)).p_values()
    tests = {
        "test in use": np.fmax(flips, own),
        "sign flips alone": flips,
        "Student's t": stats.ttest_1samp(values, 0, axis=1).pvalue,
        "Wilcoxon": stats.wilcoxon(values, axis=1).pvalue,
    }
    return {name: float((p < 0.05).mean()) for name, p in tests.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    found = {
        name: {n: measured(draw, float(truth), n) for n in COUNTS}
        for name, (draw, truth) in CASES.items()
    }
    names = list(found["MSI"][5])
    print("| values | n | " + " | ".join(names) + " |")
    print("|---" * (2 + len(names)) + "|")
    for case, rows in found.items():
        for n, row in rows.items():
            print(f"| {case} | {n} | " + " | ".join(f"{row[name]:.2f}" for name in names) + " |")
    few = {f"{n}, mean {shift}": found_by(n, shift) for n in (12, 50) for shift in (0, 1)}
    print(json.dumps(few, indent=1))
    if out:
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
