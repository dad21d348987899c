"""The paper's two cases, on the small trained net that ships with the package."""

import pytest
from msi_cases import Case, large_mask, score, two_regions

from sufficit import Classifier, Scores
from sufficit.metrics import COLUMNS

OTHERS = [name for name in COLUMNS if name not in ("mask_penalty", "msi")]


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return Classifier.load("sufficit:digits")


@pytest.fixture(scope="module")
def case_one(classifier: Classifier) -> dict[str, Scores]:
    case = large_mask(classifier, 24)
    assert len(case.labels) >= 12
    return score(classifier, case)


@pytest.fixture(scope="module")
def case_two(classifier: Classifier) -> dict[str, Scores]:
    case: Case = two_regions(classifier, 16)
    assert len(case.labels) >= 12
    return score(classifier, case)


@pytest.mark.slow
@pytest.mark.parametrize("column", OTHERS)
def test_other_columns_do_not_tell_a_focused_from_a_bloated_mask(
    case_one: dict[str, Scores], column: str
) -> None:
    focused, bloated = case_one["focused"].mean(), case_one["bloated"].mean()
    assert abs(focused[column] - bloated[column]) < 0.1 * (focused["msi"] - bloated["msi"])


def test_msi_tells_a_focused_from_a_bloated_mask(case_one: dict[str, Scores]) -> None:
    assert case_one["focused"].msi.mean() > 0.6
    assert case_one["bloated"].msi.mean() < 0.1
    assert (case_one["focused"].msi > case_one["bloated"].msi).all()


@pytest.mark.slow
def test_deletion_takes_one_of_two_sufficient_regions_for_background(
    case_two: dict[str, Scores],
) -> None:
    one, nothing = case_two["one digit"].mean(), case_two["background"].mean()
    assert one["deletion_pixel"] == pytest.approx(nothing["deletion_pixel"], abs=0.03)
    assert one["deletion_percent"] == pytest.approx(nothing["deletion_percent"], abs=0.08)
    assert one["fid_plus_pixel"] < 0.1


def test_msi_does_not_punish_one_of_two_sufficient_regions(case_two: dict[str, Scores]) -> None:
    one, both, nothing = (
        case_two[k].msi.mean() for k in ("one digit", "both digits", "background")
    )
    assert one > 0.2
    assert nothing < -0.4
    assert both > one
    assert (case_two["one digit"].msi > case_two["background"].msi).all()
