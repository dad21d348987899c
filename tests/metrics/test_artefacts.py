"""Fragments: counts by hand, and as a column."""

import pytest
import torch
from torch import nn

from small_models import Spy
from sufficit import Classifier, evaluate
from sufficit.metrics import Evaluation
from sufficit.metrics.artefacts import fragments


def test_fragments_counts_connected_parts_and_corners_connect() -> None:
    picture = [
        "#..#....",
        ".#..#..#",
        "........",
        "##.#.#.#",
        "##..#...",
    ]  # by eye: two diagonals, a dot, a square, a zigzag, a dot
    one = torch.tensor([[0.9 * (c == "#") for c in line] for line in picture])
    maps = torch.stack([one, torch.zeros(5, 8), torch.ones(5, 8), one * 0.5])
    assert fragments(maps, 0.5).tolist() == [6, 0, 1, 0]
    assert fragments(torch.full((1, 2, 2), 0.5), 0.5).item() == 1  # at alpha_min counts


def net() -> nn.Module:
    """Features of 8 x 8 cells of 4 pixels."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 4, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(4, 3))


def test_fragments_are_a_column() -> None:
    drawn = torch.Generator().manual_seed(2)
    images, maps = torch.rand(5, 3, 32, 32, generator=drawn), torch.rand(5, 32, 32, generator=drawn)
    given = {"columns": ("msi", "fragments"), "alpha_min": 0.4, "value_step": 0.5}
    scores = evaluate(Classifier(net()), images, maps, **given)
    assert scores.fragments.tolist() == fragments(maps, 0.4).tolist()
    metric = Evaluation(Classifier(net()), **given)
    metric.update(images[:2], maps[:2])
    metric.update(images[2:], maps[2:])
    mean = scores.fragments.mean().item()
    assert metric.compute()["fragments"].item() == pytest.approx(mean)


def test_fragments_need_no_features() -> None:
    spy = Spy(net())
    images, maps = torch.rand(2, 3, 32, 32), torch.rand(2, 32, 32)
    evaluate(Classifier(spy), images, maps, columns=("fragments",))
    assert sum(spy.sizes) == 2  # the whole images
