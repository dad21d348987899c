"""Two digits side by side, drawn one by one and in bulk; single digits stay as they were."""

import pytest
import torch
from paired_digits import DigitPairs, compose_pairs, digit_pairs, pointing_by_class
from torch import Tensor

from sufficit.data.digits import compose_all, embedded_digits, synthetic_digits


def check_sides(pairs: DigitPairs) -> None:
    left, right = pairs.masks.float().unbind(1)
    assert left[:, :, 32:].sum() == right[:, :, :32].sum() == 0
    for half in (left, right):
        assert (half.sum((1, 2)) > 20).all()


def test_a_pair_has_two_classes_each_with_its_own_mask() -> None:
    pairs, twice = digit_pairs(40, seed=3), synthetic_digits(40, seed=3, copies=2)
    check_sides(pairs)
    assert (pairs.labels[:, 0] != pairs.labels[:, 1]).all()
    assert set(pairs.labels[:, 1].tolist()) == set(range(10))
    # The left half is that of the same digit twice, the right one shows another digit.
    assert torch.equal(pairs.images[..., :32], twice.images[..., :32])
    assert torch.equal(pairs.labels[:, 0], twice.labels)
    assert (pairs.masks[:, 1, :, 32:] != twice.masks[:, :, 32:]).flatten(1).any(1).all()
    inside = (pairs.images.mean(1, keepdim=True) * pairs.masks).sum() / pairs.masks.sum()
    assert inside > 0.7


def test_the_right_digit_is_the_one_its_label_says() -> None:
    from sufficit import Classifier

    classifier, pairs = Classifier.load("sufficit:digits"), digit_pairs(60, seed=4)
    halves = pairs.images.clone()
    halves[..., :32] = 0
    with torch.no_grad():
        found = classifier(halves).argmax(1)
    assert (found == pairs.labels[:, 1]).float().mean() > 0.8


def test_the_same_digit_twice_is_two_copies_with_a_mask_each() -> None:
    pairs, twice = digit_pairs(5, seed=2, same=True), synthetic_digits(5, seed=2, copies=2)
    check_sides(pairs)
    assert torch.equal(pairs.images, twice.images)
    assert torch.equal(pairs.masks.amax(1), twice.masks)
    assert torch.equal(pairs.labels, twice.labels[:, None].expand(-1, 2))


def test_the_first_pairs_are_the_same_however_many_are_made() -> None:
    few, many = digit_pairs(3, seed=9), digit_pairs(8, seed=9)
    assert torch.equal(few.images, many.images[:3])
    assert torch.equal(few.labels, many.labels[:3])


def plain_digits() -> tuple[Tensor, Tensor]:
    """Six digits, two per class: squares, flat bars and upright bars of ink."""
    strokes = torch.ones(6, 28, 28)
    strokes[2:4, 10:] = 0
    strokes[4:, :, 10:] = 0
    return strokes, torch.arange(6) // 2


def classes_in(masks: Tensor) -> list[int]:
    """Which of the plain classes each mask shows, by its height and width: [N,H,W] -> N."""
    sizes = [(int(one.any(1).sum()), int(one.any(0).sum())) for one in masks > 0]
    return [0 if abs(h - w) < 3 else 1 if h < w else 2 for h, w in sizes]


@pytest.mark.parametrize("same", [False, True])
def test_pairs_in_bulk_show_the_digits_of_their_labels(same: bool) -> None:
    strokes, labels = plain_digits()
    pairs = compose_pairs(strokes, labels, 200, (0, "train"), same=same)
    check_sides(pairs)
    assert pairs.images.dtype == torch.uint8
    assert pairs.labels[:, 0].tolist() == [int(labels[i % 6]) for i in range(200)]
    if same:
        assert torch.equal(pairs.labels[:, 0], pairs.labels[:, 1])
        return
    assert (pairs.labels[:, 0] != pairs.labels[:, 1]).all()
    # Of four digits of other classes each is drawn about as often.
    assert pairs.labels[:, 1].bincount().min() > 40


def test_pairs_in_bulk_draw_the_chosen_strokes() -> None:
    strokes, labels = plain_digits()
    pairs = compose_pairs(strokes, labels, 60, (1, "test"))
    for half in (0, 1):
        assert classes_in(pairs.masks[:, half]) == pairs.labels[:, half].tolist()
    # A single digit covers its mask with one shade.
    whole = pairs.images[0].float()[:, pairs.masks[0, 0]]
    assert (whole.amin(1) > 0.6 * 255).all()


def test_pair_i_depends_on_the_seed_and_on_i_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    strokes, labels = embedded_digits(True)
    whole = compose_pairs(strokes, labels, 8, (0, "train"))
    monkeypatch.setattr("paired_digits.CHUNK", 3)
    parts = compose_pairs(strokes, labels, 7, (0, "train"))
    assert torch.equal(whole.images[:7], parts.images)
    assert torch.equal(whole.labels[:7], parts.labels)
    assert torch.equal(whole.masks[:7], parts.masks)
    for key in ((1, "train"), (0, "test")):
        assert not torch.equal(compose_pairs(strokes, labels, 1, key).images[0], parts.images[0])


def test_digits_of_one_class_make_no_pairs() -> None:
    with pytest.raises(AssertionError, match="pairs need digits of two classes"):
        compose_pairs(torch.ones(3, 28, 28), torch.zeros(3, dtype=torch.long), 2, (0, "train"))


def checksum(values: Tensor) -> float:
    flat = values.double().flatten()
    return (flat * torch.cos(torch.arange(len(flat), dtype=torch.float64))).sum().item()


@pytest.mark.parametrize(
    ("copies", "images", "masks"),
    [(1, 55.5675, -4.0467), (2, 47.9062, -1.1311), (3, 14.3995, 25.9933)],
)
def test_single_digits_and_copies_are_those_of_before(
    copies: int, images: float, masks: float
) -> None:
    made = synthetic_digits(4, seed=5, copies=copies)
    assert checksum(made.images) == pytest.approx(images, abs=1e-3)
    assert checksum(made.masks) == pytest.approx(masks, abs=1e-3)


def test_digits_in_bulk_are_those_of_before() -> None:
    images, _, masks = compose_all(*embedded_digits(False), 5, (2, "test"))
    assert checksum(images) == pytest.approx(601.9640, abs=2)
    assert checksum(masks) == pytest.approx(-5.1277, abs=1e-3)


def test_the_pointing_game_is_played_for_each_class_on_its_own_digit() -> None:
    pairs = digit_pairs(3, seed=1)
    maps = pairs.masks.clone()
    maps[1] = maps[1].flip(0)  # each map on the other's digit
    maps[2, 1] = 0.5  # flat: the share of the image that the digit covers
    found = pointing_by_class(maps, pairs.masks)
    share = pairs.masks[2, 1].mean().item()
    assert found.flatten().tolist() == pytest.approx([1, 1, 0, 0, 1, share])


def test_a_peak_between_the_strokes_is_in_the_box() -> None:
    masks = torch.zeros(1, 2, 5, 5)
    masks[0, 0, 1:4, 1:4] = 1
    masks[0, 0, 2, 2] = 0
    masks[0, 1, 4, 4] = 1
    maps = torch.zeros(1, 2, 5, 5)
    maps[0, :, 2, 2] = 1
    assert pointing_by_class(maps, masks).tolist() == [[0, 0]]
    assert pointing_by_class(maps, masks, box=True).tolist() == [[1, 0]]
    with pytest.raises(AssertionError, match="one map and one mask per class"):
        pointing_by_class(maps[0], masks)
