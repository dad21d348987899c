"""Conditions: the model or its twin, and the fill, that all heatmaps are scored under."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from torch import Tensor

from sufficit.classifier.classifier import Classifier, check_classifier
from sufficit.errors import UserError
from sufficit.metrics.columns import METRICS, OTHER_COLUMNS
from sufficit.metrics.plan import Plan, ask
from sufficit.perturbation.fills import FILLS, check_fill
from sufficit.perturbation.predictions import Predictions
from sufficit.progress import Progress, stage

HELD_OUT, TWIN = "held_out", "twin"  # keys
FEW, FEW_SEARCHED = 8, 40
"""Masks per image of a held-out fill that nobody asked for, and while alpha_min is searched for."""
Fill = str | Tensor


@dataclass(frozen=True)
class Condition:
    """What answers for masked images: the model or its twin, with one fill for hidden pixels."""

    fill: Fill = "black"
    key: str = ""  # the end of its columns' names; the first condition has none
    twin: bool = False
    columns: tuple[str, ...] | None = None  # None: all that ask the model
    calls: int | None = None  # masks per image, at most; None: as the plan says

    def column(self, name: str) -> str:
        """What a column is called under this condition."""
        return f"{name}_{self.key}" if self.key else name

    def plan(self, plan: Plan) -> Plan:
        """What is asked under this condition; a column of the map alone is not repeated."""
        return plan.part(self.columns or plan.columns, self.calls) if self.key else plan


FIRST = Condition()


def make_conditions(
    plan: Plan,
    fills: Sequence[Fill],
    held_out: Fill | None = None,
    *,
    names: Sequence[str] | None = None,
    twin: bool = False,
    few: bool = False,
) -> tuple[Condition, ...]:
    """Return the conditions of some fills, of a held-out fill, and of a twin, once checked.

    `names` are those of the fills in columns; `few` asks few masks with the held-out fill.
    """
    if not fills:
        raise UserError("fills must name at least one fill, got none: black is the default")
    keys = [key_of(fill, k) for k, fill in enumerate(names or fills)]
    if twice := [key for k, key in enumerate(keys) if key in keys[:k]]:
        raise UserError(
            f"two fills would be called {twice[0]!r} in columns: give each fill once, and files"
            " different names"
        )
    found = [Condition(fill, end) for end, fill in zip(["", *keys[1:]], fills, strict=True)]
    if held_out is not None:
        if "msi" not in plan.columns:
            raise UserError('held_out_fill scores MSI a second time: add "msi" to columns')
        if isinstance(held_out, str) and held_out in [f for f in fills if isinstance(f, str)]:
            raise UserError(f"fill and held_out_fill are both {held_out!r}: hold another fill out")
        calls = _few_calls(plan) if few else None
        found.append(Condition(held_out, HELD_OUT, columns=("msi",), calls=calls))
    if twin:
        ends = [TWIN, *(f"{TWIN}_{key}" for key in keys[1:])]
        found += [Condition(fill, end, twin=True) for end, fill in zip(ends, fills, strict=True)]
    taken = {*plan.columns, *METRICS, *OTHER_COLUMNS} - {"msi_held_out"}
    for condition in found[1:]:
        columns = condition.plan(plan).columns
        if not columns:
            raise UserError(
                f"{', '.join(plan.columns)} ask the model nothing, so that no fill or twin changes"
                " them: add a column such as msi, or give one fill"
            )
        own = {condition.column(name) for name in columns}
        if same := sorted(own & taken):
            raise UserError(
                f"two columns would be called {same[0]!r}: give the fill's file, or the metric,"
                " another name"
            )
        taken |= own
    return tuple(found)


def _few_calls(plan: Plan) -> int:
    """Return FEW masks, or as many as MSI needs at least, which coarse curves raise."""
    calls = FEW_SEARCHED if plan.searching else FEW
    while True:
        try:
            plan.part(["msi"], calls).sampling  # noqa: B018 - raises for too few
        except UserError:
            calls += 1
        else:
            return calls


def key_of(fill: Fill, place: int) -> str:
    """Return what columns call a fill: its name, that of its file, or its place among the fills.

    The fill `mean` is called mean_fill, because msi_mean is the mean over fills.

    >>> key_of("blur", 1), key_of("mean", 2), key_of("fills/Tall grass.png", 3)
    ('blur', 'mean_fill', 'tall_grass')
    """
    if not isinstance(fill, str):
        return f"fill{place + 1}"
    if fill in FILLS:
        return "mean_fill" if fill == "mean" else fill
    return re.sub(r"\W+", "_", PurePath(fill).stem.lower()).strip("_") or f"fill{place + 1}"


def groups_of(conditions: Sequence[Condition]) -> dict[str, list[str]]:
    """Return the columns that msi_mean, and msi_mean_twin, are means of: MSI with every fill.

    >>> groups_of([Condition(), Condition("blur", "blur"), Condition("blur", "twin", twin=True)])
    {'': ['msi', 'msi_blur']}
    """
    found: dict[str, list[str]] = {}
    for condition in conditions:
        if condition.key != HELD_OUT:
            found.setdefault(f"_{TWIN}" * condition.twin, []).append(condition.column("msi"))
    return {end: names for end, names in found.items() if len(names) > 1}


def check_twin(classifier: Classifier, twin: Classifier) -> None:
    """Raise unless both have the same classes and see images alike, as far as they say so."""
    check_classifier(twin)
    if None not in (known := (classifier.classes, twin.classes)) and known[0] != known[1]:
        raise UserError(
            f"the twin has other classes than the model ({len(twin.classes or ())} named, the model"
            f" {len(classifier.classes or ())}): give a twin of this model"
        )
    if None not in (views := (classifier.view, twin.view)) and views[0] != views[1]:
        raise UserError(
            f"the twin sees images otherwise than the model ({views[1]}, the model {views[0]}):"
            " give a twin of this model"
        )


def fills_from(fill: Fill, fills: Sequence[Fill] | None) -> list[Fill]:
    """Return the fills that are given one way or the other, or raise if both ways differ."""
    if fills is None:
        return [fill]
    if isinstance(fills, str | Tensor):
        raise UserError(f"fills must be a list, got {type(fills).__name__}: one fill is fill=")
    if fills and isinstance(fill, str) and fill not in ("black", *fills[:1]):
        raise UserError(f"fill is {fill!r} and fills start with {fills[0]!r}: give one of the two")
    return [*fills]


def ask_all(
    models: tuple[Classifier, Classifier | None],
    images: Tensor,
    heatmaps: Tensor,
    targets: Tensor | None,
    plan: Plan,
    conditions: Sequence[Condition],
    batch_size: int | None = None,
    *,
    names: Sequence[str] | None = None,
    tick: Progress | None = None,
    stages: int | None = None,
    truth: Tensor | None = None,
) -> dict[str, Predictions]:
    """Return what `ask` returns under every condition, by key; `models` are the model and its twin.

    The targets are those of the first condition, and whole images are asked once per model.
    """
    for condition in conditions:  # before any is scored
        check_fill(condition.fill, images)
    found: dict[str, Predictions] = {}
    whole: dict[bool, Predictions] = {}
    for k, condition in enumerate(conditions):
        model = models[condition.twin]
        assert model is not None  # there are conditions of a twin where there is one
        goals = found[""].targets[: len(images)] if found else targets
        given = (model, images, heatmaps, goals, condition.plan(plan), condition.fill, batch_size)
        part = stage(tick, k, stages or len(conditions))
        known = whole.get(condition.twin)
        found[condition.key] = ask(*given, names=names, tick=part, known=known, truth=truth)
        whole.setdefault(condition.twin, found[condition.key])
    return found
