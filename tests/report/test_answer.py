"""The verdict follows the tests: verdicts.txt has what is said in every case.

After a change of words, `python tests/report/test_answer.py` writes the file again: read it.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # to be run as a script

import report_content
from sufficit.report.answer import MOST_WARNINGS, badges, verdict
from sufficit.report.content import Content
from sufficit.report.html import render, typeset
from sufficit.report.interpretation import cautions, notes, orders
from sufficit.similarity import RankedCondition
from sufficit.statistics import Estimate, Standing, compare_values, estimates_of
from sufficit.sums import sums_of

SNAPSHOT = Path(__file__).with_name("verdicts.txt")
TRIVIAL = {"everything": -0.01, "random": -0.6, "center": -0.3}
FIT = {"center+fit": 0.25}
FILLS = ("black", "blur", "noise")


@cache
def base() -> Content:
    return report_content.make()


def values_of(means: Mapping[str, float], n: int, spread: float) -> dict[str, np.ndarray]:
    """Per method n values with exactly this mean."""
    random = np.random.default_rng(0)
    found = {}
    for name, mean in means.items():
        noise = random.standard_normal(n)
        found[name] = mean + spread * (noise - noise.mean())
    return found


def standing(
    means: Mapping[str, float], column: str = "msi", *, n: int = 60, spread: float = 0.05
) -> Standing:
    controls = [name for name in means if name in {*TRIVIAL, *FIT}]
    return compare_values(values_of(means, n, spread), column, controls=controls)


def content(
    means: Mapping[str, float],
    *others: RankedCondition,
    n: int = 60,
    spread: float = 0.05,
    **more: Any,
) -> Content:
    """A report of methods with these MSI; those that end in +fit are fitted."""
    values = values_of(means, n, spread)
    estimates = estimates_of(sums_of(values), dict.fromkeys(values, True))
    first = standing(means, n=n, spread=spread)
    scores = {name: replace(base().first, n=n) for name in means}
    return replace(
        base(),
        standing=first,
        summaries={name: {"msi": found} for name, found in estimates.items()},
        scores=scores,
        conditions=[RankedCondition("", "black", False, 26, 900, 0.9, first), *others],
        fit_fills={name: FILLS for name in means if name.endswith("+fit")},
        **more,
    )


def other(means: Mapping[str, float], key: str = "held_out", **facts: Any) -> RankedCondition:
    known = {"fill": "blur", "twin": False, "masks": 8, "model_calls": 100, "clean_accuracy": 0.8}
    return RankedCondition(key, **known | facts, standing=standing(means, f"msi_{key}"))


def with_columns(found: Content, more: Mapping[str, Mapping[str, Estimate]]) -> Content:
    """The content with further columns of some methods."""
    summaries = {name: {**own, **more.get(name, {})} for name, own in found.summaries.items()}
    return replace(found, summaries=summaries)


def leaking(found: Content, *methods: str, ratio: tuple[float, ...] = (2.4, 1.9, 3.1)) -> Content:
    """The content with the leak of all methods: that of some is high."""
    columns = {}
    for name in found.standing.ranking:
        one = Estimate(*(ratio if name in methods else (1.0, 0.9, 1.1)), 60, 0, False)
        share = Estimate(0.4, 0.3, 0.5, 60, 0, False)
        columns[name] = {"leak_ratio": one, "leak": share, "leak_chance": share}
    return with_columns(found, columns)


def ranked(found: Content, **means: float) -> Content:
    """The content with MSI by rank."""
    return with_columns(
        found,
        {
            name: {"msi_rank": Estimate(mean, mean, mean, 60, 0, True)}
            for name, mean in means.items()
        },
    )


def curve(**means: Sequence[float]) -> dict[str, Any]:
    return {"images": 16, "alphas": [0.25, 0.5, 0.75], "value_step": 0.05, "mean_msi": dict(means)}


DRAWN = {"lax": 0.6, "gradcam": 0.2, "layercam": 0.1, **TRIVIAL}
BELOW = {"gradcam": -0.16, "layercam": -0.2, **TRIVIAL}
FITTED = {"gradcam+fit": 0.5, "layercam+fit": 0.4, **TRIVIAL, **FIT}


def cases() -> dict[str, Content]:
    """Every kind of verdict."""
    stays = {"alpha_curve": curve(lax=[0.5, 0.6, 0.4], gradcam=[0.3, 0.2, 0.1], layercam=[0.1] * 3)}
    turns = {"alpha_curve": curve(lax=[0.5, 0.6, 0.4], gradcam=[0.7, 0.2, 0.1], layercam=[0.1] * 3)}
    labels = replace(base().facts, targets="label")
    right = replace(base().first, clean=0.12)
    return {
        "a clear winner": content(DRAWN),
        "a clear winner, with another fill too": content(DRAWN, other(DRAWN)),
        "one method": content({"lax": 0.6, **TRIVIAL}),
        "equally good": content({"lax": 0.501, "gradcam": 0.5, "layercam": 0.1, **TRIVIAL}),
        "a tie of all": content({"lax": 0.501, "gradcam": 0.5, **TRIVIAL}),
        "too few images": content({**DRAWN, "gradcam": 0.55}, n=12, spread=0.3),
        "one that beats no control, level with the leader": content(
            {"lax": 0.5, "gradcam": 0.1, **TRIVIAL}, n=6, spread=0.35
        ),
        "all below marking the whole image": ranked(content(BELOW), gradcam=0.4, layercam=0.45),
        "one method below": content({"gradcam": -0.16, **TRIVIAL}),
        "not different from marking the whole image": content({**BELOW, "gradcam": -0.01}),
        "above the whole image, below a blob": content(
            {"gradcam": 0.1, "layercam": 0.05, **TRIVIAL, "center": 0.2}
        ),
        "fitted alone": content(FITTED),
        "one fitted method": content({"gradcam+fit": 0.5, **TRIVIAL, **FIT}),
        "fitted, no better than the fit of a blob": content({**FITTED, **FIT, "center+fit": 0.6}),
        "drawn and fitted": content({**DRAWN, **FITTED}),
        "drawn below, fitted best": content({**BELOW, **FITTED}),
        "nothing, drawn or fitted": content({**BELOW, **FITTED, "center+fit": 0.6}),
        "a leak": leaking(content(DRAWN), "lax"),
        "a leak that by chance never happens": leaking(
            content(DRAWN), "lax", ratio=(math.inf, math.inf, math.inf)
        ),
        "a leak of another method": leaking(content(DRAWN), "gradcam"),
        "another fill turns the order": content(
            DRAWN, other({**DRAWN, "lax": 0.1, "gradcam": 0.5})
        ),
        "a lead is lost for the twin": content(
            DRAWN, other({**DRAWN, "gradcam": 0.6}, "twin", twin=True)
        ),
        "at the best alpha_min each the order stays": content(DRAWN, **stays),
        "at the best alpha_min each the order turns": content(DRAWN, **turns),
        "alpha_min of one method": content(
            {"lax": 0.6, **TRIVIAL}, alpha_curve=curve(lax=[0.5, 0.6, 0.4])
        ),
        "without controls": content({"lax": 0.6, "gradcam": 0.2}),
        "one method without controls": content({"lax": 0.6}),
        "random weights": content(
            DRAWN, remarks=["The model has random weights: its scores mean nothing."]
        ),
        "a model that is wrong": replace(
            content(DRAWN, facts=labels), scores=dict.fromkeys(DRAWN, right)
        ),
        "no numbers": content({"lax": math.nan, "gradcam": math.nan, **TRIVIAL}),
        "many warnings": leaking(
            content(
                DRAWN, other({**DRAWN, "layercam": 0.3}), n=40, unmarked={"layercam": 7},
                class_agnostic=["lax"],
            ),
            "layercam",
        ),
    }  # fmt: skip


def snapshot() -> str:
    """The lines of every case."""
    parts = []
    for name, found in cases().items():
        said = verdict(found)
        lines = [f"# {name}", *said.lines, *(f"! {warning}" for warning in said.warnings)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def test_every_verdict_is_as_it_was_read() -> None:
    assert snapshot() == SNAPSHOT.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", list(cases()))
def test_no_verdict_claims_more_than_the_tests(name: str) -> None:
    found = cases()[name]
    said = verdict(found)
    assert len(said.warnings) <= MOST_WARNINGS
    for group in found.groups:
        needed = {*TRIVIAL, *(FIT if group.best in found.fit_fills else {})}
        for method in group.ranking:
            beats = needed <= {*group.controls} and all(group.beats(method, c) for c in needed)
            others = [one for one in group.ranking if one != method]
            is_best = beats and all(group.beats(method, one) for one in others)
            assert (badges(found).get(method) == "best") == is_best
            if f"{method} is the best" in said.answer:
                assert is_best


def test_the_report_begins_with_the_verdict_and_has_all_warnings() -> None:
    known = {"unmarked": {"coarse": 7}, "class_agnostic": ["bright"], "remarks": ["Know this."]}
    found = replace(base(), **known)
    assert len(cautions(found)) > MOST_WARNINGS
    page = render(found)
    said = verdict(found)
    places = [page.index(typeset(line)) for line in said.lines]
    assert places == sorted(places)
    assert places[-1] < page.index('id="scores"')
    assert all(typeset(one.text) in page for one in cautions(found))
    assert "Not measured" not in page


def test_the_order_and_its_correlation_are_said_for_every_condition() -> None:
    two = {"bright": 0.6, "coarse": 0.2}
    found = content(
        two,
        other({"bright": 0.1, "coarse": 0.5}),
        other({"bright": 0.5, "coarse": 0.1}, "twin", twin=True),
    )
    first, second, cost = orders(found)
    assert "with the fill blur: coarse, bright." in first
    assert "Spearman -1.00, Kendall -1.00" in first
    assert "for the twin with the fill blur: bright, coarse." in second
    assert cost == (
        "The held-out fill is blur: the scores use black. It was scored with at most 8 masks per"
        " image, 9% of the forward passes for scores."
    )
    assert not [*orders(content(two))]


def test_a_fit_says_why_another_fill_is_held_out() -> None:
    *_, said = orders(content(FITTED, other(FITTED, fill="mean")))
    assert said.startswith(
        "The held-out fill is mean: the scores use black, and the fit has asked the model with"
        " black, blur and noise."
    )


def test_a_fill_that_the_viewer_cannot_draw_is_named() -> None:
    made = report_content.make(fill="road")
    assert "the model saw them imputed from their neighbours" in render(made)
    assert "imputed" not in render(report_content.make())


def test_a_random_output_layer_is_a_warning_only_where_maps_stay() -> None:
    def known(mean: float, n: int = 8) -> Estimate:
        return Estimate(mean, mean, mean, n, 0, None)

    two = content({"bright": 0.6, "coarse": 0.2})
    stay = "The maps of bright stay when the output layer is made random."
    change = "With random weights in the output layer (8 images) the maps of all methods change."
    # Constant maps have no correlation.
    alike = {"bright": known(0.95), "coarse": known(math.nan, n=0)}
    found = with_columns(two, {name: {"random_head": one} for name, one in alike.items()})
    assert stay in [one.text for one in cautions(found)]
    assert change not in notes(found)
    moved = {"bright": known(0.2), "coarse": known(0.5)}
    found = with_columns(two, {name: {"random_head": one} for name, one in moved.items()})
    assert stay not in [one.text for one in cautions(found)]
    assert change in notes(found)
    # A function or a file does not draw from the model: it has no such column.
    found = with_columns(two, {"bright": {"random_head": known(0.2)}})
    assert stay not in [one.text for one in cautions(found)]


def test_no_order_by_rank_is_made_up() -> None:
    two = content({"bright": 0.6, "coarse": 0.2})
    for ranks, said in (((0.1, 0.1), ""), ((0.2, 0.1), "the same way"), ((0.1, 0.2), "other way")):
        bright, coarse = ranks
        found = [
            one for one in notes(ranked(two, bright=bright, coarse=coarse)) if "by rank" in one
        ]
        assert said in found[0] if said else not found


def test_fitted_and_drawn_methods_have_a_ranking_each() -> None:
    drawn, fitted = cases()["drawn and fitted"].groups
    assert drawn.ranking == ("lax", "gradcam", "layercam")
    assert drawn.controls == ("everything", "center", "random")
    assert fitted.ranking == ("gradcam+fit", "layercam+fit")
    assert fitted.controls == ("center+fit", "everything", "center", "random")
    pair = fitted.pair("gradcam+fit", "center+fit")
    assert pair is not None
    assert pair.difference == pytest.approx(0.25)


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
