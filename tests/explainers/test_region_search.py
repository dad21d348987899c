"""Boxes searched by the metric itself."""

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from lax_toys import classifier_of, data
from small_models import Spy, linear, rand
from sufficit import Classifier, UserError, evaluate, explain
from sufficit.explainers.region_search import BoxSearch, grid_boxes, region_search

FILLS = ("black", "noise")


def toy(classes: int = 3, side: int = 8) -> Classifier:
    return linear(rand(classes, 3, side, side, seed=4) - 0.5)


class Window(nn.Module):
    """Class 1 if all of a window is bright, else class 0."""

    def __init__(self, rows: slice, columns: slice) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns

    def forward(self, images: Tensor) -> Tensor:
        seen = images[:, :, self.rows, self.columns].flatten(1).amin(1)
        return torch.stack([torch.full_like(seen, 0.5), seen], 1) * 9


@pytest.mark.parametrize("score", ["accuracy", "confidence"])
def test_a_box_is_worth_its_msi_up_to_what_a_hidden_image_scores(score: str) -> None:
    classifier, images, targets = toy(), rand(2, 3, 8, 8), torch.tensor([0, 2])
    boxes = torch.tensor([[0, 0, 4, 4], [2, 3, 8, 5], [0, 0, 8, 8], [1, 1, 2, 2]])
    search = BoxSearch(classifier, images, targets, FILLS, score)
    found = search.worths(boxes.repeat(2, 1), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])).view(2, 4)
    options = {"score": score, "value_step": 0.0005, "columns": ("msi",), "progress": False}
    for k, (top, left, bottom, right) in enumerate(boxes.tolist()):
        maps = torch.zeros(2, 8, 8)
        maps[:, top:bottom, left:right] = 1
        wanted = torch.zeros(2, dtype=torch.float64)
        for fill in FILLS:
            msi = evaluate(classifier, images, maps, targets, fill=fill, **options).msi
            hidden = _hidden(classifier, images, targets, fill, score)
            wanted += (msi + hidden / 2) / len(FILLS)
        assert (found[:, k] - wanted).abs().max() < 2e-3


def _hidden(
    classifier: Classifier, images: Tensor, targets: Tensor, fill: str, score: str
) -> Tensor:
    noise = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    blank = torch.zeros_like(images) if fill == "black" else noise.expand_as(images)
    logits = classifier(blank)
    if score == "accuracy":
        return (logits.argmax(1) == targets).double()
    return logits.softmax(1)[torch.arange(len(targets)), targets].detach().double()


@pytest.mark.parametrize("score", ["accuracy", "confidence"])
def test_no_box_of_the_grid_is_better_than_the_one_found(score: str) -> None:
    classifier, images, targets = toy(), rand(5, 3, 8, 8, seed=7), torch.tensor([0, 1, 2, 0, 1])
    calls = 2 * len(FILLS) * 120  # 36 boxes on a grid of 3 x 3, and some moves
    heatmaps = region_search(classifier, images, targets, calls=calls, fills=FILLS, score=score)
    search = BoxSearch(classifier, images, targets, FILLS, score)
    lines = list(combinations((0, 3, 5, 8), 2))
    for i in range(5):
        best, chosen = -9.0, None
        for top, bottom in lines:
            for left, right in lines:
                box = torch.tensor([[top, left, bottom, right]])
                worth = float(search.worths(box, torch.tensor([i])))
                if worth > best + 1e-9:
                    best, chosen = worth, (top, left, bottom, right)
        assert chosen is not None
        own = heatmaps[i].nonzero()
        box = torch.cat([own.amin(0), own.amax(0) + 1])[None]
        assert heatmaps[i].sum() == (box[0, 2] - box[0, 0]) * (box[0, 3] - box[0, 1])
        assert float(search.worths(box, torch.tensor([i]))) >= best - 1e-9


def test_moving_edges_finds_a_window_that_is_on_no_grid() -> None:
    rows, columns = slice(5, 9), slice(3, 8)
    classifier = Classifier(Window(rows, columns))
    found = region_search(
        classifier, torch.ones(2, 1, 16, 16), torch.tensor([1, 1]), calls=900, fills="black",
        score="accuracy",
    )  # fmt: skip
    wanted = torch.zeros(16, 16)
    wanted[rows, columns] = 1
    assert torch.equal(found, wanted.expand(2, 16, 16))


@pytest.mark.parametrize(("calls", "fills"), [(36, "black+noise"), (500, "black"), (1500, "noise")])
def test_it_never_asks_more_than_its_calls(calls: int, fills: str) -> None:
    spy = Spy(classifier_of().model)
    images, targets = data(3)
    region_search(Classifier(spy), images, targets, calls=calls, fills=fills)
    assert calls / 4 < sum(spy.sizes) / 3 <= calls


def test_bad_options_are_refused() -> None:
    given = (classifier_of(), *data(2))
    with pytest.raises(UserError, match="36 calls or more for 2 fills, got 35"):
        region_search(*given, calls=35, fills="black+noise")
    with pytest.raises(UserError, match="fill 'blak'. Did you mean 'black'"):
        region_search(*given, fills="blak")
    with pytest.raises(UserError, match="score 'recall'"):
        region_search(*given, score="recall")  # type: ignore[arg-type]


def test_boxes_of_a_grid_are_all_boxes_of_its_lines() -> None:
    found = {tuple(box) for box in grid_boxes(3, 9, 6).tolist()}
    wanted = {
        (t, left, b, r)
        for t in (0, 3, 6, 9)
        for b in (0, 3, 6, 9)
        for left in (0, 2, 4, 6)
        for r in (0, 2, 4, 6)
        if t < b and left < r
    }
    assert found == wanted
    assert len(grid_boxes(3, 9, 6)) == len(wanted) == 36


def test_region_search_is_a_method_with_options() -> None:
    classifier, (images, targets) = classifier_of(), data(4)
    drawn = explain(classifier, images, targets, "region-search:calls=100:fills=black+blur")
    plain = region_search(classifier, images, targets, calls=100, fills=("black", "blur"))
    assert torch.equal(drawn, plain)
