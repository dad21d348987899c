"""Runs that stop when MSI is precise enough: at which sizes they look, and what they say then.

The sizes are known before the run, and every look has its share of the error (`Chance.split`), so
that the interval at the end is valid wherever a run stops. Images are in random order by seed: the
first ones are a random sample of all. Controls may be less precise, because they are not ranked.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sufficit.runs.job import Job
from sufficit.statistics import Chance, Estimate

FIRST = 200  # images at the first look; each look has twice as many as the one before


def look_sizes(images: int, unit: int) -> list[int]:
    """The number of units at each look: those of 200, 400, 800, ... images, then all.

    >>> look_sizes(1000, 32)
    [7, 13, 25, 32]
    """
    doublings = max(0, (images - 1) // FIRST).bit_length()
    counts = [*(FIRST * 2**k for k in range(doublings)), images]
    return sorted({-(-count // unit) for count in counts})


def looks(job: Job) -> Iterator[Job]:
    """The job of each look, on more and more images; without `within` one, on all."""
    return (replace(job, part=size) for size in _sizes(job))


def chance_of(job: Job) -> Chance:
    """The settings of a run's intervals and tests: a share of the error for each look."""
    return Chance.split(len(_sizes(job)), job.config.seed)


def half_width(found: Sequence[Estimate]) -> float:
    """Half the width of the widest interval; NaN where one is unknown."""
    return float(np.max([(one.high - one.low) / 2 for one in found]))


def outcome(job: Job, summaries: Mapping[str, Mapping[str, Estimate]]) -> dict[str, Any] | None:
    """What run.json says of a run with `within`: None without."""
    within, sizes, units = job.config.within, _sizes(job), job.units
    if within is None:
        return None
    half = half_width([summaries[name]["msi"] for name in job.ranked])
    n, total = units.images_in(range(len(units))), len(job.entries)
    reached = len(units) < sizes[-1] or half <= within
    if reached:
        words = f"MSI of every method is known to ± {half:.2g} (--within {within:g}) from {n:,} of"
        words += f" {total:,} images, in random order."
    else:
        words = f"All {total:,} images are scored, and MSI is known to ± {half:.2g} only, not to ±"
        words += f" {within:g} (--within): that takes about {n * (half / within) ** 2:,.0f} images."
    if len(sizes) > 1:
        words += f" Intervals and tests allow for up to {len(sizes)} looks at the results."
    known = {"target": within, "half_width": half, "reached": reached, "images": n, "of": total}
    return known | {"looks": [units.images_in(range(size)) for size in sizes], "words": words}


def _sizes(job: Job) -> list[int]:
    images, unit = len(job.entries), job.entries.unit
    return [-(-images // unit)] if job.config.within is None else look_sizes(images, unit)
