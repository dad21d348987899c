"""A metric of one's own is a column of `evaluate` as the others are."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection

from sufficit import Classifier, Scores, UserError, compare_scores, evaluate
from sufficit.metrics import COLUMNS, MSI, Evaluation, Metric
from sufficit.metrics.columns import TAKEN
from sufficit.perturbation.bands import at_least, show, top


def quarter(schedule):
    return [top(0.25)]


OWN = {
    "top_quarter": Metric(True, quarter, lambda a, s: a.of(quarter(s), "confidence")[:, 0]),
    "marked": Metric(
        False,
        lambda s: [],
        lambda a, s: a.share(at_least(s.alpha_min)) * 100,
        weighs=lambda s: [at_least(s.alpha_min)],
    ),
}


def brightness() -> Classifier:
    """Says class 1 the more, the more of the image is bright: its logits are 0 and the sum."""

    class Sum(nn.Module):
        def forward(self, images):
            total = images.sum((1, 2, 3))
            return torch.stack([torch.zeros_like(total), total], 1)

    return Classifier(Sum())


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two images of 2 x 2 pixels, their heatmaps, and the class 1."""
    images = torch.tensor([[[[1.0, 0.5], [0.25, 0.0]]], [[[0.25, 0.0], [0.5, 1.0]]]])
    return images, images[:, 0].clone(), torch.tensor([1, 1])


def test_its_values_are_those_worked_out_by_hand() -> None:
    scores = evaluate(brightness(), *case(), metrics=OWN)
    assert tuple(scores.columns) == (*COLUMNS, "top_quarter", "marked")
    one = torch.tensor(1.0, dtype=torch.float64).sigmoid().item()  # the brightest pixel alone
    assert scores.top_quarter.tolist() == pytest.approx([one, one])
    assert scores.marked.tolist() == [50, 50]  # of 1, 0.5, 0.25, 0, those at 0.5 or above
    assert scores.mean()["marked"] == 50


def test_it_can_be_asked_for_alone() -> None:
    scores = evaluate(brightness(), *case(), metrics=OWN, columns=["marked"])
    assert tuple(scores.columns) == ("marked",)
    assert scores.calls.tolist() == [1, 1]  # the whole image


def test_masks_that_others_ask_for_cost_nothing_more() -> None:
    images, maps, targets = case()
    metric = Metric(True, lambda s: [show(0.5)], lambda a, s: a.of([show(0.5)], "accuracy")[:, 0])
    plain = evaluate(brightness(), images, maps, targets)
    own = evaluate(brightness(), images, maps, targets, metrics={"half": metric})
    assert own.calls.tolist() == plain.calls.tolist()
    assert own.half.tolist() == [1, 1]


def test_it_is_summed_up_compared_and_tabulated_as_the_others_are() -> None:
    images, maps, targets = case()
    scores = evaluate(brightness(), images, maps, targets, metrics=OWN)
    assert scores.marked.tolist() == [50, 50]
    summary = scores.summary()
    assert summary["marked"].mean == 50
    assert summary["marked"].higher_is_better is False
    assert summary["top_quarter"].higher_is_better is True
    wide = evaluate(brightness(), images, torch.ones_like(maps), targets, metrics=OWN)
    standing = compare_scores({"wide": wide, "own": scores}, "marked")
    assert standing.ranking == ("own", "wide")  # 50 is better than 100: lower is
    assert scores.frame()["marked"].tolist() == [50, 50]


def test_alpha_min_is_the_one_that_was_found() -> None:
    own = {"where": Metric(True, quarter, lambda a, s: torch.full((2,), s.alpha_min))}
    scores = evaluate(brightness(), *case(), metrics=own, alpha_min="search", alphas=[0.2, 0.6])
    assert scores["where"].tolist() == pytest.approx([scores.alpha_min] * 2)


@pytest.mark.parametrize("kind", [Evaluation, MSI])
def test_a_torchmetrics_class_adds_it_to_its_columns(kind: type[Evaluation]) -> None:
    images, maps, targets = case()
    maps[1] = torch.tensor([[1.0, 0.9], [0.8, 0.0]])  # three of four pixels are marked
    metric = kind(brightness(), metrics=OWN)
    for i in range(2):
        metric.update(images[i : i + 1], maps[i : i + 1], targets[i : i + 1])
    whole = evaluate(brightness(), images, maps, targets, metrics=OWN)
    assert tuple(metric.scores().columns) == (*kind.columns, "top_quarter", "marked")
    assert metric.scores().marked.tolist() == [50, 75]
    assert metric.scores().top_quarter.tolist() == whole.top_quarter.tolist()
    means = metric.compute()
    assert means["marked"].item() == 62.5
    assert means["msi"].item() == pytest.approx(whole.mean()["msi"])
    metric.reset()
    metric.update(images[:1], maps[:1], targets[:1])
    assert metric.compute()["marked"].item() == 50


def test_in_a_collection_each_class_keeps_its_own_formula() -> None:
    images, maps, targets = case()
    halved = {
        "marked": replace(OWN["marked"], formula=lambda a, s: OWN["marked"].formula(a, s) / 2)
    }
    classifier = brightness()  # one for both, so that nothing but the formula tells them apart
    both = MetricCollection(
        {
            "a": MSI(classifier, metrics={"marked": OWN["marked"]}),
            "b": MSI(classifier, metrics=halved),
        },
    )
    for _ in range(2):
        both.update(images, maps, targets)
    found = both.compute()
    assert (found["a_marked"].item(), found["b_marked"].item()) == (50, 25)


def test_a_class_refuses_what_evaluate_refuses() -> None:
    with pytest.raises(UserError, match="cannot call a metric 'msi': the name is taken"):
        MSI(brightness(), metrics={"msi": OWN["marked"]})
    with pytest.raises(UserError, match="got function for 'mine'"):
        Evaluation(brightness(), metrics={"mine": quarter})


@pytest.mark.parametrize("name", ["msi", "leak", "calls", "target", "mean", "columns"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"cannot call a metric '{name}': the name is taken"):
        evaluate(brightness(), *case(), metrics={name: OWN["marked"]})


def test_every_name_of_scores_is_taken() -> None:
    assert {name for name in dir(Scores) if not name.startswith("__")} <= {*TAKEN}


def test_what_is_no_metric_is_refused() -> None:
    with pytest.raises(UserError, match=r"must be sufficit\.metrics\.Metric by name, got function"):
        evaluate(brightness(), *case(), metrics={"mine": quarter})
    with pytest.raises(UserError, match="Unknown column 'markd'"):
        evaluate(brightness(), *case(), metrics=OWN, columns=["markd"])


def test_columns_without_better_or_worse_are_not_compared() -> None:
    images, maps, _ = case()
    scores = evaluate(brightness(), images, maps, torch.tensor([0, 1]), leak_donors=1)
    with pytest.raises(UserError, match="leak_chance has no better or worse"):
        compare_scores({"a": scores, "b": scores}, "leak_chance")
    assert compare_scores({"a": scores, "b": scores}, "leak").higher_is_better is False
