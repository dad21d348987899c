"""Results of scores in memory: a summary with intervals, and rows on disk."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from sufficit.intervals import Estimate, estimates, ratio_estimate
from sufficit.metrics.scores import Scores
from sufficit.provenance import plain, provenance, save_json, surroundings

__all__ = ["Estimate", "as_json", "plain", "provenance", "save_json", "summarise", "surroundings"]


def summarise(scores: Scores, *, seed: int = 0) -> dict[str, Estimate]:
    """Mean and interval of every column, and of the leak's ratio where it was measured."""
    values = {name: column.numpy().astype(np.float64) for name, column in scores.columns.items()}
    directions = {name: scores.plan.higher_is_better(name) for name in values}
    summary = estimates(values, directions, seed=seed)
    if scores.leaked is not None:
        summary["leak_ratio"] = ratio_estimate(values["leak"], values["leak_chance"], seed=seed)
    return summary


def as_json(summary: Mapping[str, Estimate]) -> dict[str, dict[str, Any]]:
    """A summary as plain values, NaN as None."""
    return {name: plain(asdict(estimate)) for name, estimate in summary.items()}
