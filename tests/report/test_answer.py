"""The answer in five lines follows the tests."""

import math
from dataclasses import replace

import numpy as np
import pytest

import report_content
from sufficit.rank_agreement import RankedCondition
from sufficit.report.answer import answer, cost, orders, ranking_remarks
from sufficit.report.content import Content
from sufficit.report.html import render
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


def words(found: Content) -> list[str]:
    return [line.word for line in answer(found)]


def test_a_lead_that_stays_is_a_yes_and_one_that_turns_a_no() -> None:
    stays = content(other(bright=0.5, coarse=0.1))
    assert words(stays)[:2] == ["bright", "Yes"]
    assert ranking_remarks(stays) == []
    turns = content(other(bright=0.1, coarse=0.5))
    assert words(turns)[1] == "No"
    changed, lost = ranking_remarks(turns)
    assert changed.startswith("The best method changes with the fill blur: coarse is significantly")
    assert "bright over coarse" in lost
    gone = content(other("twin", twin=True, bright=0.5, coarse=0.499))
    assert words(gone)[1] == "Unsure"
    (lost,) = ranking_remarks(gone)
    assert lost.startswith("Leads that do not survive for the twin with the fill blur")
    assert words(content())[1] == "Not measured"


def test_the_order_and_its_correlation_are_said_for_every_condition() -> None:
    found = content(other(bright=0.1, coarse=0.5), other("twin", twin=True, bright=0.5, coarse=0.1))
    first, second = orders(found)
    assert "with the fill blur: coarse, bright." in first
    assert "Spearman -1.00, Kendall -1.00" in first
    assert "for the twin with the fill blur: bright, coarse." in second
    assert cost(found).endswith("asked 8 masks per image at most, 9% of the calls for scores.")
    assert cost(content()) == ""


@pytest.mark.parametrize(
    ("ratio", "word"),
    [
        ((1.02, 0.9, 1.2), "No"),
        ((2.5, 1.8, 3.0), "Yes"),
        ((1.2, 0.1, 9.0), "Unsure"),
        ((math.nan, math.nan, math.nan), "Unsure"),
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
    assert words(replace(found, summaries=summaries))[2] == word


def test_the_ceiling_and_how_sure() -> None:
    ceiling = {"fill": "blur", "n": 64, "msi": {"bright": 0.17}, "searched": {"mean": 0.22}}
    found = replace(content(), ceiling=ceiling)
    assert words(found)[3:] == ["0.17 of 0.22", "Sure"]
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
