import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter
from torch import Tensor, nn

from reference import (
    COLUMNS,
    HEATMAPS,
    area,
    heatmaps_like,
    one_at_a_time,
    reference_columns,
    small_net,
)
from small_models import small
from sufficit import Classifier, evaluate
from sufficit.metrics import Metric
from sufficit.perturbation.bands import EVERYTHING
from sufficit.perturbation.fills import blur, noise

COARSE = {"value_step": 0.05, "percent_step": 0.1}
PERCENTAGE = [name for name in COLUMNS if name.endswith("_percent")]
VALUE_BASED = [name for name in COLUMNS if name not in PERCENTAGE]


def random_images(n: int, channels: int, size: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.rand(n, channels, *size, generator=torch.Generator().manual_seed(seed))


def references(logits_of, images, heatmaps, targets=None, fills=None, **options) -> dict:
    """The reference of each image, column by column: name -> [N]."""
    rows = [
        reference_columns(
            logits_of,
            images[i],
            heatmaps[i],
            None if targets is None else int(targets[i]),
            fill=0.0 if fills is None else fills[i],
            **options,
        )
        for i in range(len(images))
    ]
    return {name: np.array([row[name] for row in rows]) for name in COLUMNS}


def assert_equal_columns(scores, wanted: dict, names=COLUMNS, tolerance: float = 1e-6) -> None:
    for name in names:
        np.testing.assert_allclose(
            np.asarray(scores[name]), np.asarray(wanted[name]), rtol=0, atol=tolerance, err_msg=name
        )


def assert_answers_vary(wanted: dict) -> None:
    """Without this a model that always says the same would pass every comparison."""
    by_rank = np.concatenate([wanted["insertion_percent"], wanted["deletion_percent"]])
    assert ((by_rank > 0.1) & (by_rank < 0.9)).mean() >= 0.5


# Parity with one mask at a time


@cache
def case(kind: str, channels: int, size: tuple[int, int]):
    """Five images, and what the reference says of them."""
    model = small_net(channels, size, seed=2)
    images = random_images(5, channels, size, seed=2)
    heatmaps = heatmaps_like(kind, 5, size, seed=2)
    wanted = references(one_at_a_time(model), images, heatmaps)
    assert_answers_vary(wanted)
    return model, images, heatmaps, wanted


@pytest.mark.parametrize("batch_size", [1, 7, None])
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize(("channels", "size"), [(3, (8, 6)), (1, (7, 11))])
@pytest.mark.parametrize("kind", HEATMAPS)
def test_every_column_equals_one_mask_at_a_time(kind, channels, size, n, batch_size):
    model, images, heatmaps, wanted = case(kind, channels, size)
    scores = evaluate(Classifier(model), images[:n], heatmaps[:n], batch_size=batch_size)
    assert tuple(scores.columns) == COLUMNS
    assert len(scores) == n
    assert_equal_columns(scores, {name: values[:n] for name, values in wanted.items()})


@pytest.mark.parametrize("score", ["accuracy", "confidence"])
@pytest.mark.parametrize("alpha_min", [0.0, 0.437, 0.5, 0.51, 1.0])
@pytest.mark.parametrize("kind", HEATMAPS)
def test_every_alpha_min_and_score_equals_one_mask_at_a_time(kind, alpha_min, score):
    model = small_net(size=(6, 5), seed=2)
    images = random_images(3, 3, (6, 5), seed=2)
    heatmaps = heatmaps_like(kind, 3, (6, 5))
    heatmaps[2, 0, 0] = alpha_min  # in the penalty, not in the mask
    options = {"alpha_min": alpha_min, "score": score, "value_step": 0.02, "percent_step": 0.05}
    wanted = references(one_at_a_time(model), images, heatmaps, **options)
    assert_answers_vary(wanted)
    assert_equal_columns(evaluate(Classifier(model), images, heatmaps, **options), wanted)


@pytest.mark.parametrize(
    ("value_step", "percent_step"), [(0.3, 0.3), (0.07, 0.15), (1.0, 1.0), (0.5, 0.25), (0.9, 0.6)]
)
@pytest.mark.parametrize("alpha_min", [0.35, 0.95])
def test_steps_that_do_not_divide_one_end_with_the_point_one(value_step, percent_step, alpha_min):
    model = small_net(size=(8, 6), seed=2)
    images, heatmaps = random_images(4, 3, (8, 6), seed=2), heatmaps_like("random", 4, (8, 6))
    options = {"value_step": value_step, "percent_step": percent_step, "alpha_min": alpha_min}
    for score in ("accuracy", "confidence"):
        wanted = references(one_at_a_time(model), images, heatmaps, score=score, **options)
        scores = evaluate(Classifier(model), images, heatmaps, score=score, **options)
        assert_equal_columns(scores, wanted)


@pytest.mark.parametrize("size", [(5, 5), (1, 1), (1, 7), (5, 15), (3, 1)])
def test_a_share_of_half_a_pixel_rounds_up(size):
    # 2 % of 25 pixels is half a pixel at every odd step; 58 % are 14.5, in floats a little less.
    model = small_net(size=size, seed=2)
    images, heatmaps = random_images(4, 3, size, seed=2), heatmaps_like("random", 4, size)
    wanted = references(one_at_a_time(model), images, heatmaps, score="confidence")
    scores = evaluate(Classifier(model), images, heatmaps, score="confidence")
    assert_equal_columns(scores, wanted)


@pytest.mark.parametrize(("channels", "n"), [(1, 2), (3, 4)])
def test_given_targets_need_not_be_what_the_model_predicts(channels, n):
    model = small_net(channels, seed=2)
    images, heatmaps = (
        random_images(n, channels, (8, 6), seed=2),
        heatmaps_like("random", n, (8, 6)),
    )
    predicted = model(images).argmax(1)
    targets = (predicted + 1) % 3
    for score in ("accuracy", "confidence"):
        options = {"score": score, **COARSE}
        wanted = references(one_at_a_time(model), images, heatmaps, targets, **options)
        scores = evaluate(Classifier(model), images, heatmaps, targets, **options)
        assert_equal_columns(scores, wanted)
        assert scores.targets.tolist() == targets.tolist()
        assert scores.clean.tolist() == [0] * n


def test_targets_left_out_are_the_models_own_prediction_on_the_whole_image():
    model = small_net(seed=2)
    images, heatmaps = random_images(9, 3, (8, 6), seed=2), heatmaps_like("random", 9, (8, 6))
    predicted = model(images).argmax(1)
    assert len(predicted.unique()) == 3
    scores = evaluate(Classifier(model), images, heatmaps, **COARSE)
    assert scores.targets.tolist() == predicted.tolist()
    assert scores.clean.tolist() == [1] * 9
    assert_equal_columns(scores, evaluate(Classifier(model), images, heatmaps, predicted, **COARSE))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_heatmaps_of_any_float_type_are_compared_in_float32(dtype):
    model = small_net(seed=2)
    images = random_images(4, 3, (8, 6), seed=2)
    heatmaps = heatmaps_like("on_the_grid", 4, (8, 6)).to(torch.float64).mul(100).round().div(100)
    heatmaps = heatmaps.to(dtype)
    wanted = references(one_at_a_time(model), images, heatmaps.float(), alpha_min=0.37)
    assert_equal_columns(evaluate(Classifier(model), images, heatmaps, alpha_min=0.37), wanted)


def test_strides_of_images_and_heatmaps_do_not_matter():
    model = small_net(size=(8, 6), seed=2)
    images, heatmaps = random_images(3, 3, (8, 6), seed=2), heatmaps_like("random", 3, (8, 6))
    plain = evaluate(Classifier(model), images, heatmaps, **COARSE)
    last = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    turned = heatmaps.transpose(1, 2).contiguous().transpose(1, 2)
    assert not last.is_contiguous()
    assert not turned.is_contiguous()
    assert_equal_columns(evaluate(Classifier(model), last, turned, **COARSE), plain)


# Fills and normalisation

MEAN, STD = (0.4, 0.5, 0.3), (0.2, 0.3, 0.25)


def blurred_by_scipy(images: Tensor) -> Tensor:
    sigma = min(images.shape[-2:]) / 10
    radius = math.ceil(3 * sigma)
    planes = [
        [gaussian_filter(p.double().numpy(), sigma, mode="mirror", radius=radius) for p in image]
        for image in images
    ]
    return torch.tensor(np.array(planes)).float()


OWN = torch.rand(5, 3, 12, 10, generator=torch.Generator().manual_seed(9))
FILLS = {
    "black": ("black", torch.zeros_like),
    "mean": ("mean", lambda x: torch.stack([i.flatten(1).mean(1)[:, None, None] for i in x])),
    "blur": ("blur", blurred_by_scipy),
    "noise": ("noise", lambda x: torch.stack([noise(x[:1])[0]] * len(x))),
    "a number": (torch.tensor(0.7), lambda x: torch.full_like(x, 0.7)),
    "a colour": (OWN[0, :, 0, 0], OWN[0, :, :1, :1].expand_as),
    "one image": (OWN[1], OWN[1].expand_as),
    "one image in a batch": (OWN[2:3], OWN[2].expand_as),
    "one image per image": (OWN, lambda x: OWN),
    "one colour per image": (OWN[:, :, :1, :1], OWN[:, :, :1, :1].expand_as),
}


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, None])
@pytest.mark.parametrize("name", FILLS)
def test_each_fill_stands_in_for_the_hidden_pixels(name, batch_size, normalised):
    fill, by_hand = FILLS[name]
    mean, std = (MEAN, STD) if normalised else (None, None)
    model = small_net(size=(12, 10), seed=2)
    images, heatmaps = random_images(5, 3, (12, 10), seed=5), heatmaps_like("random", 5, (12, 10))
    for score in ("accuracy", "confidence"):
        options = {"score": score, "value_step": 0.1, "percent_step": 0.2}
        # The blur itself is held to scipy's below; here it is the same, to the last digit.
        shown = blur(images) if name == "blur" else by_hand(images)
        wanted = references(
            one_at_a_time(model, mean, std), images, heatmaps, fills=shown, **options
        )
        classifier = Classifier(model, mean=mean, std=std)
        scores = evaluate(classifier, images, heatmaps, fill=fill, batch_size=batch_size, **options)
        assert_equal_columns(scores, wanted, tolerance=1e-6)


def test_fills_differ_in_what_they_score():
    model = small_net(size=(12, 10), seed=2)
    images, heatmaps = random_images(5, 3, (12, 10), seed=5), heatmaps_like("random", 5, (12, 10))
    means = {
        name: evaluate(
            Classifier(model), images, heatmaps, fill=fill, score="confidence", **COARSE
        ).mean()["insertion_percent"]
        for name, (fill, _) in FILLS.items()
    }
    assert len({round(value, 4) for value in means.values()}) == len(FILLS)


@pytest.mark.parametrize("size", [(12, 10), (20, 33), (9, 2), (10, 10), (31, 8)])
def test_the_blur_is_the_gaussian_of_a_tenth_of_the_shorter_side_mirrored_at_the_border(size):
    images = random_images(2, 3, size)
    torch.testing.assert_close(blur(images), blurred_by_scipy(images), rtol=0, atol=1e-6)


def test_the_noise_fill_is_the_same_for_every_image_and_batch_and_leaves_the_seed_alone():
    images = random_images(6, 3, (8, 6))
    before = torch.get_rng_state()
    assert torch.equal(noise(images), noise(images[2:3]))
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 <= noise(images).min() < 0.1
    assert 0.9 < noise(images).max() <= 1


# Predictions known by hand


class SumOfPixels(nn.Module):
    """Class 0 when the pixels sum to more than c, else class 1: logits [sum - c, 0]."""

    def __init__(self, c: float) -> None:
        super().__init__()
        self.c = c

    def forward(self, x: Tensor) -> Tensor:
        sums = x.flatten(1).sum(1)
        return torch.stack([sums - self.c, torch.zeros_like(sums)], 1)


class MeanOfPixels(nn.Module):
    """The confidence of class 0 is the mean of the pixels: logits [log m, log(1 - m)]."""

    def forward(self, x: Tensor) -> Tensor:
        means = x.flatten(1).mean(1).clamp(0, 1)
        return torch.stack([means.log(), (1 - means).log()], 1)


def exactly(value: float):
    return pytest.approx(value, abs=1e-12)


def test_a_staircase_on_the_sum_of_the_pixels_by_hand():
    # 50 pixels, i = 0..49, heatmap (2i + 1) / 100, between the points j of a grid of 0.02; pixels
    # are 1 for i >= 25 and 0.5 below. Class 0 needs a sum above 15.25; the whole has 37.5.
    ramp = torch.arange(50)
    heatmaps = ((2 * ramp + 1) / 100).reshape(1, 5, 10)
    images = torch.where(ramp >= 25, 1.0, 0.5).reshape(1, 1, 5, 10)
    scores = evaluate(Classifier(SumOfPixels(15.25)), images, heatmaps, value_step=0.02)
    assert scores.targets.tolist() == [0]
    # Insertion at a = j/50 keeps i >= j: 50 - j ones (more than 25 for j < 25): right for
    # 50 - j >= 16, j = 0..34. That is 34 whole steps and half a step.
    assert scores.insertion_pixel.item() == exactly(34 * 0.02 + 0.01)
    # Deletion keeps i < j: 12.5 + (j - 25) > 15.25 from j = 28 on: 22 steps and a half.
    assert scores.deletion_pixel.item() == exactly(22 * 0.02 + 0.01)
    # The first j by rank are i >= 50 - j: right from j = 16 on: 34 steps and a half.
    assert scores.insertion_percent.item() == exactly(34 * 0.02 + 0.01)
    # Without the first j there is i < 50 - j: right for 50 - j >= 28, j = 0..22.
    assert scores.deletion_percent.item() == exactly(22 * 0.02 + 0.01)
    # MSI: Show(>0.5) has 25, right; Show(<=0.5) has 12.5, wrong. Show(>a) is right for j = 25..34:
    # 9.5 steps of 25. Hide(>a) keeps 25 <= i < j: right for j - 25 >= 16, j = 41..50: 9.5 of 25.
    assert scores.base_score.item() == exactly(0.5 * (1 - 0 + (9.5 - 9.5) / 25))
    assert scores.mask_penalty.item() == exactly(0.5)
    assert scores.msi.item() == exactly(0.0)
    # At 0.3 (j = 15): Show(>0.3) has 30 and is right, Show(<=0.3) has 7.5 and is wrong. Show(>a)
    # is right for j = 15..34: 19.5 of 35 steps. Hide keeps 15 <= i < j: 5 + (j - 25) > 15.25 from
    # j = 36 on: 14.5 of 35. 35 of 50 pixels are in the mask.
    scores = evaluate(
        Classifier(SumOfPixels(15.25)), images, heatmaps, value_step=0.02, alpha_min=0.3
    )
    assert scores.base_score.item() == exactly(0.5 * (1 - 0 + (19.5 - 14.5) / 35))
    assert scores.mask_penalty.item() == exactly(0.7)
    assert scores.msi.item() == exactly(0.5 + 1 / 14 - 0.7)


def test_an_alpha_min_between_grid_points_by_hand():
    # The same image at 0.31, halfway between j = 15 and j = 16: i >= 15 has value 0.31, which in
    # float32 is not above 0.31, so Show keeps i >= 16, and the penalty counts i = 15 as well.
    ramp = torch.arange(50)
    heatmaps = ((2 * ramp + 1) / 100).reshape(1, 5, 10)
    images = torch.where(ramp >= 25, 1.0, 0.5).reshape(1, 1, 5, 10)
    scores = evaluate(
        Classifier(SumOfPixels(15.25)), images, heatmaps, value_step=0.02, alpha_min=0.31
    )
    # Show(>a) is right at 0.31 and for j = 16..34, wrong from j = 35: 0.68 - 0.31 + 0.01 = 0.38 of
    # 0.69. Hide keeps 16 <= i < j: 4.5 + (j - 25) > 15.25 from j = 36 on: 14.5 steps, 0.29 of 0.69.
    assert scores.base_score.item() == exactly(0.5 * (1 + (0.38 - 0.29) / 0.69))
    assert scores.mask_penalty.item() == exactly(0.7)
    # The curves by pixel value stay on the grid.
    assert scores.insertion_pixel.item() == exactly(34.5 * 0.02)
    assert scores.deletion_pixel.item() == exactly(22.5 * 0.02)


def test_a_perfect_mask_by_hand():
    # The sum needs the three pixels with heatmap 1; the rest is black, and the heatmap 0 there.
    images = torch.zeros(1, 1, 5, 4)
    images[0, 0, 0, :3] = 1
    scores = evaluate(Classifier(SumOfPixels(2.5)), images, images[:, 0])
    # Value: Show(>a) is right up to 0.99 and empty at 1: 99 steps and a half of 100. The whole is
    # kept only at a = 1 in deletion: half a step.
    assert scores.insertion_pixel.item() == exactly(0.995)
    assert scores.deletion_pixel.item() == exactly(0.005)
    # Percent: k = 12 % of 20 pixels are 2.4, so 2, k = 14 % are 2.8, so 3. Insertion is right from
    # 14 % on: 43 steps and a half. Deletion fails once a pixel goes: k = 2 % are 0.4, so none,
    # k = 4 % are 0.8, so 1. Right at 0 and 2 %: a step and a half.
    assert scores.insertion_percent.item() == exactly(43.5 * 0.02)
    assert scores.deletion_percent.item() == exactly(1.5 * 0.02)
    # Show 49.5 of 50 steps, Hide half a step: at a = 1 it keeps all three.
    assert scores.base_score.item() == exactly(0.5 * (1 + 0.99 - 0.01))
    assert scores.mask_penalty.item() == exactly(3 / 20)
    assert scores.msi.item() == exactly(0.99 - 0.15)


@pytest.mark.parametrize(
    ("value", "alpha_min", "base", "penalty"),
    [
        # Show(>a_min) is empty, its complement whole; both curves are empty: (0 - 1) / 2.
        (0.0, 0.5, -0.5, 0.0),
        (0.5, 0.5, -0.5, 1.0),
        (0.0, 0.0, -0.5, 1.0),
        # Show is whole below 1 and empty there, Hide the reverse: (1 - 0 + 0.99 - 0.01) / 2.
        (1.0, 0.5, 0.99, 1.0),
        # Over 100 steps: (1 - 0 + 0.995 - 0.005) / 2.
        (1.0, 0.0, 0.995, 1.0),
        # No interval: the curves are their value at 1, which is empty for both.
        (1.0, 1.0, -0.5, 1.0),
        (0.9, 1.0, -0.5, 0.0),
        # Whole for a in 0.5..0.74, 24.5 of 50 steps; Hide from 0.75 on, 25.5 of 50.
        (0.75, 0.5, 0.5 * (1 + (24.5 - 25.5) / 50), 1.0),
    ],
)
def test_flat_heatmaps_by_hand(value, alpha_min, base, penalty):
    images, heatmaps = torch.ones(1, 1, 4, 4), torch.full((1, 4, 4), value)
    scores = evaluate(Classifier(SumOfPixels(0.5)), images, heatmaps, alpha_min=alpha_min)
    assert scores.base_score.item() == exactly(base)
    assert scores.mask_penalty.item() == exactly(penalty)
    assert scores.msi.item() == exactly(base - penalty)


def test_the_penalty_at_zero_counts_every_pixel_also_where_tiny_numbers_are_flushed():
    images, heatmaps = torch.ones(1, 1, 4, 4), torch.zeros(1, 4, 4)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormal numbers")
    try:
        scores = evaluate(Classifier(SumOfPixels(0.5)), images, heatmaps, alpha_min=0.0)
    finally:
        torch.set_flush_denormal(False)
    assert scores.mask_penalty.item() == exactly(1.0)


def test_tied_pixels_are_ranked_in_reading_order():
    # All tied: the first in reading order goes in first, and the one bright pixel is third of 4.
    images = torch.zeros(1, 1, 2, 2)
    images[0, 0, 1, 0] = 1
    scores = evaluate(
        Classifier(SumOfPixels(0.5)), images, torch.full((1, 2, 2), 0.3), percent_step=0.25
    )
    # Insertion: wrong, wrong, wrong, right, right at k = 0..4 quarters: 1.5 steps.
    assert scores.insertion_percent.item() == exactly(1.5 * 0.25)
    # Deletion: right, right, right, wrong, wrong: 2.5 steps.
    assert scores.deletion_percent.item() == exactly(2.5 * 0.25)


def test_confidence_and_fidelity_by_hand():
    # Confidence is the mean of the pixels, all of them 0.75: 0.75 for the whole. Heatmap 1 on 4 of
    # the 16 pixels, 0 on the rest, so Show(>a) has 0.1875 for a < 1 and 0 at 1.
    images, heatmaps = torch.full((1, 1, 4, 4), 0.75), torch.zeros(1, 4, 4)
    heatmaps[0, 1] = 1
    scores = evaluate(
        Classifier(MeanOfPixels()), images, heatmaps, score="confidence", percent_step=0.25
    )
    close = {"abs": 1e-6}  # the softmax is in float32
    assert scores.targets.tolist() == [0]
    assert scores.insertion_pixel.item() == pytest.approx(0.1875 * 0.995, **close)
    # Deletion keeps the other 12, 0.5625, for a < 1, and all at 1.
    assert scores.deletion_pixel.item() == pytest.approx(0.5625 * 0.995 + 0.75 * 0.005, **close)
    assert scores.fid_minus_pixel.item() == pytest.approx(0.5625 * 0.995 + 0.75 * 0.005, **close)
    assert scores.fid_plus_pixel.item() == pytest.approx(0.1875 * 0.995, **close)
    # By share of the pixels everything is a straight line from 0 to 0.75 or back.
    for name in PERCENTAGE:
        assert scores[name].item() == pytest.approx(0.375, **close)
    # (0.1875 - 0.5625 + 0.1875 * (0.99 - 0.01)) / 2, and a quarter of the pixels.
    assert scores.base_score.item() == pytest.approx((-0.375 + 0.18375) / 2, **close)
    assert scores.mask_penalty.item() == exactly(0.25)
    assert scores.msi.item() == pytest.approx((-0.375 + 0.18375) / 2 - 0.25, **close)


def test_fidelity_is_of_the_softmax_whatever_the_score():
    # As above, but scored by accuracy: class 0 needs a mean above a half.
    images, heatmaps = torch.full((1, 1, 4, 4), 0.75), torch.zeros(1, 4, 4)
    heatmaps[0, 1] = 1
    scores = evaluate(Classifier(MeanOfPixels()), images, heatmaps, percent_step=0.25)
    assert scores.insertion_pixel.item() == exactly(0.0)  # 0.1875 and less: wrong everywhere
    assert scores.deletion_pixel.item() == exactly(1.0)  # 0.5625 and more: right everywhere
    assert scores.fid_plus_pixel.item() == pytest.approx(0.1875 * 0.995, abs=1e-6)
    assert scores.fid_minus_percent.item() == pytest.approx(0.375, abs=1e-6)
    # Shares 0, 0.1875, 0.375, 0.5625, 0.75: right from the fourth point on.
    assert scores.insertion_percent.item() == exactly(1.5 * 0.25)
    # The confidence *for the target*: of class 1 it is 1 minus the mean, and the drop is the same.
    other = evaluate(
        Classifier(MeanOfPixels()), images, heatmaps, torch.tensor([1]), percent_step=0.25
    )
    assert other.fid_plus_pixel.item() == pytest.approx(0.1875 * 0.995, abs=1e-6)
    assert other.insertion_pixel.item() == exactly(1.0)
    assert other.clean.tolist() == [0]


def test_curves_are_those_whose_area_is_the_column():
    model, images, heatmaps, wanted = case("random", 3, (8, 6))
    curves = evaluate(Classifier(model), images, heatmaps).curves()
    for name in ("insertion_pixel", "deletion_pixel", "insertion_percent", "deletion_percent"):
        curve = curves[name]
        areas = [area(list(curve.grid), row.tolist()) for row in curve.accuracy]
        np.testing.assert_allclose(areas, wanted[name], atol=1e-9)
    clean = curves["insertion_pixel"].confidence[:, 0]  # keeps M > 0: everything
    drops = (clean[:, None] - curves["deletion_percent"].confidence).abs()
    areas = [area(list(curves["deletion_percent"].grid), row.tolist()) for row in drops]
    np.testing.assert_allclose(areas, wanted["fid_plus_percent"], atol=1e-6)


def test_the_frame_has_one_row_per_image_with_every_column():
    model, images, heatmaps, wanted = case("random", 3, (8, 6))
    scores = evaluate(Classifier(model), images, heatmaps)
    frame = scores.frame()
    for name in COLUMNS:
        np.testing.assert_allclose(frame[name], wanted[name], atol=1e-6)
    assert frame["target"].tolist() == model(images).argmax(1).tolist()
    assert frame["calls"].tolist() == scores.calls.tolist()
    assert scores.mean()["msi"] == pytest.approx(wanted["msi"].mean(), abs=1e-6)


# Properties

SIZE = (4, 3)
TINY = small_net(size=SIZE, seed=3)
TINY_OPTIONS = {"value_step": 0.1, "percent_step": 0.1}
quick = settings(max_examples=60, deadline=None)
levels = st.lists(st.integers(0, 20), min_size=12, max_size=12)
maps = st.lists(levels, min_size=3, max_size=3).map(
    lambda rows: torch.tensor(rows).reshape(3, *SIZE) / 20
)
image_batches = st.integers(0, 10_000).map(lambda seed: random_images(3, 3, SIZE, seed))
alphas = st.one_of(st.floats(0, 1, width=32), st.integers(0, 20).map(lambda i: i / 20))
kinds = st.sampled_from(["accuracy", "confidence"])


@quick
@given(image_batches, maps, alphas, kinds)
def test_msi_lies_between_minus_two_and_one(images, heatmaps, alpha_min, score):
    options = {"alpha_min": alpha_min, "score": score, **TINY_OPTIONS}
    scores = evaluate(Classifier(TINY), images, heatmaps, torch.tensor([0, 1, 2]), **options)
    assert (scores.msi >= -2 - 1e-9).all()
    assert (scores.msi <= 1 + 1e-9).all()
    torch.testing.assert_close(scores.msi, scores.base_score - scores.mask_penalty)
    for name in set(COLUMNS) - {"base_score", "msi"}:
        assert (scores[name] >= -1e-9).all()
        assert (scores[name] <= 1 + 1e-9).all()


@quick
@given(image_batches, maps, alphas, kinds)
def test_any_heatmap_and_alpha_min_equals_one_mask_at_a_time(images, heatmaps, alpha_min, score):
    options = {"alpha_min": alpha_min, "score": score, **TINY_OPTIONS}
    wanted = references(one_at_a_time(TINY), images, heatmaps, **options)
    assert_equal_columns(evaluate(Classifier(TINY), images, heatmaps, **options), wanted)


@quick
@given(image_batches, maps, st.integers(1, 60), st.permutations(range(3)), kinds)
def test_batch_size_and_order_of_images_change_nothing(images, heatmaps, batch_size, order, score):
    options = {"score": score, **TINY_OPTIONS}
    plain = evaluate(Classifier(TINY), images, heatmaps, **options)
    mixed = evaluate(
        Classifier(TINY), images[order], heatmaps[order], batch_size=batch_size, **options
    )
    assert_equal_columns(mixed, {name: plain[name][order] for name in COLUMNS})
    assert mixed.calls.tolist() == plain.calls[order].tolist()


@quick
@given(image_batches, maps, st.lists(st.integers(0, 2**20), min_size=21, max_size=21, unique=True))
def test_percentage_columns_see_the_order_of_the_values_only(images, heatmaps, drawn):
    # 21 values of a sorted table of float32 stand for the 21 levels: strictly increasing.
    table = torch.tensor(sorted(drawn)) / 2**20
    assert (table[1:] > table[:-1]).all()
    mapped = table[(heatmaps * 20).round().long()]
    options = {"score": "confidence", "columns": PERCENTAGE, **TINY_OPTIONS}
    plain = evaluate(Classifier(TINY), images, heatmaps, **options)
    other = evaluate(Classifier(TINY), images, mapped, **options)
    assert_equal_columns(other, plain, PERCENTAGE)


@quick
@given(image_batches, maps, alphas)
def test_columns_asked_one_at_a_time_equal_columns_asked_together(images, heatmaps, alpha_min):
    options = {"alpha_min": alpha_min, **TINY_OPTIONS}
    together = evaluate(Classifier(TINY), images, heatmaps, **options)
    for name in COLUMNS:
        alone = evaluate(Classifier(TINY), images, heatmaps, columns=[name], **options)
        assert tuple(alone.columns) == (name,)
        assert_equal_columns(alone, together, [name])
        assert (alone.calls <= together.calls).all()


@quick
@given(image_batches, maps, st.sampled_from(["black", "mean", "blur", "noise", "own"]))
def test_inputs_are_not_changed(images, heatmaps, fill):
    targets = torch.tensor([2, 0, 1])
    filled = torch.full((3, 3, *SIZE), 0.25) if fill == "own" else fill
    given_ = [images, heatmaps, targets] + ([filled] if isinstance(filled, Tensor) else [])
    before = [tensor.clone() for tensor in given_]
    evaluate(Classifier(TINY), images, heatmaps, targets, fill=filled, **TINY_OPTIONS)
    for now, then in zip(given_, before, strict=True):
        assert torch.equal(now, then)


def test_inputs_that_want_gradients_get_none():
    model = small_net(seed=2)
    images = random_images(2, 3, (8, 6)).requires_grad_()
    heatmaps = heatmaps_like("random", 2, (8, 6)).requires_grad_()
    scores = evaluate(Classifier(model), images, heatmaps, score="confidence", **COARSE)
    assert not any(values.requires_grad for values in scores.columns.values())
    assert images.grad is None
    assert heatmaps.grad is None
    plain = evaluate(
        Classifier(model), images.detach(), heatmaps.detach(), score="confidence", **COARSE
    )
    assert_equal_columns(scores, plain)


# Model calls


class Counting(nn.Module):
    """Counts the images that really go through the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.images = 0

    def forward(self, x: Tensor) -> Tensor:
        self.images += len(x)
        return self.model(x)


def all_distinct(n: int, size: tuple[int, int]) -> Tensor:
    """Every pixel a value of its own, some in every hundredth, crowded towards 0."""
    pixels = size[0] * size[1]
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(pixels, generator=generator) for _ in range(n)]
    heatmaps = ((torch.stack(rows) + 0.5) / pixels) ** 1.2
    assert all(len(row.unique()) == pixels for row in heatmaps)
    return heatmaps.reshape(n, *size)


@pytest.mark.parametrize("batch_size", [None, 64, 1000])
@pytest.mark.parametrize("targets", [None, torch.tensor([0, 1, 2])])
def test_eleven_columns_cost_at_most_356_model_calls_per_image(targets, batch_size):
    model = Counting(small_net(size=(20, 20), seed=2))
    images, heatmaps = random_images(3, 3, (20, 20)), all_distinct(3, (20, 20))
    scores = evaluate(Classifier(model), images, heatmaps, targets, batch_size=batch_size)
    assert model.images == scores.calls.sum().item()
    assert (scores.calls <= 356).all()
    # 100 of Show, 99 of deletion and 49 of Hide are distinct whatever is merged.
    assert (scores.calls >= 248).all()


@pytest.mark.parametrize("batch_size", [None, 5])
def test_value_columns_of_a_heatmap_of_two_values_cost_six_calls_at_most(batch_size):
    model = Counting(small_net(size=(20, 20), seed=2))
    images, heatmaps = random_images(3, 3, (20, 20)), heatmaps_like("two_valued", 3, (20, 20))
    options = {"columns": VALUE_BASED, "batch_size": batch_size}
    scores = evaluate(Classifier(model), images, heatmaps, **options)
    assert model.images == scores.calls.sum().item()
    assert (scores.calls <= 6).all()
    wanted = references(one_at_a_time(model), images, heatmaps)
    assert_equal_columns(scores, wanted, VALUE_BASED)


def test_calls_are_counted_for_each_image_by_itself():
    model = Counting(small_net(size=(20, 20), seed=2))
    images = random_images(2, 3, (20, 20))
    heatmaps = torch.cat([all_distinct(1, (20, 20)), torch.full((1, 20, 20), 0.5)])
    scores = evaluate(Classifier(model), images, heatmaps, columns=VALUE_BASED)
    assert scores.calls[0] >= 248
    assert scores.calls[1] <= 6
    assert model.images == scores.calls.sum().item()


# The search for alpha_min


@pytest.mark.parametrize("tried", [None, (0.2, 0.437, 0.5, 0.77), (0.0, 1.0)])
def test_the_search_equals_an_evaluation_at_every_alpha(tried):
    model = Counting(small_net(size=(9, 7), seed=2))
    images, heatmaps = random_images(4, 3, (9, 7), seed=3), heatmaps_like("random", 4, (9, 7))
    options = {} if tried is None else {"alphas": tried}
    found = evaluate(Classifier(model), images, heatmaps, alpha_min="search", **options)
    spent, model.images = model.images, 0
    assert spent == found.calls.sum().item()
    assert found.search is not None
    if tried is None:
        assert found.search.alphas == pytest.approx([i / 20 for i in range(1, 20)])
    else:
        assert found.search.alphas == tried
    separate = [
        evaluate(Classifier(model), images, heatmaps, alpha_min=alpha)
        for alpha in found.search.alphas
    ]
    assert spent < model.images
    msi = torch.stack([scores.msi for scores in separate], 1)
    torch.testing.assert_close(found.search.msi, msi, rtol=0, atol=1e-9)
    means = msi.mean(0)
    assert len(means.unique()) > 1
    assert found.alpha_min == found.search.best == found.search.alphas[int(means.argmax())]
    assert_equal_columns(found, separate[int(means.argmax())])


def test_the_search_takes_the_smaller_of_two_that_tie():
    # A black image is class 1 through every mask, so the base is 0, and a heatmap of 0.3 and 0.8
    # has the same penalty at 0.4 and 0.6.
    images, heatmaps = torch.zeros(2, 1, 4, 4), heatmaps_like("two_valued", 2, (4, 4))
    found = evaluate(
        Classifier(SumOfPixels(0.5)), images, heatmaps, alpha_min="search", alphas=(0.6, 0.4)
    )
    assert found.search.means[0] == found.search.means[1]
    assert found.alpha_min == 0.4


def test_no_search_leaves_no_search():
    model, images, heatmaps, _ = case("random", 3, (8, 6))
    scores = evaluate(Classifier(model), images, heatmaps, alpha_min=0.3, **COARSE)
    assert scores.search is None
    assert scores.alpha_min == 0.3


# NaN


class NanWhenDark(nn.Module):
    """NaN for images whose mean is below the bound, else class 0."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, x: Tensor) -> Tensor:
        means = x.flatten(1).mean(1)
        logits = torch.stack([torch.ones_like(means), torch.zeros_like(means)], 1)
        return logits.masked_fill((means < self.bound)[:, None], math.nan)


def test_nan_answers_are_counted_and_left_out_of_the_mean_only():
    # Image 0 has heatmap 1 everywhere: Show(>1) hides all of it, mean 0, NaN. In image 1 the
    # heatmap is 0 everywhere: deletion always keeps the whole; insertion is NaN. Both hide all the
    # pixels at one end of the percentage curves.
    images, heatmaps = torch.ones(2, 1, 4, 4), torch.stack([torch.ones(4, 4), torch.zeros(4, 4)])
    with pytest.warns(RuntimeWarning, match="the model gave NaN"):
        scores = evaluate(Classifier(NanWhenDark(0.01)), images, heatmaps, torch.tensor([0, 0]))
    counts = scores.nan_counts()
    assert tuple(counts) == COLUMNS
    assert counts["deletion_pixel"] == 1  # Image 0 keeps nothing at a = 0
    assert scores.deletion_pixel[1].item() == exactly(1.0)
    assert scores.fid_plus_pixel[1].item() == exactly(0.0)
    assert counts["mask_penalty"] == 0
    assert scores.mask_penalty.tolist() == [1, 0]
    for name in set(COLUMNS) - {"deletion_pixel", "fid_plus_pixel", "mask_penalty"}:
        assert counts[name] == 2, name
    assert scores.mean()["deletion_pixel"] == exactly(1.0)
    assert math.isnan(scores.mean()["msi"])
    assert len(scores) == 2


def test_nan_answers_warn_once_of_how_many_there_are(recwarn):
    # The heatmap of image 0 is 1 everywhere: deletion keeps nothing of it at a = 0 and 0.5, and all
    # of it at a = 1. That of image 1 is 0: all of it is kept. So 2 masks
    # are dark, of 2 images, 2 fills, 3 masks and the whole image each.
    images, heatmaps = torch.ones(2, 1, 4, 4), torch.stack([torch.ones(4, 4), torch.zeros(4, 4)])
    given = (images, heatmaps, torch.tensor([0, 0]))
    options = {"columns": ["deletion_pixel"], "value_step": 0.5, "fills": ("black", "noise")}
    evaluate(Classifier(NanWhenDark(0.01)), *given, **options)  # noise is bright
    (warning,) = recwarn
    assert warning.category is RuntimeWarning
    assert warning.filename == __file__
    wanted = "the model gave NaN for 2 of 16 predictions, in 1 of 2 images. Their columns are NaN"
    assert str(warning.message).startswith(wanted)
    assert "check its weights" in str(warning.message)


@pytest.mark.parametrize("score", ["accuracy", "confidence"])
def test_nan_answers_spoil_just_the_columns_that_asked_for_them(score):
    model = NanWhenDark(0.2)
    images, heatmaps = random_images(6, 1, (5, 5)), heatmaps_like("saturated", 6, (5, 5))
    images[3:] = images[3:] * 0.5 + 0.5
    targets = torch.zeros(6, dtype=torch.long)
    options = {"score": score, "fill": torch.tensor(0.15), **COARSE}
    with pytest.warns(RuntimeWarning, match="the model gave NaN"):
        scores = evaluate(Classifier(model), images, heatmaps, targets, **options)
    del options["fill"]
    fills = torch.full_like(images, 0.15)
    wanted = references(one_at_a_time(model), images, heatmaps, targets, fills, **options)
    assert_equal_columns(scores, wanted)
    assert scores.nan_counts() == {name: int(np.isnan(wanted[name]).sum()) for name in COLUMNS}


def test_one_nan_image_does_not_touch_the_others():
    class NanForOne(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            marked = x[:, 0, 0, 0] == 1
            return self.model(x).masked_fill(marked[:, None], math.nan)

    model = small_net(seed=2)
    images, heatmaps = random_images(3, 3, (8, 6), seed=2), heatmaps_like("random", 3, (8, 6))
    plain = evaluate(Classifier(model), images, heatmaps, **COARSE)
    images[1, 0, 0, 0] = 1
    with pytest.warns(RuntimeWarning, match="the model gave NaN"):
        scores = evaluate(Classifier(NanForOne(model)), images, heatmaps, plain.targets, **COARSE)
    for name in COLUMNS:
        assert scores.nan_counts()[name] == (0 if name == "mask_penalty" else 1)
        torch.testing.assert_close(scores[name][[0, 2]], plain[name][[0, 2]], rtol=0, atol=1e-6)


def test_intervals_of_few_images_stay_within_their_column() -> None:
    images, heatmaps = random_images(4, 3, (16, 16)), random_images(4, 1, (16, 16), seed=1)[:, 0]
    own = Metric(True, lambda _: [], lambda found, _: found.of([EVERYTHING], "confidence")[:, 0])
    given = {"columns": ["all"], "metrics": {"own": own}, "value_step": 0.25, "percent_step": 0.25}
    scores = evaluate(small(), images, heatmaps, truth=(heatmaps > 0.9).float(), **given)
    summary = scores.summary()
    for name, column in scores.columns.items():
        low, high = scores.headings[name].limits
        assert low <= float(column.min()), name  # the limits are true ones
        assert float(column.max()) <= high, name
        assert summary[name].low >= low or name == "own"
        assert summary[name].high <= high or name == "own"
    assert scores.headings["own"].limits == (-math.inf, math.inf)
