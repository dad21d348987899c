"""Heatmaps are resized and normalised."""

import pytest
import torch

from sufficit import UserError
from sufficit.perturbation.heatmaps import normalize, resize


def bilinear(values: list[float], place: float) -> float:
    """A line of values at a place between them; beyond the ends, the end."""
    place = min(max(place, 0.0), len(values) - 1.0)
    left = min(int(place), len(values) - 2)
    return values[left] + (place - left) * (values[left + 1] - values[left])


@pytest.mark.parametrize(
    ("small", "large"), [((4, 4), (16, 16)), ((7, 5), (31, 44)), ((9, 8), (4, 5))]
)
def test_maps_are_resized_pixel_by_pixel(small, large) -> None:
    maps = torch.rand(6, *small, generator=torch.Generator().manual_seed(0))
    ratios = [a / b for a, b in zip(small, large, strict=True)]
    rows = [
        [[bilinear(line, (x + 0.5) * ratios[1] - 0.5) for x in range(large[1])] for line in one]
        for one in maps.tolist()
    ]
    wanted = [
        [
            [bilinear([r[x] for r in one], (y + 0.5) * ratios[0] - 0.5) for x in range(large[1])]
            for y in range(large[0])
        ]
        for one in rows
    ]
    found = resize(maps, large)
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=0, atol=1e-6)
    assert found.is_contiguous()
    assert (found.amax((1, 2)) <= maps.amax((1, 2))).all()
    assert (found.amin((1, 2)) >= maps.amin((1, 2))).all()


def test_percentile_clips_one_pixel_in_a_hundred() -> None:
    maps = torch.arange(1.0, 201.0).view(1, 10, 20).repeat(2, 1, 1)
    maps[0, -1, -1] = 1e6
    found = normalize(maps, "percentile")
    assert torch.equal(found[0], found[1])  # how far the highest are does not count
    wanted = (maps[1].clamp(max=198) - 1) / 197  # 199 and 200 are above the 99th percentile
    assert found[1].flatten().tolist() == pytest.approx(wanted.flatten().tolist())
    few = torch.zeros(1, 10, 20)
    few[0, 0, :2] = torch.tensor([0.5, 4.0])  # 1 % of the pixels: nothing would be left
    assert torch.equal(normalize(few, "percentile"), few / 4)


@pytest.mark.parametrize("change", [torch.sqrt, torch.log1p, lambda x: 3 * x**3 - 1])
def test_rank_is_the_same_for_any_change_that_keeps_the_order(change) -> None:
    maps = torch.randperm(64, generator=torch.Generator().manual_seed(0)).view(1, 8, 8) / 64
    maps[0, 0] = 0  # ties: they stay
    found = normalize(maps, "rank")
    assert torch.equal(found, normalize(change(maps.double()).float(), "rank"))
    assert (found[0, 0] == 0).all()
    assert found.amax() == 1
    steps = found.unique().diff().tolist()[1:]
    assert steps == pytest.approx([1 / 63] * len(steps), rel=1e-5)


def test_a_flat_map_is_zeros_whatever_the_normalisation() -> None:
    flat = torch.full((1, 4, 4), 0.7)
    for how in ("minmax", "percentile", "rank"):
        assert torch.equal(normalize(flat, how), torch.zeros(1, 4, 4))
    assert torch.equal(normalize(flat, "none"), flat)
    with pytest.raises(UserError, match="Unknown normalisation 'ranks'. Did you mean 'rank'"):
        normalize(flat, "ranks")
