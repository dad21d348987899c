"""Heatmaps are resized alike on every device."""

import pytest
import torch

from sufficit import UserError
from sufficit.perturbation.heatmaps import _grown, normalize, resize


@pytest.mark.parametrize(
    ("small", "large"), [((4, 4), (16, 16)), ((7, 5), (31, 44)), ((9, 8), (4, 5))]
)
def test_maps_grow_alike_as_images_and_as_channels(small, large) -> None:
    maps = torch.rand(6, *small, generator=torch.Generator().manual_seed(0))
    one = torch.nn.functional.interpolate(maps[:, None], size=large, mode="bilinear")[:, 0]
    found = _grown(maps, large, as_channels=True)  # the way of a GPU
    torch.testing.assert_close(found, one, rtol=0, atol=1e-6)
    assert found.is_contiguous()
    torch.testing.assert_close(resize(maps, large), one, rtol=0, atol=1e-6)


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
