"""The answer in five lines follows the tests."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

import report_content
from reference import three_methods
from sufficit.report.answer import answer
from sufficit.report.content import Content
from sufficit.report.html import render
from sufficit.report.interpretation import cautions, notes, orders
from sufficit.similarity import RankedCondition
from sufficit.statistics import Estimate, Standing, compare_values


def standing(column: str = "msi", n: int = 60, **means: float) -> Standing:
    random = np.random.default_rng(0)
    values = {name: mean + 0.05 * random.standard_normal(n) for name, mean in means.items()}
    return compare_values(values, column)


def content(*others: RankedCondition, n: int = 60, **means: float) -> Content:
    """A report of two methods whose MSI is as given."""
    first = standing(n=n, **means or {"bright": 0.6, "coarse": 0.2})
    conditions = [RankedCondition("", "black", False, 26, 900, 0.9, first), *others]
    return replace(report_content.make(), standing=first, conditions=conditions)


def other(key: str = "held_out", *, twin: bool = False, **means: float) -> RankedCondition:
    column = f"msi_{key}"
    return RankedCondition(key, "blur", twin, 8, 100, 0.8, standing(column, **means))


def said_of_rankings(found: Content) -> list[str]:
    """The cautions that come first, of other conditions."""
    starts = ("The best method changes", "Leads that do not survive")
    return [one.text for one in cautions(found) if one.text.startswith(starts)]


def known(mean: float, n: int = 8) -> Estimate:
    return Estimate(mean, mean, mean, n, 0, None)


def with_columns(found: Content, more: Mapping[str, Mapping[str, Estimate]]) -> Content:
    """The content with further columns of some methods."""
    summaries = {name: {**own, **more.get(name, {})} for name, own in found.summaries.items()}
    return replace(found, summaries=summaries)


def words(found: Content) -> list[str]:
    return [line.word for line in answer(found)]


def test_a_lead_that_stays_is_a_yes_and_one_that_turns_a_no() -> None:
    stays = content(other(bright=0.5, coarse=0.1))
    assert words(stays)[:2] == ["bright", "Yes"]
    assert said_of_rankings(stays) == []
    turns = content(other(bright=0.1, coarse=0.5))
    assert words(turns)[1] == "No"
    changed, lost = said_of_rankings(turns)
    assert changed.startswith("The best method changes with the fill blur: coarse is significantly")
    assert "bright over coarse" in lost
    gone = content(other("twin", twin=True, bright=0.5, coarse=0.499))
    assert words(gone)[1] == "Unsure"
    (lost,) = said_of_rankings(gone)
    assert lost.startswith("Leads that do not survive for the twin with the fill blur")
    assert words(content())[1] == "Not measured"


def test_the_order_and_its_correlation_are_said_for_every_condition() -> None:
    found = content(other(bright=0.1, coarse=0.5), other("twin", twin=True, bright=0.5, coarse=0.1))
    first, second, cost = orders(found)
    assert "with the fill blur: coarse, bright." in first
    assert "Spearman -1.00, Kendall -1.00" in first
    assert "for the twin with the fill blur: bright, coarse." in second
    assert cost.endswith("asked 8 masks per image at most, 9% of the calls for scores.")
    assert not [*orders(content())]


@pytest.mark.parametrize(
    ("ratio", "word"),
    [
        ((1.02, 0.9, 1.2), "No"),
        ((2.5, 1.8, 3.0), "Yes"),
        ((1.2, 0.1, 9.0), "Unsure"),
        ((math.nan, math.nan, math.nan), "Unsure"),
        ((math.inf, math.inf, math.inf), "Yes"),
        ((math.inf, 0.0, math.inf), "Unsure"),
        (None, "Not measured"),
    ],
)
def test_leakage_of_the_best_method(ratio: tuple[float, ...] | None, word: str) -> None:
    found = content()
    summaries = {name: dict(own) for name, own in found.summaries.items()}
    for own in summaries.values():
        own.pop("leak_ratio", None)
        if ratio is not None:
            own["leak_ratio"] = Estimate(*ratio, 40, 0, False)
            own["leak"] = Estimate(0.4, 0.3, 0.5, 40, 0, False)
    assert words(replace(found, summaries=summaries))[2] == word


def test_the_ceiling_and_how_sure() -> None:
    reached = {"msi_ceiling": known(0.17, n=64), "ceiling": known(0.22, n=64)}
    found = with_columns(content(), {"bright": reached, "coarse": reached})
    assert words(found)[3:] == ["0.17 of 0.22", "Sure"]
    assert "on 64 images" in answer(found)[3].text
    assert words(content())[3] == "Not measured"
    alike = content(bright=0.301, coarse=0.3)
    assert words(alike)[4] == "Unsure"
    assert "cannot tell bright from coarse" in answer(alike)[4].text
    assert "not significantly above coarse" in answer(alike)[0].text


def test_the_report_has_the_five_lines_and_the_warning() -> None:
    page = render(content(other(bright=0.1, coarse=0.5)))
    assert page.count("<dt>", 0, page.index("</dl>")) == 5
    assert "Does that hold with another fill" in page
    assert "The best method changes with the fill blur" in page
    assert "Kendall \u22121.00" in page


def test_a_fill_that_the_viewer_cannot_draw_is_named() -> None:
    made = report_content.make(fill="road")
    assert "the model saw them imputed from their neighbours" in render(made)
    assert "imputed" not in render(report_content.make())


def test_the_words_follow_the_tests() -> None:
    values = three_methods()
    low, base = values["c"], report_content.make()

    def said(values: Mapping[str, np.ndarray], *controls: str, agnostic: str = "") -> Content:
        mean = {
            name: {"msi": Estimate(float(found.mean()), -0.5, 0.5, len(found), 0, True)}
            for name, found in values.items()
        }
        scores = dict.fromkeys(values, base.first)
        found = {"summaries": mean, "standing": compare_values(values, controls=controls)}
        return replace(base, **found, scores=scores, class_agnostic=[agnostic])

    def best(*given: object, **more: str) -> str:
        return str(answer(said(*given, **more))[0]).removeprefix("Which method is best? ")

    mean = {name: f"{found.mean():.2f}" for name, found in values.items()}
    highest = f"Its MSI is highest, {mean['a']} (95 % interval -0.50 to 0.50)"
    assert best({"a": values["a"]}) == f"a. {highest}."
    unsure = f"a, but not for sure. {highest}, but not significantly above b."
    assert best(values) == unsure
    # Above the control by its mean, and not significantly: nobody beats it.
    assert best(values, "b") == unsure
    (against,) = [one.text for one in cautions(said(values, "b")) if "control" in one.text]
    third = f"{values['b'].mean():.3f}"
    assert against == (
        f"Not significantly different from the control b ({third}, n = 40): a. Significantly"
        f" worse than the control b ({third}, n = 40): c."
    )
    assert best(values, "c") == unsure
    third = f"{low.mean():.3f}"
    beaten = f"All methods are significantly better than the controls (c {third}; n = 40)."
    assert beaten in notes(said(values, "c"))
    assert best(values, "a") == (
        "None. No method is better than the control a, which has the highest MSI:"
        f" {mean['a']} (95 % interval -0.50 to 0.50). The highest of the methods, b with"
        f" {mean['b']}, is not significantly different."
    )
    worse = best({"low": low, "a": values["a"]}, "a")
    assert worse.endswith("is significantly worse.")
    for others, controls in (({"lower": low - 0.5}, ["lower"]), ({}, ["low"])):
        clear = best({"a": values["a"], "low": low, **others}, *controls)
        assert clear == f"a. {highest}, significantly so."
    same = " It draws the same map for every class."
    assert best(values, agnostic="a") == f"{unsure}{same}"
    assert best({"a": values["a"]}, agnostic="a") == f"a. {highest}.{same}"


def test_a_best_method_whose_maps_mark_nothing_has_a_caveat() -> None:
    empty = " {} marks nothing at alpha_min 0.5 in 7 of 8 images: MSI there is that of an empty"
    for found, word in (
        (content(), "bright, with a caveat"),
        (content(bright=0.301, coarse=0.3), "bright, but not for sure"),
    ):
        best = answer(replace(found, unmarked={"bright": 7}))[0]
        assert best.word == word
        assert best.text.endswith(f"{empty.format('bright')} mask.")
        other = answer(replace(found, unmarked={"coarse": 7}))[0]
        assert other == answer(found)[0]
    control = compare_values({"bright": np.zeros(8), "coarse": np.ones(8)}, controls=["coarse"])
    best = answer(replace(content(), standing=control, unmarked={"bright": 7}))[0]
    assert (best.word, best.text[-5:]) == ("None", "mask.")
    assert empty.format("bright") in best.text


def test_a_random_output_layer_is_a_warning_only_where_maps_stay() -> None:
    # Constant maps have no correlation.
    alike = {"bright": known(0.95), "coarse": known(math.nan, n=0)}
    start = "With random weights in the output layer (8 images) the maps of"
    stay = f"{start} bright (rank correlation 0.95) stay: they do not show what this output rests"
    found = with_columns(content(), {name: {"random_head": one} for name, one in alike.items()})
    assert any(one.text.startswith(stay) for one in cautions(found))
    assert not any(start in note for note in notes(found))
    other = {"bright": known(0.2), "coarse": known(0.5)}
    found = with_columns(content(), {name: {"random_head": one} for name, one in other.items()})
    assert not any(start in one.text for one in cautions(found))
    assert f"{start} all methods change." in notes(found)
    # A function or a file does not draw from the model: it has no such column, and no mark.
    found = with_columns(content(), {"bright": {"random_head": known(0.2)}})
    assert not any(start in one.text for one in cautions(found))


def test_no_lead_and_no_order_by_rank_are_not_made_up() -> None:
    alike = content(other(bright=0.3, coarse=0.301), bright=0.301, coarse=0.3)
    line = answer(alike)[1]
    assert (line.word, line.text[:49]) == (
        "Unsure",
        "There is no significant lead with the first fill.",
    )
    for ranks, said in (((0.1, 0.1), ""), ((0.2, 0.1), "the same way"), ((0.1, 0.2), "other way")):
        own = {
            name: {**alike.summaries[name], "msi_rank": Estimate(mean, 0, 1, 60, 0, True)}
            for name, mean in zip(("bright", "coarse"), ranks, strict=True)
        }
        found = [one for one in notes(replace(alike, summaries=own)) if "by rank" in one]
        assert said in found[0] if said else not found
