"""What hides pixels while an adapter trains, and the recipes."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor

from sufficit import Lax, UserError
from sufficit.perturbation.fills import blur
from sufficit.training import RECIPES, LaxRecipe, OrderRecipe
from sufficit.training.recipes import TRAINING_FILLS, mixed_fills, random_fills, recipe_of


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=Generator().manual_seed(seed))


def pictures(n: int = 10) -> Tensor:
    return rand(n, 3, 8, 6, seed=5)


def kind_of(fill: Tensor, other: Tensor) -> str:
    """Which kind a fill is, told by its content alone."""
    if torch.equal(fill, torch.zeros_like(fill)):
        return "black"
    if torch.equal(fill, other):
        return "other"
    if torch.allclose(fill, other.mean((1, 2), keepdim=True).expand_as(fill), atol=1e-6):
        return "colour"
    columns = [sorted(map(tuple, p.flatten(1).T.tolist())) for p in (fill, other)]
    if columns[0] == columns[1]:
        return "noise"
    assert torch.allclose(fill, blur(other[None])[0], atol=1e-6)
    return "blurred"


@pytest.mark.parametrize("n", [2, 5, 10, 13])
def test_every_kind_gets_an_equal_share_and_comes_from_the_image_before(n: int) -> None:
    images = pictures(n)
    kinds = tuple(TRAINING_FILLS)
    fills = random_fills(images, kinds, Generator().manual_seed(1))
    found = [kind_of(fills[i], images[i - 1]) for i in range(n)]
    counts = sorted(found.count(kind) for kind in kinds)
    assert sum(counts) == n
    assert counts[-1] - counts[0] <= 1


def test_each_image_gets_each_kind_at_times() -> None:
    images, generator = pictures(4), Generator().manual_seed(0)
    kinds = ("black", "colour", "blurred", "other")
    drawn = [random_fills(images, kinds, generator) for _ in range(40)]
    for i in range(4):
        counts = [sum(kind_of(f[i], images[i - 1]) == kind for f in drawn) for kind in kinds]
        assert min(counts) >= 3, counts


def test_fills_follow_the_generator_and_leave_the_images_alone() -> None:
    images = pictures()
    before = images.clone()
    kinds = tuple(TRAINING_FILLS)
    one, again = (random_fills(images, kinds, Generator().manual_seed(7)) for _ in range(2))
    another = random_fills(images, kinds, Generator().manual_seed(8))
    assert torch.equal(one, again)
    assert not torch.equal(one, another)
    assert torch.equal(images, before)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_fill_holds_nothing_of_its_own_image(n: int) -> None:
    images = torch.zeros(n, 3, 8, 6)
    for i in range(n):
        changed = images.clone()
        changed[i] = rand(3, 8, 6, seed=i)
        for kind in TRAINING_FILLS:
            with_it = random_fills(changed, (kind,), Generator().manual_seed(2))
            assert torch.equal(with_it[i], torch.zeros(3, 8, 6)), kind


# Recipes


def test_the_papers_recipe_is_the_papers() -> None:
    recipe = RECIPES["paper"]
    assert (recipe.entropy, recipe.temperature, recipe.lr) == (5, 0.5, 1e-3)
    assert recipe.fills == ("black",)
    assert not any((recipe.drop, recipe.donors, recipe.size, recipe.decide))


def test_an_area_is_asked_of_the_term_that_sets_it() -> None:
    by_entropy = recipe_of("paper", None, 0.0909, None)
    assert by_entropy.temperature == pytest.approx(0.3, abs=1e-3)
    assert by_entropy.area is None
    assert recipe_of("l1", None, 0.1, None).area == 0.1
    for area in (0, 1, -0.2, math.nan):
        with pytest.raises(UserError, match="area"):
            recipe_of("l1", None, area, None)
    with pytest.raises(UserError, match="area"):
        recipe_of(LaxRecipe(drop=1), None, 0.1, None)


def test_contrast_is_a_factor_of_maps_that_a_top_down_net_draws() -> None:
    assert RECIPES["crisp"].contrast > 1 == LaxRecipe().contrast
    for wrong in (0, -1, math.nan, math.inf):
        with pytest.raises(UserError, match="contrast must be a finite number above 0"):
            recipe_of(LaxRecipe(stages=3, contrast=wrong))
    with pytest.raises(UserError, match="contrast need an adapter of several stages"):
        recipe_of(LaxRecipe(contrast=2))
    with pytest.raises(UserError, match="top-down"):
        Lax(8).sharpen(2.0, 0.5)
    lax = Lax([4, 8])
    before = lax.net.head.weight.clone()
    for wrong in (
        (0.0, 0.5),
        (-3.0, 0.5),
        (math.nan, 0.5),
        (2.0, 1.0),
        (2.0, -0.1),
        (2.0, math.nan),
    ):
        with pytest.raises(UserError, match="contrast must be a finite number above 0 and level"):
            lax.sharpen(*wrong)
    assert torch.equal(lax.net.head.weight, before)
    lax.sharpen(2.0, 0.0)
    assert torch.equal(lax.net.head.weight, 2 * before)
    assert lax.trained["sharpened"] == [2.0, 0.0]


# Orders


def test_the_usual_recipe_trains_an_order() -> None:
    recipe = recipe_of("robust", epochs=3, area=0.2, alpha_min=0.4)
    assert isinstance(recipe, OrderRecipe)
    assert (recipe.epochs, recipe.size, recipe.alpha_min) == (3, 0.2, 0.4)
    assert recipe_of("robust").size is None  # calibrated


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": 1.5}, "area must be between 0 and 1"),
        ({"sizes": (0.5, 0.1)}, "sizes must rise"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"block": "dense"}, "Unknown block 'dense'"),
        ({"lr": math.nan}, "lr must be a finite number above 0"),
        ({"fills": (("black", 0.0),)}, "share of the fill black must be a finite number above 0"),
        ({"fills": (("grey", 1.0),)}, "Unknown fill 'grey'"),
        ({"fills": ()}, "needs at least one fill"),
        ({"crops": -1.0}, "crops must be a number, 0 or more"),
    ],
)
def test_an_order_recipe_with_a_wrong_value_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        recipe_of(replace(RECIPES["robust"], **changes))


def test_an_order_is_of_a_class() -> None:
    with pytest.raises(UserError, match="leave out class_free, or use the recipe crisp"):
        recipe_of("robust", class_free=True)


def test_its_rate_rises_for_a_twentieth_and_its_edges_harden_by_a_factor_of_five() -> None:
    recipe = OrderRecipe(lr=2.0)
    assert recipe.rate(0.05) == pytest.approx(2.0, rel=0.01)
    assert recipe.rate(0.01) < 0.5
    assert recipe.rate(0.5) == pytest.approx(1.0)
    assert recipe.rate(1.0) == pytest.approx(0.0)
    assert [recipe.softness_after(k) for k in (0.0, 1.0)] == pytest.approx([0.5, 0.1])
    assert recipe.softness_after(0.5) == pytest.approx((0.5 * 0.1) ** 0.5)


def test_each_fill_of_an_order_is_drawn_for_its_share_of_the_images() -> None:
    images = pictures(600)
    shares = (("black", 0.3), ("colour", 0.2), ("smooth noise", 0.15), ("others", 0.35))
    found = mixed_fills(images, shares, Generator().manual_seed(0))
    black = (found == 0).flatten(1).all(1)
    flat = (found == found[:, :, :1, :1]).flatten(1).all(1) & ~black
    assert black.float().mean().item() == pytest.approx(0.3, abs=0.06)
    assert flat.float().mean().item() == pytest.approx(0.2, abs=0.06)
    assert found.min() >= -1e-6
    assert found.max() <= 1 + 1e-6


def test_coarse_colours_are_those_of_another_image() -> None:
    images = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 3, 16, 16) / 5
    found = mixed_fills(images, (("others", 1.0),), Generator().manual_seed(1))
    torch.testing.assert_close(found.amax((1, 2, 3)), found.amin((1, 2, 3)))
    assert sorted(found[:, 0, 0, 0].tolist()) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])


def test_one_cycle_rises_then_falls_to_nothing() -> None:
    recipe = LaxRecipe(lr=2.0)
    rates = [recipe.rate(k / 100) for k in range(101)]
    assert rates[0] == pytest.approx(0.08)
    assert rates[10] == pytest.approx(2)
    assert rates[55] == pytest.approx(1)
    assert rates[100] == pytest.approx(0, abs=1e-12)
    assert rates.index(max(rates)) == 10
