"""Synthetic MNIST in bulk: images made of a hash of seed and number, against a slow writing."""

import numpy as np
import pytest
import torch

from sufficit.data.digits import chances, compose, compose_all


def splitmix64(number: int) -> int:
    """The generator as its author wrote it, from a state that was stepped already."""
    whole = (1 << 64) - 1
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & whole
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & whole
    return number ^ (number >> 31)


def chance(picture: int, k: int, of: int, salt: int) -> float:
    state = (picture * of + k) * 0x9E3779B97F4A7C15 + (salt + 1) * 0xBF58476D1CE4E5B9
    return (splitmix64(state & (1 << 64) - 1) >> 40) / 2**24


def test_chances_are_splitmix64_of_the_images_number() -> None:
    numbers = torch.tensor([0, 1, 59_999])
    found = chances(numbers, 7, salt=3)
    slow = [[chance(int(i), k, 7, 3) for k in range(7)] for i in numbers]
    assert found.tolist() == slow
    many = chances(torch.arange(500), 200, salt=0)
    assert abs(many.mean() - 0.5) < 0.005
    assert abs(many.var() - 1 / 12) < 0.002
    both = torch.corrcoef(torch.stack([many[:-1].flatten(), many[1:].flatten()]))
    assert abs(both[0, 1]) < 0.01


def plain_picture(
    stroke: torch.Tensor, number: int, salt: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A picture made one step after the other, as the words describe it."""
    k = iter(range(3 * 64 * 64, 10**6))
    of = 3 * 64 * 64 + 35

    def draw() -> float:
        return chance(number, next(k), of, salt)

    def whole(low: int, end: int) -> int:
        return low + int(np.float32(draw()) * np.float32(end - low))

    noise = torch.tensor([chance(number, i, of, salt) for i in range(3 * 64 * 64)])
    picture = 0.6 * noise.view(3, 64, 64)
    count = whole(0, 5)
    for box in range(4):
        h, w = whole(4, 25), whole(4, 25)
        y, x = whole(0, 64 - h), whole(0, 64 - w)
        colour = 0.8 * torch.tensor([draw(), draw(), draw()])
        if box < count:
            picture[:, y : y + h, x : x + w] = colour[:, None, None]
    side = whole(20, 41)
    y, x = whole(0, 65 - side), whole(0, 65 - side)
    ink = torch.zeros(64, 64)
    for row in range(64):
        for column in range(64):
            v, u = ((a + 0.5 - b) / side * 28 - 0.5 for a, b in ((row, y), (column, x)))
            for top in (int(np.floor(v)), int(np.floor(v)) + 1):
                for left in (int(np.floor(u)), int(np.floor(u)) + 1):
                    if 0 <= top < 28 and 0 <= left < 28:
                        ink[row, column] += (
                            stroke[top, left] * (1 - abs(v - top)) * (1 - abs(u - left))
                        )
    shade = 0.8 + 0.2 * torch.tensor([draw(), draw(), draw()])
    return picture * (1 - ink) + shade[:, None, None] * ink, ink


def test_images_are_noise_then_boxes_then_a_digit() -> None:
    strokes = torch.rand(2, 28, 28, generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([3, 40_000])
    pictures, inks = compose(strokes[:, None], numbers, salt=5)
    ink = inks[:, 0]
    for i in range(2):
        slow, slow_ink = plain_picture(strokes[i], int(numbers[i]), 5)
        torch.testing.assert_close(ink[i], slow_ink, atol=1e-5, rtol=0)
        torch.testing.assert_close(pictures[i], slow, atol=1e-5, rtol=0)


def test_image_i_depends_on_the_seed_and_on_i_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    strokes = torch.rand(6, 28, 28, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(6)
    images, known, masks = compose_all(strokes, labels, 8, (0, "train"))
    monkeypatch.setattr("sufficit.data.digits._CHUNK", 3)
    parts, _, part_masks = compose_all(strokes, labels, 7, (0, "train"))
    assert torch.equal(images[:7], parts)
    assert torch.equal(masks[:7], part_masks)
    assert known.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    for key in ((1, "train"), (0, "test")):
        other, _, _ = compose_all(strokes, labels, 7, key)
        assert not torch.equal(other[0], parts[0])
    assert not torch.equal(images[0], images[6]), "one digit, two pictures"
