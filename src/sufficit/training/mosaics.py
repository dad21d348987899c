"""Mosaics: images made of others, in which a map for one class must leave the other tiles dark."""

from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from sufficit.training.training_batch import TrainingBatch

LAYOUTS = ((1, 2), (2, 1), (2, 2))  # rows and columns of mosaics
IMAGES = 8  # of a batch for each mosaic; more mosaics cost time
AROUND = 0.15  # how far the centre of a tile may be from that of the mask, of half a side


class Mosaics(NamedTuple):
    """Images made of others, a class to ask for in each, and where its maps should be."""

    images: Tensor  # [n,C,H,W]
    asked: Tensor  # [n]
    wanted: Tensor  # [n,1,H,W] the maps of the tiles of that class, 0 in the others
    counted: Tensor  # [n,1,H,W] 0 in tiles that may be of that class, else 1


def mosaics(
    batch: TrainingBatch, asked: Tensor, masks: Tensor, generator: Generator
) -> Mosaics | None:
    """Mosaics of the images of a batch, one for every eight; none of a single image.

    `masks` [N,H,W] are those of the images for the classes `asked` [N]. The class that is asked
    for in a mosaic is that of one of its tiles. A tile that has this class only by its label or
    only by its prediction does not count.
    """
    n, device, (h, w) = len(asked), asked.device, batch.images.shape[2:]
    channels = [batch.images.shape[1], 1, 1]
    rest = torch.randperm(n, generator=generator, device=device)
    made: list[tuple[Tensor, ...]] = []
    total = -(-n // IMAGES) if n > 1 else 0
    for number, layout in enumerate(LAYOUTS):
        rows, columns = layout
        if not (count := len(range(number, total, len(LAYOUTS)))):
            continue
        some, rest = rest.tensor_split([count * rows * columns])
        own, label, said = (
            classes[some].view(count, -1) for classes in (asked, batch.targets, batch.first[:, 0])
        )
        chosen = torch.rand(own.shape, generator=generator, device=device).argmax(1, keepdim=True)
        wanted = own.gather(1, chosen)
        same = own == wanted
        known = same | ((label != wanted) & (said != wanted))
        side = -(-h // rows), -(-w // columns)
        images, maps = crops(batch.images[some], masks[some], side, generator)
        lit, sure = (each.flatten()[:, None, None, None] for each in (same, known))
        tiles = torch.cat([images, maps * lit, sure.expand_as(maps)], 1)
        grid = tiles.unflatten(0, (count, *layout)).permute(0, 3, 1, 4, 2, 5)
        whole = grid.flatten(4).flatten(2, 3)[..., :h, :w].split(channels, 1)
        made.append((whole[0], wanted[:, 0], *whole[1:]))
    return Mosaics(*map(torch.cat, zip(*made, strict=True))) if made else None


def crops(
    images: Tensor, masks: Tensor, side: tuple[int, int], generator: Generator
) -> tuple[Tensor, Tensor]:
    """The part of each image around its mask, and of the mask: [N,C,H,W], [N,H,W] -> tiles.

    A tile shows between a part of its own size and the whole image.
    """
    n, device = len(images), images.device
    total = masks.sum((1, 2)).clamp(min=1e-6)
    chance = torch.rand(3, n, generator=generator, device=device).to(masks)
    theta = masks.new_zeros(n, 2, 3)
    for axis, length in enumerate(reversed(side)):  # across, then down
        full = masks.shape[2 - axis]
        line = torch.arange(full, device=device).to(masks).mul(2).add(1 - full) / full  # in -1..1
        centre = (masks.sum(1 + axis) * line).sum(1) / total
        shown = length / full + (1 - length / full) * chance[2]
        theta[:, axis, axis] = shown
        centre = centre + AROUND * (2 * chance[axis] - 1)
        theta[:, axis, 2] = torch.minimum(torch.maximum(centre, shown - 1), 1 - shown)
    grid = F.affine_grid(theta, [n, 1, *side], align_corners=False)
    both = torch.cat([images, masks[:, None].to(images)], 1)
    tiles = F.grid_sample(both, grid, padding_mode="border", align_corners=False)
    return tiles[:, : images.shape[1]], tiles[:, images.shape[1] :]
