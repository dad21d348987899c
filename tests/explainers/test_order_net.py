"""The net of an order: it starts as the evidence's order, and resizes as torch does."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from small_models import rand
from sufficit import Lax, UserError
from sufficit.explainers.order_net import OrderNet, cells_for, resized


def features(channels: tuple[int, ...], sides: tuple[int, ...]) -> list[Tensor]:
    return [rand(2, k, side, side, seed=k) for k, side in zip(channels, sides, strict=True)]


@pytest.mark.parametrize(
    ("channels", "sides", "cells", "wanted"),
    [
        ((6, 9, 12), (28, 14, 7), 28, [7, 14, 28]),
        ((6, 9, 12), (14, 14, 14), 28, [14, 14, 28]),
        ((6, 9, 12), (12, 6, 3), 16, [3, 8, 16]),  # no strides are assumed
        ((6, 9, 12, 15), (16, 8, 4, 2), 16, [2, 4, 8, 16]),
        ((12,), (6,), 14, [6, 14]),
        ((6, 12), (4, 40), 28, [40, 40]),  # never coarser than the features
    ],
)
def test_an_untrained_order_is_that_of_the_evidence(channels, sides, cells, wanted) -> None:
    torch.manual_seed(0)
    net = OrderNet(channels, width=8, cells=cells)
    evidence = rand(2, 3, sides[-1], sides[-1], seed=3)
    found = net(features(channels, sides), evidence)
    own = F.interpolate(evidence[:, :1], (wanted[-1],) * 2, mode="bicubic")
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
    assert [rows for rows, _ in net.sizes((sides[-1], sides[-1]))] == wanted


@pytest.mark.parametrize("block", ["full", "separable"])
def test_the_net_written_a_second_time(block: str) -> None:
    torch.manual_seed(1)
    net = OrderNet((6, 10), width=8, cells=8, block=block)
    nn.init.normal_(net.out.weight)
    given, evidence = features((6, 10), (8, 4)), rand(2, 3, 4, 4, seed=3)

    def read(number: int, values: Tensor) -> Tensor:
        scale = values.pow(2).mean((1, 2, 3), keepdim=True).sqrt()
        return net.norms[number](net.laterals[number](values / (scale + 1e-4)))

    x = read(0, given[1]) + net.evidence(evidence)
    x = x + net.blocks[0](x)
    x = F.interpolate(x, (8, 8), mode="bilinear") + read(1, given[0])
    x = x + net.blocks[1](x)
    own = F.interpolate(evidence[:, :1], (8, 8), mode="bicubic")
    torch.testing.assert_close(net(given, evidence), net.out(x) + own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("size", "wanted"), [((4, 5), (9, 12)), ((12, 10), (5, 4))])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_resizing_is_that_of_torch(channels, size, wanted, mode) -> None:
    x = rand(2, channels, *size)
    expected = F.interpolate(x, wanted, mode=mode, antialias=wanted < size)
    torch.testing.assert_close(resized(x, wanted, mode), expected, rtol=1e-4, atol=1e-5)


def test_small_images_get_fewer_cells() -> None:
    sides = [cells_for((side, side), (2, 2)) for side in (28, 32, 64, 96, 224, 640)]
    assert sides == [14, 14, 16, 24, 28, 28]
    assert cells_for((224, 224), (40, 20)) == 40
    assert cells_for((224, 224), (7, 7), 56) == 56


def test_an_oblong_image_has_an_oblong_order() -> None:
    net = OrderNet((4, 6), width=8, cells=16)
    given = [rand(1, 4, 8, 16), rand(1, 6, 4, 8)]
    assert net(given, rand(1, 3, 4, 8)).shape == (1, 1, 8, 16)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cells": None}, "cells must be a whole number"),
        ({"block": "dense"}, "Unknown block 'dense'"),
        ({"size": 0.0}, "size must be a share of the image"),
        ({"classes": 4}, "takes the channels of its layers as a list, and no net, classes"),
        ({"head": {"kind": "magic", "layer": "a"}}, "Unknown kind of evidence 'magic'"),
        ({"head": {"kind": "pooled"}}, "head must have"),
        ({"head": {"kind": "pooled", "layer": 4}}, "head must hold words"),
    ],
)
def test_an_order_of_wrong_sizes_is_refused(options, words: str) -> None:
    given = {"cells": 8, "head": {"kind": "none", "layer": "a"}} | options
    with pytest.raises(UserError, match=words):
        Lax([4, 6], **given)
