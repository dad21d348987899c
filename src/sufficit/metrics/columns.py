"""The columns that Sufficit has: one entry per metric, with its direction, bands and formula.

MSI, its two parts and the paper's other columns are defined here; METRICS joins them with those of
`further_columns`, `artefacts`, `localization` and `through_map`. To add a metric, add an entry to
the dict of one of these modules and its words to columns.toml, or pass your own to
`evaluate(metrics={name: Metric(...)})`.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from torch import Tensor

from sufficit.errors import UserError, unknown
from sufficit.metrics.artefacts import ARTEFACTS
from sufficit.metrics.column import CANDIDATE, FURTHER_GROUP, Column, Heading, RankColumn
from sufficit.metrics.further_columns import FURTHER, RANK, WHOLE_CURVES
from sufficit.metrics.localization import LOCALIZATION
from sufficit.metrics.metric import (
    CURVES,
    AnyMetric,
    DerivedMetric,
    Metric,
    Schedule,
    curve_weights,
    mean_weights,
    no_bands,
    weighted,
)
from sufficit.metrics.through_map import THROUGH_MAP
from sufficit.perturbation import bands
from sufficit.perturbation.bands import Band
from sufficit.perturbation.predictions import Predictions

ALPHA = "\u03b1"
GROUPS = ("paper", "all")  # words for several columns
ZERO_LINE = "everything"
ZERO_LABEL = f"{ZERO_LINE} (zero line)"
"""The control that marks the whole image: a map with a lower MSI is worse than that."""
ALPHA_GRID: tuple[float, ...] = tuple(i / 20 for i in range(1, 20))
TAKEN = (
    *("image", "target", "clean_accuracy", "calls"),  # columns of tables
    *("answers", "columns", "headings", "alpha_min", "search", "leaked", "targets"),  # of Scores
    *("leak_ratio", "clean", "mean", "summary", "nan_counts", "schedule"),
    *("curves", "mean_curves", "frame", "plot", "_repr_html_", "sampled"),
)  # names that a metric must not have


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
    means = mean_weights(schedule.alphas)
    found = dict[Band, float]()
    for name, half in (("show", 1 / 2), ("hide", -1 / 2)):
        points = CURVES[name](schedule).values()
        found |= {band: half * w for band, w in zip(points, means, strict=True)}
    found[bands.show(schedule.alpha_min)] += 1 / 2
    return found | {bands.rest(schedule.alpha_min): -1 / 2}


def base_score(predictions: Predictions, schedule: Schedule) -> Tensor:
    """The sum of `base_weights` x score, or its estimate where some bands were drawn: [N]."""
    return predictions.total(base_weights(schedule), schedule.score)


def mask_penalty(predictions: Predictions, schedule: Schedule) -> Tensor:
    """Share of the pixels at or above a_min, the size of the mask: [N]."""
    # `predict` has counted the pixels of each band.
    return predictions.share(*_penalty_bands(schedule))


def msi(predictions: Predictions, schedule: Schedule) -> Tensor:
    """BaseScore - MaskPenalty: [N]."""
    return base_score(predictions, schedule) - mask_penalty(predictions, schedule)


def _penalty_bands(schedule: Schedule) -> list[Band]:
    return [bands.at_least(schedule.alpha_min)]


def _fidelity_metric(curve: str) -> Metric:
    """Area of |p_y(x) - p_y(masked x)|: Fid- (lower is better) of insertion, Fid+ of deletion."""
    weights = curve_weights(curve)
    whole = [bands.EVERYTHING]

    def formula(predictions: Predictions, schedule: Schedule) -> Tensor:
        known = predictions.of(whole, "confidence")
        return predictions.total(weights(schedule), "confidence", lambda p: (known - p).abs())

    return Metric(
        higher_is_better=curve.startswith("deletion"),
        asks=lambda _: whole,
        formula=formula,
        weights=weights,
    )


_PAPER: dict[str, Metric] = {
    "insertion_pixel": weighted(higher_is_better=True, weights=curve_weights("insertion_pixel")),
    "deletion_pixel": weighted(higher_is_better=False, weights=curve_weights("deletion_pixel")),
    "insertion_percent": weighted(
        higher_is_better=True, weights=curve_weights("insertion_percent")
    ),
    "deletion_percent": weighted(higher_is_better=False, weights=curve_weights("deletion_percent")),
    "fid_minus_pixel": _fidelity_metric("insertion_pixel"),
    "fid_plus_pixel": _fidelity_metric("deletion_pixel"),
    "fid_minus_percent": _fidelity_metric("insertion_percent"),
    "fid_plus_percent": _fidelity_metric("deletion_percent"),
    "base_score": Metric(
        higher_is_better=True, asks=no_bands, formula=base_score, weights=base_weights
    ),
    "mask_penalty": Metric(
        higher_is_better=False, asks=no_bands, formula=mask_penalty, weighs=_penalty_bands
    ),
    "msi": Metric(
        higher_is_better=True,
        asks=no_bands,
        formula=msi,
        weighs=_penalty_bands,
        weights=base_weights,
    ),
}
METRICS: dict[str, AnyMetric] = {
    **_PAPER,
    "msi_rank": RANK,
    **FURTHER,
    **ARTEFACTS,
    **LOCALIZATION,
    **THROUGH_MAP,
}
COLUMNS: tuple[str, ...] = tuple(_PAPER)  # those of the paper's tables, the default

ENDLESS = (-inf, inf)
_WORDS = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))
HEADINGS: dict[str, Heading] = {
    name: Heading(**{"group": "", **words, "limits": tuple(words.get("limits", ENDLESS))})
    for part in _WORDS.values()
    for name, words in part.items()
}
TRUTH_GROUP = "Compared with the truth"


def heading_of(name: str, metric: AnyMetric | None = None) -> Heading:
    """Return the heading of a column or curve; a metric of the user's is called by its name.

    >>> heading_of("msi").short, heading_of("my_metric").long
    ('MSI', 'my_metric')
    """
    known = METRICS.get(name) if metric is None else metric
    found = HEADINGS.get(name, Heading(name, name))
    if name in LOCALIZATION:
        found = replace(found, group=TRUTH_GROUP)
    elif name in {**FURTHER, **ARTEFACTS, **THROUGH_MAP}:
        found = replace(found, group=FURTHER_GROUP)
    if known is None:
        return found
    return replace(found, higher_is_better=known.higher_is_better)


def column_of(name: str, metric: Metric, schedule: Schedule) -> Column:
    """Return a metric of bands as a column."""
    kind = RankColumn if metric is RANK else Column
    return kind(name, metric, (schedule,), heading_of(name, metric))


def check_metrics(metrics: Mapping[str, AnyMetric] | None) -> dict[str, AnyMetric]:
    """Return the user's metrics, or raise for what is none and for a name that is taken."""
    if not isinstance(metrics or {}, Mapping):
        raise UserError(
            "metrics must be a dict of your own sufficit.metrics.Metric by name, got"
            f" {metrics!r:.99}: give columns= for those that Sufficit has"
        )
    own = dict(metrics or {})
    for name, metric in own.items():
        if not isinstance(metric, AnyMetric):
            raise UserError(
                f"metrics must be sufficit.metrics.Metric by name, got {type(metric).__name__} for"
                f" {name!r}"
            )
        taken = name in {*HEADINGS, *TAKEN} or name.startswith("__") or CANDIDATE in name
        if taken:
            raise UserError(f"cannot call a metric {name!r}: the name is taken, choose another")
    return own


def metrics_named(
    columns: Sequence[str] | None,
    own: Mapping[str, AnyMetric],
    *,
    truth: bool,
    sampled: bool,
) -> dict[str, AnyMetric]:
    """Return the metrics of names and groups by name, each once.

    None means the paper's. The user's `own` are added to a group, and the columns that compare
    with a truth where there is one, unless some of them are named. Columns of the image through
    the map are in no group: they cost further forward passes, or draw every map again.
    """
    words = ["paper"] if columns is None else [columns] if isinstance(columns, str) else columns
    found: list[str] = []
    for word in words:
        if word in GROUPS:
            group = COLUMNS if word == "paper" else METRICS
            left_out = {*LOCALIZATION, *THROUGH_MAP, *(WHOLE_CURVES if sampled else ())}
            found += [name for name in group if name not in left_out]
            found += own
        elif word in LOCALIZATION and not truth:
            raise UserError(f"{word} compares heatmaps with where the object is: give the truth")
        elif word in METRICS or word in own:
            known = own.get(word) or METRICS[word]
            # What it is computed from is computed first, and shown.
            found += known.of if isinstance(known, DerivedMetric) else ()
            found.append(word)
        else:
            raise unknown("column", word, (*GROUPS, *METRICS, *own))
    if not found:
        raise UserError("columns must name at least one column, got none: leave it out for all")
    if truth and not {*found} & {*LOCALIZATION}:
        found += LOCALIZATION
    return {name: own[name] if name in own else METRICS[name] for name in dict.fromkeys(found)}


def alphas_from(alphas: Sequence[float]) -> list[float]:
    """Return the values of alpha_min to try, sorted; raise where there is none."""
    tried = sorted({alpha_from(alpha, 'a number in 0..1 or "search"') for alpha in alphas})
    if not tried:
        raise UserError("alphas must name at least one alpha_min in 0..1 to try, got none")
    return tried
