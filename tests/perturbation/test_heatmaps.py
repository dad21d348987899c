"""Heatmaps are resized alike on every device."""

import pytest
import torch

from sufficit.perturbation.heatmaps import _grown, resize


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
