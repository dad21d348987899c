"""How many separate regions suffice alone: answers known by hand."""

import torch
from torch import Tensor, nn

from sufficit import Classifier, compare
from sufficit.evaluation import batch_of
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.probes.parts import PartsProbe


class AnyBright(nn.Module):
    """Class 1 if some pixel is bright: each bright pixel suffices alone."""

    def forward(self, x: Tensor) -> Tensor:
        bright = x.flatten(1).amax(1)
        return torch.stack([torch.full_like(bright, 0.5), bright], dim=1)


def counted(heatmaps: Tensor, images: Tensor) -> list[float]:
    model = Classifier(AnyBright())
    batch = batch_of(model, images, torch.ones(len(images), dtype=torch.long))
    found = PartsProbe(MaskedModel(model), 0.5)(batch, {"map": heatmaps})["map"]
    assert (found["calls@regions"] <= 4).all()
    return found["sufficient_regions"].tolist()


def test_each_region_that_suffices_alone_is_counted() -> None:
    images = torch.zeros(5, 1, 6, 12)
    images[:, :, 1, 1] = images[:, :, 1, 7] = 1  # the same thing twice
    images[4, :, 2, 2] = 1
    heatmaps = torch.zeros(5, 6, 12)
    heatmaps[0, 1, 1] = heatmaps[0, 1, 7] = 1  # a mask of both
    heatmaps[1, 0:3, 0:3] = 0.9  # of one of them
    heatmaps[1, 4, 4] = 0.9  # and of nothing elsewhere
    heatmaps[3] = 1  # both in one region
    heatmaps[4, 1, 1] = heatmaps[4, 2, 2] = 0.5  # corners connect, and alpha_min counts
    assert counted(heatmaps, images) == [2, 1, 0, 1, 1]


def test_only_the_largest_four_are_asked() -> None:
    images = torch.zeros(1, 1, 4, 24)
    heatmaps = torch.zeros(1, 4, 24)
    for place, width in zip((0, 5, 10, 15, 20), (3, 3, 3, 3, 1), strict=True):
        heatmaps[0, 1, place : place + width] = 1
        images[0, 0, 1, place] = 1
    assert counted(heatmaps, images) == [4]


def test_a_run_asks_for_it_by_a_word() -> None:
    images = torch.zeros(3, 1, 6, 12)
    images[:, :, 1, 1] = images[:, :, 1, 7] = 1
    model = Classifier(AnyBright())
    maps = {"bright": images[:, 0], "center": "center"}
    result = compare(model, images, maps, checks=("regions",), value_step=0.5, progress=False)
    assert result.rows["bright"]["sufficient_regions"].tolist() == [2, 2, 2]
    assert result.table().at["bright", "sufficient_regions"] == 2
