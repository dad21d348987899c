"""Which columns tell good heatmaps from worse ones? Known maps are made worse, level by level.

    python experiments/check_metric.py --model saved/birds --data birds --out checked

In Python `check_metric(classifier, images, heatmaps)` takes any maps, such as the masks of the
objects. Each of four ways makes them worse in five levels. A column is right about a pair of levels
if the lesser change scores better.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas
import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit import Classifier, evaluate, explain
from sufficit.data.images import read_image

Floats = npt.NDArray[np.float64]
LEVELS = 5
NOISE, ERODE = 0.15, 0.15  # per level: share of noise; of the map's sum
SHIFT, RADIUS = 0.06, 0.015  # per level: of the shorter side
RESAMPLES = 1000
SUFFIXES = (".png", ".jpg", ".jpeg")


def _noise(heatmap: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Mixed with uniform noise, the same at every level."""
    drawn = torch.rand(heatmap.shape, generator=generator).to(heatmap)
    return torch.lerp(heatmap, drawn, NOISE * level)


def _shift(heatmap: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Moved in a direction of the image's own; what leaves on one side comes in on the other."""
    far = SHIFT * level * min(heatmap.shape)
    angle = 2 * math.pi * float(torch.rand((), generator=generator))
    steps = round(far * math.sin(angle)), round(far * math.cos(angle))
    return heatmap.roll(steps, (0, 1))


def _dilate(heatmap: Tensor, level: int, _: object = None) -> Tensor:
    """The highest value in a square around each pixel."""
    radius = level * max(1, round(RADIUS * min(heatmap.shape)))
    return F.max_pool2d(heatmap[None, None], 2 * radius + 1, 1, radius)[0, 0]


def _erode(heatmap: Tensor, level: int, _: object = None) -> Tensor:
    """Without what is nearest to its border: a share of its sum, so that every map leaves some."""
    depths, left = torch.zeros_like(heatmap), heatmap
    while left.any():  # the sum over all erosions: of an object, the distance to its border
        depths = depths + left
        left = -F.max_pool2d(F.pad(-left[None], (1, 1, 1, 1)), 3, 1)[0]
    depths = F.avg_pool2d(depths[None, None], 5, 1, 2)[0, 0]  # thin ends before thick ones
    order = depths.flatten().argsort(descending=True, stable=True)
    before = heatmap.flatten()[order].double().cumsum(0) - heatmap.flatten()[order]
    kept = torch.empty_like(order, dtype=torch.bool)
    kept[order] = before < (1 - ERODE * level) * heatmap.sum(dtype=torch.float64) - 1e-9
    return heatmap * kept.view_as(heatmap)


DEGRADATIONS: dict[str, Callable[..., Tensor]] = {
    "noise": _noise,
    "shift": _shift,
    "erode": _erode,
    "dilate": _dilate,
}


def degraded(heatmaps: Tensor, kind: str, level: int, seed: int = 0) -> Tensor:
    """Maps made worse, by seed and the number of the image: [N,H,W] in 0..1 -> [N,H,W].

    >>> degraded(torch.tensor([[[0.0, 1.0, 0.0]]]), "dilate", 1)
    tensor([[[1., 1., 1.]]])
    """
    found = []
    for number, heatmap in enumerate(heatmaps.cpu()):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        found.append(DEGRADATIONS[kind](heatmap, level, generator) if level else heatmap)
    return torch.stack(found)


def check_metric(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Tensor,
    targets: Tensor | None = None,
    *,
    columns: Sequence[str] = ("paper",),
    seed: int = 0,
    **options: Any,
) -> pandas.DataFrame:
    """One row per column and degradation, the best column first; options are those of `evaluate`.

    `by_mean` is the share of rightly ordered pairs of levels by the means over the images, with a
    95 % interval; `by_image` is the same by the values of each image, averaged. 0.5 is chance.
    """
    levels: dict[str, dict[str, list[Tensor]]] = {}  # by column and kind, from level 0 on
    better: dict[str, bool | None] = {}
    for kind in DEGRADATIONS:
        for level in range(LEVELS + 1):
            maps = degraded(heatmaps, kind, level, seed)
            scores = evaluate(
                classifier, images, maps, targets, columns=columns, progress=False, **options
            )
            better |= {name: one.higher_is_better for name, one in scores.summary().items()}
            for name, values in scores.columns.items():
                levels.setdefault(name, {}).setdefault(kind, []).append(values.double())
    rows = []
    for column, kinds in levels.items():
        if better[column] is None:
            continue
        sign = 1 if better[column] else -1
        each = {kind: sign * torch.stack(values, 1).numpy() for kind, values in kinds.items()}
        rows += [_row(column, kind, {kind: one}, seed) for kind, one in each.items()]
        rows.append(_row(column, "all", each, seed))
    best = {row["column"]: row["by_mean"] for row in rows if row["degradation"] == "all"}
    return pandas.DataFrame(sorted(rows, key=lambda row: -best[row["column"]]))


def _row(column: str, kind: str, levels: Mapping[str, Floats], seed: int) -> dict[str, Any]:
    """The shares of rightly ordered pairs, over one degradation or all: {kind: [N,levels]}."""
    by_image = np.mean([ordered(one) for one in levels.values()], axis=0)
    n = len(by_image)
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    draws = np.vstack([np.ones(n, np.int64), draws])
    whole, *resampled = np.mean([ordered(_means(one, draws)) for one in levels.values()], axis=0)
    low, high = np.quantile(resampled, (0.025, 0.975)) if n > 1 else (np.nan, np.nan)
    return {
        "column": column,
        "degradation": kind,
        "by_mean": float(whole),
        "by_mean_low": float(low),
        "by_mean_high": float(high),
        "by_image": float(np.nanmean(by_image)),
        "n": n,
    }


def _means(values: Floats, draws: npt.NDArray[np.int64]) -> Floats:
    """Mean of each level over drawn images, NaN left out: [N,L], [R,N] -> [R,L]."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        found: Floats = (draws @ np.where(known, values, 0.0)) / (draws @ known)
    return found


def ordered(values: Floats) -> Floats:
    """Share of the pairs of levels, least changed first, whose values fall: [N,L] -> [N].

    Equal values count one half; a row with NaN is NaN.

    >>> ordered(np.array([[3.0, 2, 1], [1, 2, 3], [1, 1, 1], [2, 1, 1]])).round(3).tolist()
    [1.0, 0.0, 0.5, 0.833]
    """
    falls = [
        # Equal up to rounding is a tie: a shifted map has the same sparseness in another order.
        np.sign(values[:, a] - values[:, b])
        * ~np.isclose(values[:, a], values[:, b], rtol=1e-6, atol=1e-9)
        for a, b in combinations(range(values.shape[1]), 2)
    ]
    found: Floats = (1 + np.mean(falls, axis=0)) / 2
    return found


def main() -> None:
    """Check the columns on the maps of a method for the images of a folder."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--model", required=True)
    words.add_argument("--data", type=Path, required=True)
    words.add_argument("--method", default="gradcam")
    words.add_argument("--images", type=int, default=100)
    words.add_argument("--columns", default="paper")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--out", type=Path, required=True)
    asked = words.parse_args()
    classifier = Classifier.load(asked.model)
    files = sorted(path for path in asked.data.rglob("*") if path.suffix.lower() in SUFFIXES)
    chosen = np.random.default_rng(asked.seed).permutation(len(files))[: asked.images]
    images = torch.stack([read_image(files[i], classifier.view) for i in sorted(chosen)])
    heatmaps = explain(classifier, images, method=asked.method)
    found = check_metric(
        classifier, images, heatmaps, columns=asked.columns.split(","), seed=asked.seed
    )
    asked.out.mkdir(parents=True, exist_ok=True)
    found.to_csv(asked.out / "check.csv", index=False)
    print(found[found["degradation"] == "all"].to_string(index=False))


if __name__ == "__main__":
    main()
