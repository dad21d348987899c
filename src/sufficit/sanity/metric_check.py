"""Does a column tell good heatmaps from worse ones? Known maps are made worse, level by level.

The maps are the truth, or those of the best method. Each of four ways makes them worse in five
levels, and all of them are sources of one run. A column is right about a pair of levels if the
lesser change scores better.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.classifier.checkpoint import View
from sufficit.classifier.classifier import Classifier
from sufficit.data.images import BadImageError, ImageSource, drawn, open_images
from sufficit.data.loader import Entry
from sufficit.data.truth import OBJECT, Truth, TruthError, TruthMasks, truth_from
from sufficit.errors import UserError
from sufficit.files import writing
from sufficit.metrics.columns import higher_is_better
from sufficit.perturbation.sampling import uniforms
from sufficit.progress import Progress
from sufficit.provenance import plain, save_json
from sufficit.runs.config import RunConfig, Workers
from sufficit.runs.engine import run
from sufficit.runs.job import load_model, make_job
from sufficit.runs.maps import GivenMaps, MapFile
from sufficit.runs.results import RunResults
from sufficit.statistics import Estimate, estimates_of
from sufficit.sums import sums_of

if TYPE_CHECKING:
    import pandas

LEVELS = 5
NOISE, ERODE = 0.15, 0.15  # per level: share of noise; of the map's sum
SHIFT, RADIUS = 0.06, 0.015  # per level: of the shorter side
ORIGINAL = "original"
RESAMPLES = 1000


def _noise(heatmap: Tensor, level: int, chance: "np.ndarray[Any, Any]") -> Tensor:
    """Mixed with uniform noise, the same at every level."""
    drawn = torch.from_numpy(chance[1:]).view(heatmap.shape).to(heatmap)
    return torch.lerp(heatmap, drawn, NOISE * level)


def _shift(heatmap: Tensor, level: int, chance: "np.ndarray[Any, Any]") -> Tensor:
    """Moved in a direction of the image's own; what leaves on one side comes in on the other."""
    far, angle = SHIFT * level * min(heatmap.shape), 2 * math.pi * chance[0]
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


def degrade(heatmap: Tensor, kind: str, level: int, *, seed: int, name: str) -> Tensor:
    """Return a map made worse, by seed and image name: [h,w] in 0..1 -> [h,w].

    >>> degrade(torch.tensor([[0.0, 1.0, 0.0]]), "dilate", 1, seed=0, name="a.png")
    tensor([[1., 1., 1.]])
    """
    chance = uniforms(seed, f"degrade/{name}", 1 + heatmap.numel() * (kind == "noise"))
    return DEGRADATIONS[kind](heatmap, level, chance) if level else heatmap


@dataclass(frozen=True)
class TruthMaps(GivenMaps):
    """The truth as heatmaps: 1 on the object."""

    truth: Truth
    view: View | None

    def check(self, names: Sequence[str]) -> None:
        """Raise unless an image has a truth."""
        self.truth.check(names)

    def read(self, entry: Entry) -> Tensor:
        """The map of an image: [H,W]."""
        try:
            found = (self.truth.read(entry, self.view) == OBJECT).float()
        except TruthError as error:
            raise BadImageError(str(error)) from error
        if not found.any():
            raise BadImageError("it has no truth in the model's view")
        return found

    def digest(self) -> str:
        """What tells these maps from others."""
        return self.truth.digest()


@dataclass(frozen=True)
class DegradedMaps(GivenMaps):
    """The maps of another source, made worse."""

    base: GivenMaps
    kind: str
    level: int
    seed: int

    def check(self, names: Sequence[str]) -> None:
        """Nothing: the maps that it is made from are a source too."""

    def read(self, entry: Entry) -> Tensor:
        """The map of an image: [h,w] in 0..1."""
        found, name = self.base.read(entry), entry.image.name
        return degrade(found, self.kind, self.level, seed=self.seed, name=name)

    def digest(self) -> str:
        """What tells these maps from others."""
        return f"{self.base.digest()}, {self.kind} {self.level}, seed {self.seed}"

    def close(self) -> None:
        """Close the files of the other source."""
        self.base.close()


@dataclass(frozen=True)
class ColumnCheck:
    """How often a column orders the levels of one degradation rightly; ties count one half."""

    column: str
    kind: str  # of DEGRADATIONS, or "all"
    by_mean: Estimate  # share of the pairs of levels, by the means over the images
    by_image: Estimate  # the same by the values of each image, averaged


@dataclass(frozen=True)
class MetricCheck:
    """The result: which columns tell good heatmaps from worse ones."""

    base: str  # whose maps were made worse
    n: int
    checks: tuple[ColumnCheck, ...]
    results: RunResults

    def frame(self) -> "pandas.DataFrame":
        """One row per column and degradation, the best column first."""
        import pandas

        best = {c.column: c.by_mean.mean for c in self.checks if c.kind == "all"}
        rows = [
            {"column": one.column, "degradation": one.kind}
            | {f"{which}{end}": getattr(getattr(one, which), part)
               for which in ("by_mean", "by_image")
               for end, part in (("", "mean"), ("_low", "low"), ("_high", "high"))}
            for one in sorted(self.checks, key=lambda c: -best[c.column])
        ]  # fmt: skip
        return pandas.DataFrame(rows)

    def save(self, folder: Path) -> None:
        """Write check.csv, check.json and check.png."""
        from sufficit import plots

        with writing(folder / "check.csv") as path:
            self.frame().to_csv(path, index=False)
        known = {"base": self.base, "n": self.n, "levels": LEVELS, "seed": self.results.config.seed}
        checks = [plain(one) for one in self.checks]
        save_json(folder / "check.json", {**known, "checks": checks})
        plots.save(plots.check_figure(self.frame(), self.base, self.n), folder / "check.png")


def check_metric(
    config: RunConfig,
    out: Path,
    *,
    classifier: Classifier | None = None,
    images: ImageSource | None = None,
    truth: Truth | None = None,
    overwrite: bool = False,
    progress: bool | Progress | None = None,
    workers: Workers | None = None,
) -> MetricCheck:
    """Make the truth's maps, or the best method's, worse, and check which columns notice.

    At most `config.images` are drawn by the seed. Run again with the same folder, it resumes.
    """
    classifier = load_model(config, layer=None) if classifier is None else classifier
    images = open_images(config.data, **config.column_options()) if images is None else images
    listed = list(images)
    some = listed if config.images is None else drawn(listed, config.images, config.seed)
    images = ImageSource(some, images.classes)
    truth = truth_from(config.truth) if truth is None else truth
    if isinstance(truth, TruthMasks):
        places = {id(image): row for row, image in enumerate(listed)}
        truth = replace(truth, masks=truth.masks[[places[id(image)] for image in some]])
    how: Any = {"overwrite": overwrite, "progress": progress, "workers": workers}
    quiet: Any = {"images": None, "leak": False, "controls": False, "alpha_curve": False}
    quiet["held_out_fill"] = "none"
    config = replace(config, **quiet)
    base: GivenMaps
    if truth is not None:
        base, name = TruthMaps(truth, classifier.view), "truth"
        config = replace(config, truth=config.truth or "masks in memory")
    else:
        first = replace(config, columns=("msi",), save_heatmaps=True)
        found = run(make_job(first, classifier=classifier, images=images), out / "methods", **how)
        if found.standing is None:
            raise UserError("no method was scored: check the images and the methods")
        name = found.standing.best
        base = MapFile(out / "methods" / name / "heatmaps.npz")
    sources: dict[str, Any] = {ORIGINAL: base}
    for kind in DEGRADATIONS:
        for level in range(1, LEVELS + 1):
            sources[f"{kind}-{level}"] = DegradedMaps(base, kind, level, config.seed)
    config = replace(config, methods=tuple(sources), columns=config.columns or ("all",))
    given: Any = {"classifier": classifier, "images": images, "sources": sources, "truth": truth}
    results = run(make_job(config, **given), out / "degraded", **how)
    return MetricCheck(name, results.n, tuple(_checks(results, config.seed)), results)


def _checks(results: RunResults, seed: int) -> list[ColumnCheck]:
    found = []
    for column in results.rows.columns(ORIGINAL):
        better = higher_is_better(column)
        if better is None:
            continue
        sign, levels = 1 if better else -1, {}
        for kind in DEGRADATIONS:
            names = [ORIGINAL, *(f"{kind}-{level}" for level in range(1, LEVELS + 1))]
            values = [results.rows.column(name, column) for name in names]
            levels[kind] = sign * np.stack(values, axis=1).astype(np.float64)  # [N,levels]
        found += [_check(column, kind, {kind: one}, seed) for kind, one in levels.items()]
        found.append(_check(column, "all", levels, seed))
    return found


def _check(
    column: str, kind: str, levels: "Mapping[str, np.ndarray[Any, Any]]", seed: int
) -> ColumnCheck:
    """The shares of rightly ordered pairs, over one degradation or all: {kind: [N,levels]}."""
    by_image = np.mean([ordered(one) for one in levels.values()], axis=0)
    limits = lambda _: (0, 1)  # noqa: E731  # of a share
    each = estimates_of(sums_of({"": by_image}, seed=seed), {"": True}, limits=limits)[""]
    n = len(by_image)
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    whole, *resampled = np.mean(
        [ordered(_means(one, np.vstack([np.ones(n, np.int64), draws]))) for one in levels.values()],
        axis=0,
    )
    low, high = np.quantile(resampled, (0.025, 0.975)) if n > 1 else (np.nan, np.nan)
    missing = int(np.isnan(by_image).sum())
    mean = replace(each, mean=float(whole), low=float(low), high=float(high), n_nan=missing)
    return ColumnCheck(column, kind, by_mean=mean, by_image=each)


def _means(values: "np.ndarray[Any, Any]", draws: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Mean of each level over drawn images, NaN left out: [N,L], [R,N] -> [R,L]."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        found: np.ndarray[Any, Any] = (draws @ np.where(known, values, 0.0)) / (draws @ known)
    return found


def ordered(values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Share of the pairs of levels, least changed first, whose values fall: [N,L] -> [N].

    Equal values count one half; a row with NaN is NaN.

    >>> ordered(np.array([[3.0, 2, 1], [1, 2, 3], [1, 1, 1], [2, 1, 1]])).round(3).tolist()
    [1.0, 0.0, 0.5, 0.833]
    """
    pairs = list(combinations(range(values.shape[1]), 2))
    falls = [
        # Equal up to rounding is a tie: a shifted map has the same sparseness in another order.
        np.sign(values[:, a] - values[:, b])
        * ~np.isclose(values[:, a], values[:, b], rtol=1e-6, atol=1e-9)
        for a, b in pairs
    ]
    found: np.ndarray[Any, Any] = (1 + np.mean(falls, axis=0)) / 2
    return found
