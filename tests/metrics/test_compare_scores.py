"""Methods compared on the same images, and the table that shows it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import sufficit
from reference import small_net
from sufficit import Classifier, Scores, UserError, compare_scores, evaluate
from sufficit.statistics import Standing, compare_values

NAN = float("nan")
COLUMNS = ("msi", "deletion_percent", "mask_penalty")


@pytest.fixture(scope="module")
def scores() -> dict[str, Scores]:
    torch.manual_seed(0)
    classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3)))
    images = torch.rand(9, 3, 8, 8)
    return {
        name: evaluate(classifier, images, torch.rand(9, 8, 8), columns=COLUMNS)
        for name in ("one", "two", "three")
    }


def test_scores_are_compared_by_any_column_in_its_direction(scores: dict[str, Scores]) -> None:
    standing = compare_scores(scores, column="deletion_percent", seed=2)
    assert not standing.higher_is_better
    means = {name: found.mean()["deletion_percent"] for name, found in scores.items()}
    assert standing.means == pytest.approx(means)
    assert standing.best == min(means, key=lambda name: means[name])
    assert (standing.n, standing.chance.seed) == (9, 2)
    assert compare_scores(scores).column == "msi"
    assert sufficit.Standing is Standing


def test_the_frame_has_one_row_per_pair(scores: dict[str, Scores]) -> None:
    standing = compare_scores(scores)
    frame = standing.frame()
    assert list(frame)[:8] == [
        "first", "second", "difference", "low", "high", "p", "p_corrected", "n",
    ]  # fmt: skip
    assert frame["p"].tolist() == [pair.p for pair in standing.pairs]
    assert len(frame) == 3
    assert list(compare_scores({"one": scores["one"]}).frame()) == list(frame)


def part(scores: Scores, n: int) -> Scores:
    """The first images of some scores."""
    answers = replace(scores.answers, targets=scores.targets[:n])
    return replace(scores, answers=answers, columns={k: v[:n] for k, v in scores.columns.items()})


def test_methods_scored_on_other_images_are_refused(scores: dict[str, Scores]) -> None:
    one, two = scores["one"], scores["two"]
    with pytest.raises(UserError, match=r"same images.*number of images is 9 for x and 7 for y"):
        compare_scores({"x": one, "y": part(two, 7)})
    targets = two.targets.clone()
    targets[4] += 1
    moved = replace(two, answers=replace(two.answers, targets=targets))
    t = int(one.targets[4])
    with pytest.raises(UserError, match=f"target of image 4 is {t} for x and {t + 1} for y"):
        compare_scores({"x": one, "y": moved})
    names = [f"{i}.png" for i in range(9)]
    renamed = [*names[:8], "other.png"]
    assert compare_scores({"x": one, "y": two}, names={"x": names, "y": names}).n == 9
    with pytest.raises(UserError, match=r"name of image 8 is '8\.png' for x and 'other\.png' for"):
        compare_scores({"x": one, "y": two}, names={"x": names, "y": renamed})
    with pytest.raises(UserError, match="y has 9 images and 0 names"):
        compare_scores({"x": one, "y": two}, names={"x": names})


def test_methods_scored_in_another_way_are_refused(scores: dict[str, Scores]) -> None:
    one, two = scores["one"], scores["two"]
    moved = replace(two, schedule=replace(two.schedule, alpha_min=0.3))
    with pytest.raises(UserError, match=r"alpha_min is 0\.5 for x and 0\.3 for y; score"):
        compare_scores({"x": one, "y": moved})
    other = replace(two, schedule=replace(two.schedule, score="confidence"))
    with pytest.raises(UserError, match="score is 'accuracy' for x and 'confidence' for y"):
        compare_scores({"x": one, "y": other})


def test_what_can_not_be_compared_is_refused(scores: dict[str, Scores]) -> None:
    with pytest.raises(UserError, match=r"Unknown column 'msii'\. Did you mean 'msi'"):
        compare_scores(scores, column="msii")
    with pytest.raises(UserError, match="got no methods to compare: pass one or more"):
        compare_scores({})
    with pytest.raises(UserError, match=r"got Tensor for x: .*compare_values"):
        compare_scores({"x": torch.ones(3)})  # type: ignore[dict-item]
    with pytest.raises(UserError, match=r"must be \[N\], one per image, got \[2, 2\] for x"):
        compare_values({"x": np.ones((2, 2))})


def test_scores_of_other_images_or_of_another_model_are_refused() -> None:
    images, others = torch.rand(2, 12, 3, 8, 6, generator=torch.Generator().manual_seed(0))
    heatmaps, labels = images.mean(1), torch.arange(12) % 3
    options = {"columns": ("msi",), "value_step": 0.25}
    one, two = (Classifier(small_net(seed=seed)) for seed in (2, 3))
    first = evaluate(one, images, heatmaps, labels, **options)
    again = evaluate(one, images, heatmaps.flip(1), labels, batch_size=5, **options)
    assert compare_scores({"a": first, "b": again}).n == 12
    for found in (
        evaluate(one, others, heatmaps, labels, **options),
        evaluate(two, images, heatmaps, labels, **options),
    ):
        with pytest.raises(UserError, match="predictions for the whole images differ"):
            compare_scores({"a": first, "b": found})
