"""The losses of the nearest methods: by hand, by plain loops, and in a step of training."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn

from sufficit import Classifier, UserError
from sufficit.explainers import rival_losses
from sufficit.explainers.recipes import RECIPES, RIVAL_TERMS, LaxRecipe, recipe_of
from sufficit.explainers.step import Batch, take_step

N, SIDE = 4, 6


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=Generator().manual_seed(seed))


def plain_smooth(mask: list[list[float]]) -> float:
    """Squared differences to the right and below, border values squared, of one mask."""
    h, w = len(mask), len(mask[0])
    edges = sum((mask[i][k] - mask[i][k - 1]) ** 2 for i in range(h) for k in range(1, w))
    edges += sum((mask[i][k] - mask[i - 1][k]) ** 2 for i in range(1, h) for k in range(w))
    border = sum(mask[i][k] ** 2 for i in (0, h - 1) for k in range(w))
    border += sum(mask[i][k] ** 2 for i in range(h) for k in (0, w - 1))  # corners count twice
    return (edges + 0.3 * border) / 2


def test_smooth_agrees_with_plain_loops() -> None:
    masks = rand(3, 4, 5)
    wanted = sum(plain_smooth(one.tolist()) for one in masks) / 3
    assert rival_losses.smooth(masks).item() == pytest.approx(wanted, rel=1e-5)


def test_a_soft_edge_costs_less_than_a_sharp_one_and_noise_most() -> None:
    line = torch.arange(16.0)
    sharp, soft = (line > 7.5).float(), ((line - 4) / 8).clamp(0, 1)
    noise = rand(16, 16).round()
    costs = [rival_losses.smooth(m.expand(1, 16, 16)).item() for m in (soft, sharp, noise)]
    assert costs == sorted(costs)


def test_margins_end_where_the_wanted_lead_is_reached() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0], [0.0, 4.0, 1.0]])
    targets = torch.tensor([0, 0])  # leads by 2, is 4 behind
    assert rival_losses.margin(logits, targets, 1.0).item() == pytest.approx((0 + 5) / 2)
    assert rival_losses.destroyed(logits, targets, 5.0).item() == pytest.approx((7 + 1) / 2)
    assert rival_losses.destroyed(logits, targets, 2.0).item() == pytest.approx((4 + 0) / 2)


def test_blank_is_least_where_nothing_is_known() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0], [9.0, -9.0, -9.0], [math.log(2), 0.0, -99.0]])
    counted = torch.tensor([True, True, True])
    third = sum(p * math.log(p) for p in (2 / 3, 1 / 3))
    wanted = (-math.log(3) + 0 + third) / 3
    assert rival_losses.blank(logits, counted).item() == pytest.approx(wanted, abs=1e-5)
    assert rival_losses.blank(logits, ~counted).item() == 0


def test_only_masks_that_work_are_paid_to_shrink() -> None:
    masks = torch.stack([torch.full((2, 2), v) for v in (0.2, 0.4, 0.6)]).requires_grad_()
    right, wrong = torch.tensor([True, False, False]), torch.tensor([True, True, False])
    found = rival_losses.earned(masks, right, wrong)
    assert found.item() == pytest.approx(-(0.8 + 0.8 + 0.6 + 0) / 3)
    (slope,) = torch.autograd.grad(found, masks)
    assert slope.sum((1, 2)).tolist() == pytest.approx([2 / 3, 1 / 3, 0])


def test_soft_bins_hold_equal_shares_and_become_a_sort() -> None:
    values = torch.randperm(64, generator=Generator().manual_seed(1)).float()[None]
    bins = rival_losses.soft_bins(values)
    assert bins.sum(2).flatten().tolist() == pytest.approx([1] * 64, abs=1e-4)
    assert bins.sum(1).flatten().tolist() == pytest.approx([4] * 16, abs=0.2)
    # The soft top half is the top half but near the middle, and follows the order.
    top = bins[0, :, :8].sum(1)
    hard = values[0] >= 32
    clear = (values[0] - 31.5).abs() > 6
    assert ((top > 0.5) == hard)[clear].all()
    assert (top[values[0].long().argsort()].diff() > -0.02).all()


def test_a_higher_cell_comes_nearer_to_the_top() -> None:
    values = rand(1, 64, seed=3).requires_grad_()
    top = rival_losses.soft_bins(values)[0, :, :4].sum(1)
    cell = int((top - 0.5).abs().argmin())
    (slope,) = torch.autograd.grad(top[cell], values)
    assert slope[0, cell] > 0


def test_soft_tops_are_masks_of_drawn_shares() -> None:
    cells = rand(3, 8, 8, seed=5)
    tops = rival_losses.soft_tops(cells, 40, Generator().manual_seed(2))
    shares = tops.mean((2, 3))  # [3,40]
    assert shares.std(0).max() < 0.02  # a level is one for all images
    nearest = (shares * 16).round()
    assert {*nearest.flatten().tolist()} <= {*map(float, range(1, 16))}
    assert len({*nearest[0].tolist()}) > 8
    assert 0 <= tops.min() <= tops.max() <= 1


class Mean(nn.Module):
    """Two classes: how bright the left half is, and how bright the right half is."""

    def forward(self, images: Tensor) -> Tensor:
        halves = images.mean(1).split(SIDE // 2, dim=2)
        return 8 * torch.stack([half.mean((1, 2)) for half in halves], 1)


def case() -> tuple[Classifier, Batch]:
    images = rand(N, 3, SIDE, SIDE, seed=7)
    classifier = Classifier(Mean())
    targets = torch.tensor([0, 1, 0, 1])
    first = classifier(images).topk(2).indices
    return classifier, Batch(images, targets, (torch.zeros(N, 1, 2, 2),), first)


def drawn(masks: Tensor):
    return lambda *_: masks


@pytest.mark.parametrize("name", ["rt-saliency", "masked-in-out"])
def test_a_step_has_the_terms_of_the_recipe_and_their_sum(name: str) -> None:
    classifier, batch = case()
    recipe = replace(RECIPES[name], fills=("black",))
    masks = rand(N, SIDE, SIDE, seed=8)
    step = take_step(classifier, drawn(masks), batch, recipe, Generator())
    inside = classifier(batch.images * masks[:, None])
    outside = classifier(batch.images * (1 - masks[:, None]))
    targets = batch.targets
    known = classifier(batch.images).argmax(1) == targets
    if name == "rt-saliency":
        wanted = {
            "preserve": rival_losses.margin(inside, targets, 1),
            "destroy": rival_losses.destroyed(outside, targets, 5),
            "sparse": (masks + 0.0005).pow(0.3).mean(),
            "smooth": torch.tensor(sum(plain_smooth(one.tolist()) for one in masks) / N),
        }
        weights = {"preserve": 0.3, "destroy": 1, "sparse": 8, "smooth": 0.5}
    else:
        right, wrong = inside.argmax(1) == targets, known & (outside.argmax(1) != targets)
        means = masks.mean((1, 2))
        room = (right.float() - means).relu() + (wrong.float() - means).relu()
        wanted = {
            "keep": torch.nn.functional.cross_entropy(inside, targets),
            "blank": -(torch.special.entr(outside.softmax(1)).sum(1) * known).mean(),
            "earned": -room.mean(),
        }
        weights = {"keep": 1, "blank": 1, "earned": 10}
    found = {term: step.terms[term].item() for term in wanted}
    assert found == pytest.approx({term: v.item() for term, v in wanted.items()}, abs=1e-4)
    total = sum(weights[term] * value.item() for term, value in wanted.items())
    assert step.loss.item() == pytest.approx(total, abs=1e-3)


def test_ranking_prefers_the_map_that_ranks_the_evidence_first() -> None:
    classifier, batch = case()
    left = (torch.arange(SIDE) < SIDE // 2).float().expand(N, SIDE, SIDE)
    own = torch.where(batch.targets[:, None, None] == 0, left, 1 - left)
    ramp = 0.1 * rand(N, SIDE, SIDE, seed=9)
    losses = []
    for masks in (own, 1 - own):
        given = (drawn(masks * 0.8 + ramp), batch, RECIPES["learn-to-rank"])
        losses.append(
            [
                take_step(classifier, *given, Generator().manual_seed(k)).terms["ranking"].item()
                for k in range(8)
            ]
        )
    assert max(losses[0]) < -0.1
    assert min(losses[1]) > 0.1


@pytest.mark.parametrize("name", ["rt-saliency", "masked-in-out", "learn-to-rank"])
def test_gradients_reach_the_map(name: str) -> None:
    classifier, batch = case()
    masks = rand(N, SIDE, SIDE, seed=8).requires_grad_()
    step = take_step(classifier, drawn(masks), batch, RECIPES[name], Generator().manual_seed(0))
    (slope,) = torch.autograd.grad(step.loss, masks)
    assert slope.isfinite().all()
    assert (slope != 0).any()


def test_other_recipes_do_not_have_these_terms_and_rivals_know_one_answer() -> None:
    rivals = {"rt-saliency", "masked-in-out", "learn-to-rank"}
    for name, recipe in RECIPES.items():
        assert any(getattr(recipe, term) for term in RIVAL_TERMS) == (name in rivals)
    with pytest.raises(UserError, match="know one answer: set answers to 1"):
        recipe_of(LaxRecipe(sparse=1, stages=3, answers=2))
