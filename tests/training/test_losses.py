"""The terms an adapter is trained by, by hand and by plain loops; and a whole step of them."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Generator, Tensor, nn

from sufficit import Classifier, Lax, UserError
from sufficit.training import RECIPES, LaxRecipe, losses
from sufficit.training.recipes import TRAINING_FILLS, random_fills
from sufficit.training.step import TrainingStep, asked_classes, recipe_loss, take_step, upsampled
from sufficit.training.training_batch import TrainingBatch

TEMPERATURES = {0.25: 0.0574, 0.3: 0.0909, 0.4: 0.1541, 0.5: 0.2055, 0.8: 0.3019}


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=Generator().manual_seed(seed), dtype=torch.float64)


# A second writing, from the paper, in plain Python


def softmax(values: list[float]) -> list[float]:
    highest = max(values)
    powers = [math.exp(v - highest) for v in values]
    return [p / sum(powers) for p in powers]


def plain_entropy(masks: list[list[float]], t: float) -> float:
    total = 0.0
    for mask in masks:
        shares = softmax([max(0.0, m) / t for m in mask])
        total -= sum(p * math.log(p) for p in shares)
    return total / len(masks)


def plain_cross_entropy(logits: list[list[float]], targets: list[int]) -> float:
    chances = [softmax(row)[y] for row, y in zip(logits, targets, strict=True)]
    return -sum(map(math.log, chances)) / len(chances)


def plain_unlike(logits: list[list[float]], targets: list[int]) -> float:
    others = [
        sum(p for c, p in enumerate(softmax(row)) if c != y)
        for row, y in zip(logits, targets, strict=True)
    ]
    return -sum(map(math.log, others)) / len(others)


# Entropy and the area it prefers


def test_the_entropy_of_an_even_mask_is_the_log_of_its_cells() -> None:
    for value in (-3.0, 0.0, 0.3, 1.0):
        found = losses.entropy(torch.full((2, 4, 5), value, dtype=torch.float64), 0.5)
        assert found.item() == pytest.approx(math.log(20), abs=1e-12)


def test_the_entropy_of_one_lit_cell_is_worked_out_by_hand() -> None:
    mask = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    e2 = math.exp(2)  # at t = 0.5
    wanted = math.log(e2 + 3) - 2 * e2 / (e2 + 3)
    assert losses.entropy(mask, 0.5).item() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("t", [0.05, 0.5, 2.0])
def test_the_entropy_agrees_with_plain_loops_also_below_zero(t: float) -> None:
    masks = 3 * rand(4, 3, 5) - 1
    wanted = plain_entropy(masks.flatten(1).tolist(), t)
    assert losses.entropy(masks, t).item() == pytest.approx(wanted, abs=1e-12)
    assert losses.entropy(masks.clamp(min=0), t).item() == losses.entropy(masks, t).item()


def test_a_softmax_that_underflows_has_entropy_zero() -> None:
    mask = torch.zeros(1, 2, 2, requires_grad=True)
    with torch.no_grad():
        mask[0, 0, 0] = 1
    found = losses.entropy(mask, 1e-3)
    found.backward()
    assert found.item() == 0
    assert mask.grad is not None
    assert mask.grad.isfinite().all()


@pytest.mark.parametrize(("t", "wanted"), TEMPERATURES.items())
def test_the_preferred_area_is_where_binary_masks_have_least_entropy(t, wanted) -> None:
    cells = 2000
    found = []
    for ones in range(cells + 1):
        total = ones * math.exp(1 / t) + (cells - ones)
        lit, dark = math.exp(1 / t) / total, 1 / total
        found.append(-ones * lit * math.log(lit) - (cells - ones) * dark * math.log(dark))
    least = found.index(min(found)) / cells
    assert losses.preferred_area(t) == pytest.approx(least, abs=1 / cells)
    assert losses.preferred_area(t) == pytest.approx(wanted, abs=5e-5)


def test_binary_masks_of_the_preferred_area_have_least_entropy_by_the_loss_itself() -> None:
    masks = (torch.arange(200)[None] < torch.arange(201)[:, None]).double().view(201, 10, 20)
    found = torch.stack([losses.entropy(mask[None], 0.5) for mask in masks])
    assert found.argmin().item() == 41  # of 200 cells; 0.2055 * 200 = 41.1


@pytest.mark.parametrize("t", [0.03, 0.1, 1.0, 30.0, 1e3])
def test_the_closed_form_of_the_design_holds_where_it_can_be_written_down(t: float) -> None:
    a = math.exp(1 / t)
    assert losses.preferred_area(t) == pytest.approx((a / (t * (a - 1)) - 1) / (a - 1), rel=1e-6)


def test_the_preferred_area_grows_with_the_temperature_without_a_jump() -> None:
    values = [losses.preferred_area(10 ** (k / 50)) for k in range(-150, 301)]
    assert all(0 <= a <= b < 0.5 for a, b in pairwise(values))
    assert max(b - a for a, b in pairwise(values)) < 0.011


def test_a_temperature_is_found_for_every_area() -> None:
    for hundredth in range(1, 50):
        area = hundredth / 100
        assert losses.preferred_area(losses.temperature_for(area)) == pytest.approx(area, abs=1e-8)


@pytest.mark.parametrize("area", [0.0, -0.1, 0.5, 0.7, math.nan])
def test_an_area_the_entropy_cannot_prefer_is_refused(area: float) -> None:
    with pytest.raises(UserError, match=r"between 0 and 0\.5"):
        losses.temperature_for(area)


# The other terms


def test_unlike_is_minus_the_log_of_the_other_classes_share() -> None:
    logits = torch.tensor([[math.log(3), 0.0, math.log(2)], [0.0, math.log(8), 0.0]])
    # 1 - p_y is 3/6 and 2/10.
    wanted = (math.log(2) + math.log(5)) / 2
    assert losses.unlike(logits, torch.tensor([0, 1])).item() == pytest.approx(wanted, abs=1e-6)
    first = losses.unlike(logits, torch.tensor([0, 1]), torch.tensor([True, False]))
    assert first.item() == pytest.approx(math.log(2), abs=1e-6)
    none = losses.unlike(logits, torch.tensor([0, 1]), torch.tensor([False, False]))
    assert none.item() == 0


def test_unlike_agrees_with_plain_loops() -> None:
    logits, targets = 8 * rand(6, 4) - 4, torch.tensor([0, 1, 2, 3, 3, 0])
    wanted = plain_unlike(logits.tolist(), targets.tolist())
    assert losses.unlike(logits, targets).item() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("margin", [30.0, 200.0, 1e4])
def test_unlike_stays_finite_where_the_model_is_certain(margin: float) -> None:
    logits = torch.tensor([[margin, 0.0, 0.0]], requires_grad=True)
    loss = losses.unlike(logits, torch.tensor([0]))
    loss.backward()
    assert loss.item() == pytest.approx(margin - math.log(2), rel=1e-5)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[1.0, -0.5, -0.5]]))


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0])
def test_bounded_terms_are_one_less_a_power_of_the_probability(power) -> None:
    logits, targets = 3 * rand(4, 3), torch.tensor([0, 2, 1, 1])
    kept, unlike = 0.0, 0.0
    for row, y in zip(logits.tolist(), targets.tolist(), strict=True):
        p = math.exp(row[y]) / sum(math.exp(v) for v in row)
        kept += (1 - p**power) / power / 4
        unlike += (1 - (1 - p) ** power) / power / 4
    assert losses.kept(logits, targets, power).item() == pytest.approx(kept, rel=1e-9)
    assert losses.unlike(logits, targets, power=power).item() == pytest.approx(unlike, rel=1e-9)
    small = losses.kept(logits, targets, 1e-6).item()
    assert small == pytest.approx(losses.kept(logits, targets).item(), rel=1e-4)


def test_a_target_without_hope_weighs_no_more_than_one_over_the_power() -> None:
    logits = torch.tensor([[0.0, 1000.0]], requires_grad=True)
    loss = losses.kept(logits, torch.tensor([0]), 0.5)
    loss.backward()
    assert loss.item() == 2
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_size_is_the_mean_mask_or_how_far_it_is_from_the_area_wanted() -> None:
    masks = torch.tensor([[[0.1, 0.3]], [[0.2, 0.2]]])
    assert losses.size(masks).item() == pytest.approx(0.2)
    assert losses.size(masks, 0.2).item() == pytest.approx(0)
    assert losses.size(masks, 0.4).item() == pytest.approx(math.log(2) ** 2)
    assert losses.size(masks, 0.1).item() == pytest.approx(math.log(2) ** 2)
    assert losses.size(torch.zeros(1, 2, 2), 0.1).isfinite()


def test_undecided_is_one_for_halves_and_nothing_for_zeros_and_ones() -> None:
    assert losses.undecided(torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])).item() == 0
    assert losses.undecided(torch.full((2, 3, 3), 0.5)).item() == 1
    assert losses.undecided(torch.tensor([[[0.25, 0.75]]])).item() == 0.75


@pytest.mark.parametrize(
    "loss",
    [
        lambda m: losses.entropy(m, 0.4),
        losses.undecided,
        lambda m: losses.unlike(m.flatten(1), torch.tensor([1, 4])),
        lambda m: losses.kept(m.flatten(1), torch.tensor([1, 4])),
        lambda m: losses.kept(m.flatten(1), torch.tensor([1, 4]), 0.5),
        lambda m: losses.unlike(m.flatten(1), torch.tensor([1, 4]), power=0.5),
    ],
)
def test_gradients_are_those_of_small_differences(loss) -> None:
    torch.autograd.gradcheck(loss, rand(2, 3, 4).requires_grad_())


# A whole step


def linear_classifier(seed: int = 3) -> Classifier:
    """Class scores that are weighted sums of the pixels, in float64."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Flatten(), nn.Linear(2 * 16, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(2 * rand(*parameter.shape, seed=seed + number) - 1)
    return Classifier(model.double().eval(), layer="0", mean=(0.4,), std=(0.3,))


def plain_logits(classifier: Classifier, picture: list[float]) -> list[float]:
    mix, _, line = classifier.model
    channels = [[(v - 0.4) / 0.3 * w for v in picture] for w in mix.weight.flatten().tolist()]
    seen = [value for channel in channels for value in channel]
    rows, bias = line.weight.tolist(), line.bias.tolist()
    return [sum(w * v for w, v in zip(row, seen, strict=True)) + b
            for row, b in zip(rows, bias, strict=True)]  # fmt: skip


def batch_of(classifier: Classifier, n: int = 5) -> TrainingBatch:
    images = rand(n, 1, 4, 4, seed=9)
    targets = torch.tensor([0, 1, 1, 2, 0])[:n]
    first = torch.tensor([[0, 2], [1, 0], [2, 1], [2, 0], [0, 1]])[:n]
    return TrainingBatch(images, targets, (rand(n, 2, 4, 4, seed=8),), first)


def adapter(features: tuple[Tensor], targets: Tensor | None = None) -> Tensor:
    return (features[0][:, 0] - features[0][:, 1]).sigmoid()


def plain_excess(rows: list[list[float]], targets: list[int], shown: list[int]) -> float:
    """2 r^4 / (1 + r^4), r the mean own probability over the mean of the same elsewhere; below 1
    less (1 - r^4) / (1 + r^4).
    """
    known = [[math.exp(v) / sum(map(math.exp, row)) for v in row] for row in rows]
    own, chance = [], []
    for i, y in enumerate(targets):
        others = [k for k in range(len(rows)) if y not in (targets[k], shown[k])]
        if y != shown[i] and others:
            own.append(known[i][y])
            chance.append(sum(known[k][y] for k in others) / len(others))
    if not own:
        return 1.0
    ratio = (sum(own) / len(own) + 1e-4) / (sum(chance) / len(chance) + 1e-4)
    return (2 * ratio**4 - max(0, 1 - ratio**4)) / (1 + ratio**4)


@pytest.mark.parametrize("seed", range(4))
def test_the_push_of_donors_follows_the_leakage_ratio(seed: int) -> None:
    generator = Generator().manual_seed(seed)
    logits = 3 * torch.randn(12, 4, generator=generator)
    targets, shown = (torch.randint(4, (12,), generator=generator) for _ in range(2))
    wanted = plain_excess(logits.tolist(), targets.tolist(), shown.tolist())
    assert losses.excess(logits, targets, shown).item() == pytest.approx(wanted, rel=1e-4)


def test_masks_that_say_their_class_are_pushed_off_it_and_masks_that_never_do_back_to_it() -> None:
    targets, shown = torch.arange(12) % 3, (torch.arange(12) // 3 + 1) % 3
    says_target = 20 * nn.functional.one_hot(targets, 3).double()
    assert losses.excess(says_target, targets, shown).item() == pytest.approx(2, abs=1e-3)
    assert losses.excess(-says_target, targets, shown).item() == pytest.approx(-1, abs=1e-3)
    assert losses.excess(torch.zeros(12, 3), targets, shown).item() == pytest.approx(1)
    # With one class there is no other mask to compare with.
    one = torch.zeros(4, dtype=torch.long)
    assert losses.excess(torch.rand(4, 3), one, one).item() == 1


def test_an_image_alone_in_its_batch_is_not_its_own_donor() -> None:
    classifier = linear_classifier()
    whole = batch_of(classifier)
    # The map is for a class that is not the label, as that of a wrong prediction is.
    one = whole.rows(torch.tensor([0]))._replace(targets=torch.tensor([1]))
    one = one._replace(first=torch.tensor([[0, 2]]))
    recipe, adapter = replace(EVERYTHING, stages=2), Lax([one.features[-1].shape[1]], classes=3)
    for seed in range(4):  # label or prediction, by a coin
        given = (adapter, one, recipe, Generator().manual_seed(seed))
        assert "donors" not in take_step(classifier, *given, classes=3).terms


EVERYTHING = LaxRecipe(
    keep=1.5, drop=0.7, donors=0.3, entropy=0.2, temperature=0.4, size=3, decide=0.9
)


@pytest.mark.parametrize("done", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("area", [None, 0.25])
def test_the_loss_is_the_sum_of_weights_times_terms_on_a_linear_classifier(done, area) -> None:
    classifier = linear_classifier()
    batch = batch_of(classifier)
    recipe = replace(EVERYTHING, area=area)
    step = take_step(classifier, adapter, batch, recipe, Generator(), done=done)
    masks = adapter(batch.features).flatten(1).tolist()
    pictures, targets = batch.images.flatten(1).tolist(), batch.targets.tolist()

    def say(pictures: list[list[float]], weights: list[list[float]]) -> list[list[float]]:
        mixed = [
            [p * w for p, w in zip(*pair, strict=True)]
            for pair in zip(pictures, weights, strict=True)
        ]
        return [plain_logits(classifier, picture) for picture in mixed]

    shown = say(pictures, masks)
    wanted = 1.5 * plain_cross_entropy(shown, targets)
    outside = say(pictures, [[1 - m for m in k] for k in masks])
    wanted += 0.7 * (0.5 + 0.5 * done) * plain_unlike(outside, targets)
    pairs = [i for i in range(5) if targets[i] != targets[i - 1]]  # image 0's donor is the last
    donated = say([pictures[i - 1] for i in pairs], [masks[i] for i in pairs])
    assert pairs == [1, 3, 4]
    views = say([pictures[i - 1] for i in range(5)], masks)
    push = plain_excess(views, targets, [targets[i - 1] for i in range(5)])
    assert push != pytest.approx(1, abs=0.01)
    wanted += 0.3 * push * plain_unlike(donated, [targets[i] for i in pairs])
    wanted += 0.2 * plain_entropy(masks, 0.4)
    every = [m for mask in masks for m in mask]
    mean = sum(every) / 80
    wanted += 3 * (mean if area is None else math.log(mean / area) ** 2)
    wanted += 0.9 * done * sum(4 * m * (1 - m) for m in every) / 80
    assert step.loss.item() == pytest.approx(wanted, rel=1e-6)  # logits are read in float32
    assert step.area.item() == pytest.approx(sum(every) / 80, abs=1e-12)
    assert step.share.item() == pytest.approx(sum(m > 0.5 for m in every) / 80)
    right = [max(range(3), key=row.__getitem__) == y for row, y in zip(shown, targets, strict=True)]
    assert step.accuracy.item() == pytest.approx(sum(right) / 5)


def test_terms_without_a_weight_are_left_out_and_cost_no_call() -> None:
    classifier = linear_classifier()
    sizes: list[int] = []
    handle = classifier.model.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    batch = batch_of(classifier)
    for recipe, calls in ((RECIPES["paper"], 5), (EVERYTHING, 15), (LaxRecipe(drop=1), 10)):
        step = take_step(classifier, adapter, batch, recipe, Generator())
        assert sizes.pop() == calls
        assert not sizes
        assert all(getattr(recipe, name) for name in step.terms)
    handle.remove()


@pytest.mark.parametrize("fills", [("black",), ("other",), tuple(TRAINING_FILLS)])
def test_masked_images_are_image_times_mask_and_fill_times_the_rest(fills) -> None:
    classifier = linear_classifier()
    seen: list[Tensor] = []
    handle = classifier.model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    batch = batch_of(classifier)
    recipe = LaxRecipe(drop=1, donors=1, fills=fills)
    take_step(classifier, adapter, batch, recipe, Generator().manual_seed(4))
    handle.remove()
    keep, drop, donors = (seen[0] * 0.3 + 0.4).split(5)
    generator = Generator().manual_seed(4)
    weights, images = adapter(batch.features)[:, None], batch.images
    for view, pictures, shown in (
        (keep, images, weights),
        (drop, images, 1 - weights),
        (donors, images[[4, 0, 1, 2, 3]], weights),
    ):
        fill = random_fills(pictures, fills, generator) if fills != ("black",) else 0
        torch.testing.assert_close(view, pictures * shown + fill * (1 - shown))


def test_a_step_is_differentiable_all_the_way_to_the_adapter() -> None:
    classifier = linear_classifier()
    batch = batch_of(classifier, 3)

    def loss(weight: Tensor) -> Tensor:
        def lax(features: tuple[Tensor], *_: object) -> Tensor:
            return (features[0] * weight[:, None, None]).sum(1).sigmoid()

        recipe = replace(EVERYTHING, fills=("other",), donors=0.0)  # whose push has no gradient
        return take_step(classifier, lax, batch, recipe, Generator().manual_seed(0)).loss

    weight = torch.tensor([0.7, -0.4], dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(loss(weight), weight)
    for k in range(2):
        nudge = torch.zeros(2, dtype=torch.float64)
        nudge[k] = 1e-2  # logits are read in float32
        slope = (loss(weight + nudge) - loss(weight - nudge)).item() / 2e-2
        assert found[k].item() == pytest.approx(slope, rel=1e-3, abs=1e-4)


# A loss of one's own


def test_a_loss_of_ones_own_reads_what_the_classifier_says_inside_and_outside_the_masks() -> None:
    classifier, batch = linear_classifier(), batch_of(linear_classifier())
    recipe = LaxRecipe(donors=1)
    batch = batch._replace(features=tuple(one.requires_grad_() for one in batch.features))
    masks = adapter(batch.features)[:, None]
    seen: list[TrainingStep] = []

    def loss(step: TrainingStep) -> dict[str, Tensor]:
        seen.append(step)
        half = step.ask([(step.images, step.masks / 2)])[0]
        return {"kept": step.kept.mean(), "rest": 2 * step.rest.mean(), "half": half.mean()}

    found = take_step(classifier, adapter, batch, recipe, Generator(), done=0.5, loss=loss)
    views = (batch.images * shown for shown in (masks, 1 - masks, masks / 2))
    kept, rest, half = (classifier(view).float() for view in views)
    assert found.terms["kept"].item() == pytest.approx(kept.mean().item())
    assert found.terms["rest"].item() == pytest.approx(2 * rest.mean().item())
    assert found.terms["half"].item() == pytest.approx(half.mean().item())
    assert found.loss.item() == pytest.approx((kept + 2 * rest + half).mean().item(), rel=1e-5)
    right = (kept.argmax(1) == batch.targets).float().mean()
    assert found.accuracy.item() == right.item()
    (step,) = seen
    assert torch.equal(step.predicted, batch.first[:, 0])
    assert torch.equal(step.labels, batch.targets)
    assert (step.done, step.absent) == (0.5, None)


def test_several_views_are_asked_in_one_forward_pass_and_once() -> None:
    classifier, batch = linear_classifier(), batch_of(linear_classifier())
    sizes: list[int] = []
    handle = classifier.model.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))

    batch = batch._replace(features=tuple(one.requires_grad_() for one in batch.features))

    def loss(step: TrainingStep) -> Tensor:
        kept, rest, donors = step.views("kept", "rest", "donors")
        return (kept - rest).mean() + step.kept.mean() + step.rest.mean() + donors.mean()

    take_step(classifier, adapter, batch, LaxRecipe(), Generator(), loss=loss)
    handle.remove()
    assert sizes == [15]


def test_the_loss_of_a_recipe_is_one_of_these_and_terms_can_be_added() -> None:
    classifier, batch = linear_classifier(), batch_of(linear_classifier())
    batch = batch._replace(features=tuple(one.requires_grad_() for one in batch.features))
    given = (classifier, adapter, batch, EVERYTHING)
    plain = take_step(*given, Generator())
    more = take_step(
        *given,
        Generator(),
        loss=lambda step: recipe_loss(step, EVERYTHING) | {"smooth": step.masks.diff().abs().sum()},
    )
    masks = adapter(batch.features)
    edges = (masks[:, :, 1:] - masks[:, :, :-1]).abs().sum()
    assert more.loss.item() == pytest.approx((plain.loss + edges).item())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda step: step.masks, r"without axes, or a dict of such by name, got \[5, 4, 4\]"),
        (lambda step: {"a": step.masks.mean(), "b": 3.0}, "got float for 'b': take the mean"),
        (lambda step: step.masks.detach().mean(), "does not depend on the masks"),
        (lambda step: step.views("keep")[0].mean(), "Did you mean 'kept'"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss, words: str) -> None:
    batch = batch_of(linear_classifier())
    features = tuple(stage.requires_grad_() for stage in batch.features)
    batch = batch._replace(features=features)
    with pytest.raises(UserError, match=words):
        take_step(linear_classifier(), adapter, batch, LaxRecipe(), Generator(), loss=loss)


def test_maps_grow_as_bilinear_weights_say() -> None:
    cells = torch.tensor([[[[0.0, 1.0]]]])
    found = upsampled(cells, torch.zeros(1, 3, 2, 4))
    assert found.tolist() == [[[[0.0, 0.25, 0.75, 1.0]] * 2]]


# A class as input


def test_maps_are_asked_for_the_target_or_the_prediction_and_for_a_class_that_is_not_there() -> (
    None
):
    batch = TrainingBatch(
        *(torch.zeros(4000, *shape) for shape in ((1, 1, 1), ())), (), torch.zeros(0)
    )
    targets = torch.full((4000,), 3)
    first = torch.tensor([[3, 1], [5, 3]]).repeat(2000, 1)  # half of them are wrong
    batch = batch._replace(targets=targets, first=first)
    asked, absent = asked_classes(batch, 8, Generator().manual_seed(0))
    assert (asked[::2] == 3).all()
    wrong = asked[1::2]
    assert {*wrong.tolist()} == {3, 5}
    assert (wrong == 5).float().mean().item() == pytest.approx(0.5, abs=0.05)
    # Half the second class, half any of the eight.
    share = (absent[::2] == 1).float().mean().item()
    assert share == pytest.approx(0.5 + 0.5 / 8, abs=0.05)
    assert {*absent.tolist()} == {*range(8)}


def test_the_map_of_an_absent_class_costs_its_mean_and_one_that_is_there_costs_nothing() -> None:
    classifier, batch = linear_classifier(), batch_of(linear_classifier())
    values = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
    asked: list[Tensor] = []

    def lax(features: object, targets: Tensor) -> Tensor:
        asked.append(targets)
        return values[targets][:, None, None].expand(-1, 4, 4)

    recipe = LaxRecipe(absent=2.0, stages=3)
    step = take_step(classifier, lax, batch, recipe, Generator().manual_seed(1), classes=3)
    there, absent = asked
    known = zip(absent.tolist(), batch.targets.tolist(), batch.first[:, 0].tolist(), strict=True)
    counted = [values[one].item() if one not in pair else 0.0 for one, *pair in known]
    assert any(counted)
    assert not all(counted)
    assert step.terms["absent"].item() == pytest.approx(2 * sum(counted) / 5)
    keep = step.terms["keep"].item()
    assert step.loss.item() == pytest.approx(keep + 2 * sum(counted) / 5)
    assert step.area.item() == pytest.approx(values[there].mean().item())
