"""The columns: one entry per metric, with the bands it asks for, and its formula.

To add a metric, add a line to METRICS and its words to columns.toml, or pass your own to
`evaluate(metrics={name: Metric(...)})`.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from sufficit.errors import UserError
from sufficit.metrics.artefacts import ARTEFACTS
from sufficit.metrics.further_columns import FURTHER, RANK
from sufficit.metrics.localization import LOCALIZATION
from sufficit.metrics.metric import (
    CURVES,
    Heading,
    Metric,
    Schedule,
    curve_weights,
    mean_weights,
    no_bands,
    weighted,
)
from sufficit.perturbation import bands
from sufficit.perturbation.bands import Band
from sufficit.perturbation.predictions import Predictions

ALPHA = "\u03b1"
UNKNOWN = Heading("", "")


def higher_is_better(column: str) -> bool | None:
    """Return the direction of a column, None where it has none.

    >>> higher_is_better("deletion_pixel_blur"), higher_is_better("msi_mean")
    (False, True)
    """
    if column in OTHER_COLUMNS:
        return OTHER_COLUMNS[column]
    return METRICS[repeated(column) or column].higher_is_better


def limits(column: str) -> tuple[float, float]:
    """Return the lowest and highest value that a column can have.

    >>> limits("deletion_pixel_blur"), limits("msi_mean"), limits("fill_drop")
    ((0.0, 1.0), (-2.0, 1.0), (-inf, inf))
    """
    low, high = HEADINGS.get(repeated(column) or column, UNKNOWN).limits
    return low, high


def repeated(column: str, known: Iterable[str] | None = None) -> str | None:
    """Return the metric that a column is of; other fills and a twin add a suffix to its name.

    >>> repeated("fid_plus_pixel_twin_blur"), repeated("msi"), repeated("leak")
    ('fid_plus_pixel', 'msi', None)
    """
    names = METRICS if known is None else known
    fitting = [name for name in names if column == name or column.startswith(f"{name}_")]
    return max(fitting, key=len, default=None)


def heading(column: str) -> Heading:
    """Return the heading of a column or curve; a metric of the user's own is called by its name.

    >>> heading("msi").short, heading("my_metric").long, heading("msi_twin_blur").long
    ('MSI', 'my_metric', 'MSI (twin, fill blur)')
    """
    if column in HEADINGS or (stem := repeated(column)) is None:
        return HEADINGS.get(column, Heading(column, column))
    words, key = HEADINGS[stem], column[len(stem) + 1 :]
    twin = key == "twin" or key.startswith("twin_")
    fill = key.removeprefix("twin").strip("_") if twin else key
    fill = "mean" if fill == "mean_fill" else fill
    where = ", ".join(["twin"] * twin + [f"fill {fill}"] * bool(fill))
    meaning = f"{words.meaning} Scored with {where.replace('twin', 'the twin')}."
    return Heading(f"{words.short} {key.replace('_', ' ')}", f"{words.long} ({where})", meaning)


def alpha_from(value: object, wanted: str = "a number in 0..1") -> float:
    """Return an alpha_min as a float in 0..1, or raise."""
    try:
        alpha = float(value)  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError) as error:
        raise UserError(f"alpha_min must be {wanted}, got {value!r}") from error
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha_min must lie in 0..1, got {alpha:g}: the default is 0.5")
    return alpha


def base_weights(schedule: Schedule) -> dict[Band, float]:
    """1/2 [ Show(>a_min) - Show(<=a_min) + mean Show(>a) - mean Hide(>a) ], a in a_min..1."""
    means, found = mean_weights(schedule.alphas), dict[Band, float]()
    for name, half in (("show", 1 / 2), ("hide", -1 / 2)):
        points = CURVES[name](schedule).values()
        found |= {band: half * w for band, w in zip(points, means, strict=True)}
    found[bands.show(schedule.alpha_min)] += 1 / 2
    return found | {bands.rest(schedule.alpha_min): -1 / 2}


def base_score(predictions: Predictions, schedule: Schedule) -> Tensor:
    """The sum of `base_weights` x score, or its estimate where some bands were drawn: [N]."""
    return predictions.total(base_weights(schedule), schedule.score)


def mask_penalty(predictions: Predictions, schedule: Schedule) -> Tensor:
    """Share of the pixels at or above a_min: [N]."""
    return predictions.share(*_penalty_bands(schedule))


def msi(predictions: Predictions, schedule: Schedule) -> Tensor:
    """BaseScore - MaskPenalty: [N]."""
    return base_score(predictions, schedule) - mask_penalty(predictions, schedule)


def _penalty_bands(schedule: Schedule) -> list[Band]:
    return [bands.at_least(schedule.alpha_min)]


def _fidelity_metric(curve: str) -> Metric:
    """Area of |p_y(x) - p_y(masked x)|: Fid- (lower is better) of insertion, Fid+ of deletion."""
    weights, whole = curve_weights(curve), [bands.EVERYTHING]

    def formula(predictions: Predictions, schedule: Schedule) -> Tensor:
        known = predictions.of(whole, "confidence")
        return predictions.total(weights(schedule), "confidence", lambda p: (known - p).abs())

    return Metric(curve.startswith("deletion"), lambda _: whole, formula, weights=weights)


_PAPER: dict[str, Metric] = {
    "insertion_pixel": weighted(True, curve_weights("insertion_pixel")),
    "deletion_pixel": weighted(False, curve_weights("deletion_pixel")),
    "insertion_percent": weighted(True, curve_weights("insertion_percent")),
    "deletion_percent": weighted(False, curve_weights("deletion_percent")),
    "fid_minus_pixel": _fidelity_metric("insertion_pixel"),
    "fid_plus_pixel": _fidelity_metric("deletion_pixel"),
    "fid_minus_percent": _fidelity_metric("insertion_percent"),
    "fid_plus_percent": _fidelity_metric("deletion_percent"),
    "base_score": Metric(True, no_bands, base_score, weights=base_weights),
    "mask_penalty": Metric(False, no_bands, mask_penalty, _penalty_bands),
    "msi": Metric(True, no_bands, msi, _penalty_bands, weights=base_weights),
}
METRICS: dict[str, Metric] = {**_PAPER, "msi_rank": RANK, **FURTHER, **ARTEFACTS, **LOCALIZATION}
COLUMNS: tuple[str, ...] = tuple(_PAPER)  # those of the paper's tables, the default

_FOUND = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))
OTHER_COLUMNS: dict[str, bool | None] = {
    name: words.pop("higher_is_better", None) for name, words in _FOUND["others"].items()
}  # columns that need more than the plan's predictions: whether higher is better
HEADINGS = {name: Heading(**words) for part in _FOUND.values() for name, words in part.items()}
