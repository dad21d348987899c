"""The adapter: its net, the heatmaps `explain` draws with it, and that nothing else is touched."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import timm
import torch
from torch import Tensor, nn

from small_models import (
    Sum,
    Traces,
    cnn,
    mixed_modes,
    rand,
    small_vit,
)
from sufficit import Classifier, Lax, UserError, explain, explain_all
from sufficit.explainers.adapter_nets import Finer, Mix
from sufficit.explainers.explanation import learned


def timm_vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2).eval()


def adapter_of(classifier: Classifier, layer: str, channels: int, **options: object) -> Lax:
    torch.manual_seed(1)
    lax = Lax(channels, **options)  # type: ignore[arg-type]
    with torch.no_grad():  # so that maps are far from one half everywhere
        for module in lax.net.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(3)
    lax.belong_to(classifier, layer)
    return lax.eval()


# The net


@pytest.mark.parametrize("channels", [1, 3, 48, 512, 2048])
def test_the_net_goes_from_k_to_256_to_128_to_64_to_1(channels: int) -> None:
    lax = Lax(channels)
    convolutions = [m for m in lax.net.modules() if isinstance(m, nn.Conv2d)]
    widths = [channels, 256, 128, 64, 1]
    assert [(m.in_channels, m.out_channels) for m in convolutions] == list(pairwise(widths))
    wanted = channels * 256 + 9 * (256 * 128 + 128 * 64 + 64) + 256 + 128 + 64 + 1
    assert sum(p.numel() for p in lax.parameters()) == wanted


@pytest.mark.parametrize("upsample", [1, 2, 3])
def test_the_map_is_the_sigmoid_of_the_net_layer_by_layer(upsample: int) -> None:
    torch.manual_seed(0)
    lax, features = Lax(5, upsample=upsample), rand(2, 5, 4, 3)
    one, two, three, four = (m for m in lax.net.modules() if isinstance(m, nn.Conv2d))
    seen = nn.functional.conv2d(features, one.weight, one.bias).relu()
    seen = nn.functional.conv2d(seen, two.weight, two.bias, padding=1).relu()
    near = 1 if upsample == 1 else 0  # a layer that draws several cells mixes channels alone
    seen = nn.functional.conv2d(seen, three.weight, three.bias, padding=near).relu()
    wide = torch.empty(2, 64, 4 * upsample, 3 * upsample)
    for y in range(upsample):  # each cell of the features has upsample x upsample of the map's
        for x in range(upsample):
            wide[:, :, y::upsample, x::upsample] = seen[:, y * upsample + x :: upsample**2]
    wanted = nn.functional.conv2d(wide, four.weight, four.bias, padding=1)[:, 0]
    torch.testing.assert_close(lax(features), 1 / (1 + (-wanted).exp()))
    torch.testing.assert_close(lax.logits(features), wanted)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_mixed_channels_are_a_one_by_one_convolution_in_any_layout(layout) -> None:
    layer, features = Mix(5, 3).double(), rand(2, 5, 4, 3).double()
    bias = layer.bias[None, :, None, None]
    wanted = torch.einsum("nkhw,mk->nmhw", features, layer.weight[:, :, 0, 0]) + bias
    found = layer(features.contiguous(memory_format=layout))
    torch.testing.assert_close(found, wanted)
    assert found.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("times", [2, 3, 4, 5])
def test_a_finer_map_is_a_pixel_shuffle_and_a_convolution(times: int) -> None:
    torch.manual_seed(times)
    layer, coarse = Finer(3, times).double(), rand(2, 3 * times**2, 4, 3).double()
    coarse.requires_grad_()
    large = nn.functional.pixel_shuffle(coarse, times)
    wanted = nn.functional.conv2d(large, layer.weight, layer.bias, padding=1)
    torch.testing.assert_close(layer(coarse), wanted)
    weights = rand(*wanted.shape).double()
    inputs = (coarse, layer.weight, layer.bias)
    one = torch.autograd.grad((wanted * weights).sum(), inputs)
    other = torch.autograd.grad((layer(coarse) * weights).sum(), inputs)
    torch.testing.assert_close(other, one)


def test_the_bias_sets_the_first_map() -> None:
    lax = Lax(4, bias=-2.0)
    with torch.no_grad():
        lax.net[-1].weight.zero_()
    torch.testing.assert_close(lax(rand(1, 4, 2, 2)), torch.full((1, 2, 2), 0.11920292))


@pytest.mark.parametrize("axis", [True, False])
def test_any_module_that_gives_one_channel_can_be_the_net(axis: bool) -> None:
    features = rand(2, 3, 2, 2) - 0.5
    torch.testing.assert_close(
        Lax(3, net=Sum(axis))(features), (2 * features.sum(1)).sigmoid(), rtol=0, atol=0
    )
    grown = Lax(3, net=Sum(axis), upsample=2).logits(features[:1])[0]
    cells = 2 * features[0].sum(0)
    # Along a side of two cells grown to four, the weights are 1, 3/4, 1/4, 0.
    share = torch.tensor([[1, 0.75, 0.25, 0], [0, 0.25, 0.75, 1]])
    torch.testing.assert_close(grown, share.T @ cells @ share)


@pytest.mark.parametrize("net", [nn.Identity(), nn.Flatten(), nn.AdaptiveAvgPool2d((1, 1))])
def test_a_net_with_another_output_is_refused(net: nn.Module) -> None:
    with pytest.raises(UserError, match="must give one channel"):
        Lax(3, net=net)(rand(2, 3, 2, 2))


@pytest.mark.parametrize("shape", [(2, 4, 3, 3), (3, 3, 3), (2, 3)])
def test_features_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"K = 3, got"):
        Lax(3)(rand(*shape))


# What explain draws


CLASSIFIERS: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "cnn": (cnn, "4", 9),
    "vit": (small_vit, "encoder.layers.encoder_layer_1.ln_1", 12),
    "timm vit": (timm_vit, "blocks.1.norm1", 192),
}


def bilinear(cells: Tensor, size: int) -> Tensor:
    """Corners not aligned, from the definition: [h,w] -> [size,size]."""
    h, w = cells.shape
    found = torch.zeros(size, size, dtype=torch.float64)

    def ends(place: int, cells: int) -> tuple[int, int, float]:
        at = min(max((place + 0.5) * cells / size - 0.5, 0), cells - 1)
        return int(at), min(int(at) + 1, cells - 1), at - int(at)

    for i in range(size):
        for j in range(size):
            (y, below, dy), (x, right, dx) = ends(i, h), ends(j, w)
            top = cells[y, x] * (1 - dx) + cells[y, right] * dx
            bottom = cells[below, x] * (1 - dx) + cells[below, right] * dx
            found[i, j] = top * (1 - dy) + bottom * dy
    return found


@pytest.mark.parametrize("upsample", [1, 2])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_heatmaps_are_the_resized_sigmoid_and_are_not_stretched(name, upsample) -> None:
    build, layer, channels = CLASSIFIERS[name]
    classifier = Classifier(build(), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    images = rand(3, 3, 32, 32)
    lax = adapter_of(classifier, layer, channels, upsample=upsample)
    heatmaps = explain(classifier, images, method=lax)
    with torch.no_grad():
        features, _ = Classifier(classifier.model, layer, (0.5,) * 3, (0.2,) * 3).features(images)
        maps = 1 / (1 + (-lax.net(features).double()[:, 0]).exp())
    assert maps.shape[1:] == tuple(upsample * side for side in features.shape[2:])
    for found, cells in zip(heatmaps, maps, strict=True):
        torch.testing.assert_close(found.double(), bilinear(cells, 32), rtol=0, atol=1e-6)
        assert 0 < found.min() < found.max() < 1
    assert (maps.flatten(1).amax(1) - maps.flatten(1).amin(1)).min() > 1e-3


def test_batches_of_any_size_give_the_same_heatmaps() -> None:
    classifier = Classifier(cnn())
    lax, images = adapter_of(classifier, "4", 9), rand(5, 3, 32, 32)
    whole = explain(classifier, images, method=lax)
    for size in (1, 2):
        found = explain(classifier, images, method=lax, batch_size=size)
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-6)


def forward_calls(classifier: Classifier, run: Callable[[], object]) -> int:
    calls: list[int] = []
    handle = classifier.model.register_forward_hook(lambda *_: calls.append(1))
    try:
        run()
    finally:
        handle.remove()
    return len(calls)


def test_it_shares_the_forward_pass_of_gradcam_at_the_same_layer() -> None:
    classifier, images = Classifier(cnn(), layer="4"), rand(4, 3, 32, 32)
    lax = adapter_of(classifier, "4", 9)
    methods = {"gradcam": "gradcam", "mine": lax, "layercam": "layercam"}
    assert forward_calls(classifier, lambda: explain_all(classifier, images, methods=methods)) == 1
    together = explain_all(classifier, images, methods=methods)
    assert list(together) == list(methods)
    torch.testing.assert_close(together["mine"], explain(classifier, images, method=lax))
    torch.testing.assert_close(together["gradcam"], explain(classifier, images))


def test_an_adapter_of_another_layer_takes_one_more_forward_pass() -> None:
    classifier, images = Classifier(cnn(), layer="4"), rand(4, 3, 32, 32)
    early, late = adapter_of(classifier, "2", 6), adapter_of(classifier, "4", 9)
    methods = {"early": early, "gradcam": "gradcam", "late": late}
    assert forward_calls(classifier, lambda: explain_all(classifier, images, methods=methods)) == 2
    together = explain_all(classifier, images, methods=methods)
    features, _ = Classifier(classifier.model, "2").features(images)
    with torch.no_grad():
        cells = early(features)
    wanted = nn.functional.interpolate(cells[:, None], size=(32, 32), mode="bilinear")[:, 0]
    torch.testing.assert_close(together["early"], wanted, rtol=0, atol=1e-6)
    assert torch.equal(together["late"], explain(classifier, images, method=late))
    assert classifier.layer == "4"


def test_the_word_lax_alone_says_that_one_must_be_trained() -> None:
    with pytest.raises(UserError, match="train_lax"):
        explain(Classifier(cnn()), rand(1, 3, 32, 32), method="lax")


def test_in_bfloat16_the_same_adapter_draws_nearly_the_same() -> None:
    classifier, images = Classifier(cnn()), rand(3, 3, 32, 32)
    lax = adapter_of(classifier, "4", 9)
    wanted = explain(classifier, images, method=lax)
    found = explain(classifier.to(dtype=torch.bfloat16), images, method=lax)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02)


# What is left behind


class Broken(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        raise ZeroDivisionError("broken net")


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("others", [(), ("gradcam",)])
def test_explaining_leaves_classifier_and_adapter_as_they_were(broken: bool, others) -> None:
    classifier = Classifier(cnn(), layer="4")
    mixed_modes(classifier.model)
    net = nn.Sequential(nn.Conv2d(9, 1, 1), nn.BatchNorm2d(1), nn.Dropout(0.9))
    lax = adapter_of(classifier, "4", 9, net=nn.Sequential(net, Broken()) if broken else net)
    lax.train()
    net[1].eval()  # one part of the adapter is frozen
    traces = Traces(classifier.model, lax)
    images = rand(3, 3, 32, 32)
    kept = images.clone()
    methods = {name: name for name in others} | {"mine": lax}
    if broken:
        with pytest.raises(ZeroDivisionError):
            explain_all(classifier, images, methods=methods)
    else:
        one = explain_all(classifier, images, methods=methods)["mine"]
        again = explain_all(classifier, images, methods=methods)["mine"]
        assert torch.equal(one, again)  # no dropout, no statistics of the batch
        assert not one.requires_grad
    traces.check()
    assert torch.equal(images, kept)


def test_a_refused_classifier_is_left_as_it_was_too() -> None:
    lax = adapter_of(Classifier(cnn(0)), "4", 9)
    other = Classifier(cnn(1), layer="4")
    mixed_modes(other.model)
    traces = Traces(other.model, lax)
    with pytest.raises(UserError, match="another classifier"):
        explain(other, rand(1, 3, 32, 32), method=lax)
    with pytest.raises(UserError, match="another classifier"):  # and not: no layer "9"
        explain(other, rand(1, 3, 32, 32), method=adapter_of(Classifier(cnn(0)), "9", 9))
    method = learned(adapter_of(other, "4", 6), other)
    with pytest.raises(UserError, match="K = 6"):
        explain(other, rand(1, 3, 32, 32), method=method)
    traces.check()
