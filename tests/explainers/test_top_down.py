"""The top-down adapter: its net written a second time, its stages, its class."""

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

from small_models import Traces, cnn, rand
from sufficit import Classifier, Lax, UserError, explain, explain_all
from sufficit.explainers import adapter_nets
from sufficit.explainers.adapter_nets import Lateral, TopDown, smooth_double
from sufficit.explainers.forward_pass import look


def bilinear_line(n: int, m: int) -> Tensor:
    """The weights of m new cells on n old ones, corners not aligned: [m,n]."""
    found = torch.zeros(m, n)
    for i in range(m):
        at = min(max((i + 0.5) * n / m - 0.5, 0), n - 1)
        left, share = int(at), at - int(at)
        found[i, left] += 1 - share
        found[i, min(left + 1, n - 1)] += share
    return found


def grown(maps: Tensor, h: int, w: int) -> Tensor:
    rows, columns = bilinear_line(maps.shape[2], h), bilinear_line(maps.shape[3], w)
    return torch.einsum("ha,ncab,wb->nchw", rows, maps, columns)


def plain_net(net: TopDown, stages: list[Tensor], targets: Tensor) -> Tensor:
    """The net step by step: coarsest stage, its class, then each finer one."""

    def lateral(k: int) -> Tensor:
        layer = net.laterals[len(stages) - 1 - k]
        weight, mean, spread = layer.weight[:, :, 0, 0], layer.mean, layer.spread
        standard = (stages[k] - mean[:, None, None]) / spread[:, None, None]
        return torch.einsum("nkhw,mk->nmhw", standard, weight) + layer.bias[:, None, None]

    found = lateral(2)
    scale, shift = net.asked.weight[targets].split(found.shape[1], 1)
    found = found * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
    for k, merge in zip((2, 1, 0, -1), net.merges, strict=True):
        if k == -1:
            found = grown(found, 2 * found.shape[2], 2 * found.shape[3])
        elif k < 2:
            found = grown(found, *stages[k].shape[2:]) + lateral(k)
        found = F.conv2d(found.clamp(min=0), merge.weight, merge.bias, padding=1).clamp(min=0)
    found = F.conv2d(found, net.head.weight, net.head.bias, padding=1)
    h, w = (2 * side for side in found.shape[2:])
    large = grown(found, h, w)
    smooth = torch.zeros_like(large)
    for i in range(h):
        for j in range(w):
            for y, x, weight in ((y, x, (2 - abs(y)) * (2 - abs(x)) / 16)
                                 for y in (-1, 0, 1) for x in (-1, 0, 1)):  # fmt: skip
                at = min(max(i + y, 0), h - 1), min(max(j + x, 0), w - 1)
                smooth[:, :, i, j] += weight * large[:, :, at[0], at[1]]
    return smooth


@pytest.mark.parametrize("wide", [40, 160])  # with fewer and with more channels than MANY
def test_the_net_is_laterals_a_class_bilinear_steps_and_a_smooth_end(wide: int) -> None:
    torch.manual_seed(0)
    lax = Lax([3, 5, wide], steps=1, classes=4, bias=-0.5)
    stages = [5 + 2 * rand(3, k, h, w) for k, h, w in ((3, 7, 6), (5, 4, 3), (wide, 2, 2))]
    lax.standardize(stages)
    targets = torch.tensor([1, 3, 3])
    assert lax.net.asked.weight.std() > 0.05  # the class matters from the start
    wanted = plain_net(lax.net, stages, targets)
    assert wanted.shape == (3, 1, 28, 24)
    wanted = wanted[:, 0]
    torch.testing.assert_close(lax.logits(stages, targets), wanted, rtol=1e-4, atol=1e-5)
    maps = 1 / (1 + (-wanted).exp())
    torch.testing.assert_close(lax(stages, targets), maps, rtol=1e-4, atol=1e-5)
    last = [stage.contiguous(memory_format=torch.channels_last) for stage in stages]
    for given in (stages, last):
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                found = lax.logits(given, targets)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [0, 1])
def test_stages_of_one_size_are_summed_before_the_first_convolution(steps: int) -> None:
    torch.manual_seed(5)
    lax = Lax([6, 3, 5, 4], joined=3, classes=4, steps=steps, bias=-0.5)
    stages = [rand(2, 6, 8, 6)] + [7 + 3 * rand(2, k, 4, 3) for k in (3, 5, 4)]
    lax.standardize(stages)
    net, targets = lax.net, torch.tensor([2, 0])
    assert net.head.bias.item() == -0.5
    laterals = [layer(stage) for layer, stage in zip(net.laterals, reversed(stages), strict=True)]
    found = laterals[0] + laterals[1] + laterals[2]
    scale, shift = net.asked.weight[targets][:, :, None, None].split(found.shape[1], 1)
    found = net.merges[0]((found * (1 + scale) + shift).clamp(min=0)).clamp(min=0)
    found = net.merges[1]((grown(found, 8, 6) + laterals[3]).clamp(min=0)).clamp(min=0)
    for merge in net.merges[2:]:
        found = merge(grown(found, 16, 12)).clamp(min=0)
    assert len(net.merges) == 2 + steps
    wanted = smooth_double(net.head(found))[:, 0]
    torch.testing.assert_close(lax.logits(stages, targets), wanted)
    with torch.no_grad():
        torch.testing.assert_close(lax.logits(stages, targets), wanted)


def test_adapters_of_joined_layers_load(tmp_path) -> None:
    torch.manual_seed(6)
    stages, classifier = [rand(2, 4, 3, 3)] * 2, Classifier(cnn().eval())
    lax = Lax([4, 4], joined=2)
    lax.belong_to(classifier, "a", "b")
    lax.save_pretrained(tmp_path / "joined")
    again = Lax.from_pretrained(tmp_path / "joined")
    assert again.joined == 2
    torch.testing.assert_close(again(stages), lax(stages))
    with pytest.raises(UserError, match=r"joined must be a whole number in 1\.\.2, got 3"):
        Lax([4, 4], joined=3)


# A pass without gradients


def small_adapter() -> tuple[Lax, list[Tensor], Tensor]:
    torch.manual_seed(4)
    lax, stages = Lax([3, 5, 4], classes=4), [rand(2, 3, 8, 8), rand(2, 5, 4, 4), rand(2, 4, 2, 2)]
    lax.standardize(stages)
    return lax, stages, torch.tensor([3, 0])


def without_gradients(lax: Lax, stages: list[Tensor], targets: Tensor) -> Tensor:
    with torch.no_grad():
        return lax(stages, targets)


@pytest.mark.parametrize("size", [(6, 10), (5, 7), (3, 5), (2, 9)])
@pytest.mark.parametrize("beside", [False, True])
def test_a_bilinear_step_is_the_same_in_both_memory_formats(
    size: tuple[int, int], beside: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(2, 4, 3, 5, generator=generator)
    lateral = torch.randn(2, 4, *size, generator=generator)
    wanted = F.interpolate(plain, size, mode="bilinear", align_corners=False)
    wanted = wanted + lateral if beside else wanted
    for kind in (torch.contiguous_format, torch.channels_last):
        coarse = plain.clone(memory_format=kind).requires_grad_()
        added = lateral.clone(memory_format=kind) if beside else None
        found = adapter_nets._enlarged(coarse, size, added)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        (gradient,) = torch.autograd.grad(found.square().sum(), coarse)
        torch.testing.assert_close(gradient, _gradient(plain, size, lateral if beside else None))


def _gradient(plain: Tensor, size: tuple[int, int], lateral: Tensor | None) -> Tensor:
    coarse = plain.clone().requires_grad_()
    found = F.interpolate(coarse, size, mode="bilinear", align_corners=False)
    found = found if lateral is None else found + lateral
    (gradient,) = torch.autograd.grad(found.square().sum(), coarse)
    return gradient


def test_in_bfloat16_mean_and_spread_are_folded_before_the_rounding() -> None:
    lax, stages, targets = small_adapter()
    stages = [100 + stage for stage in stages]  # so that rounded means would cost a lot
    lax.standardize(stages)
    wanted = lax(stages, targets).detach()
    with torch.autocast("cpu", torch.bfloat16):
        found = without_gradients(lax, stages, targets)
        rounded = [stage.bfloat16() for stage in stages]
        plain = lax(rounded, targets).detach()
    assert found.dtype == torch.float32
    assert lax.net.head.weight.dtype == torch.float32
    torch.testing.assert_close(found, plain, rtol=0, atol=2e-3)
    torch.testing.assert_close(without_gradients(lax, stages, targets), wanted)


def test_an_adapter_can_be_used_in_inference_mode_first_and_trained_later() -> None:
    lax, stages, targets = small_adapter()
    wanted = lax(stages, targets)
    with torch.inference_mode():
        torch.testing.assert_close(lax(stages, targets), wanted)
        made = Lax([3, 5, 4], classes=4)
        made.load_state_dict(lax.state_dict())
        torch.testing.assert_close(made(stages, targets), wanted)
    lax(stages, targets).sum().backward()
    assert lax.net.head.weight.grad is not None


def test_an_adapter_draws_after_it_was_exported() -> None:
    lax, targets = Lax([3, 5, 4], steps=1, classes=4), torch.tensor([3, 0])
    sides = ((3, 12), (5, 6), (4, 3))  # of no other test, so that no matrix is there yet
    stages = [rand(2, k, side, side) for k, side in sides]
    stages = [stage.to(memory_format=torch.channels_last) for stage in stages]
    wanted = plain_net(lax.net, stages, targets)[:, 0].sigmoid()
    program = torch.export.export(lax.eval(), (tuple(stages), targets), strict=False).module()
    for draw in (lax, program):
        torch.testing.assert_close(draw(tuple(stages), targets), wanted)


def test_the_scale_of_a_layer_does_not_matter_once_its_spread_is_known() -> None:
    torch.manual_seed(1)
    one, other = Lateral(4, 3), Lateral(4, 3)
    other.load_state_dict(one.state_dict())
    features = rand(8, 4, 5, 5)
    factor = torch.tensor([50.0, 1.0, 2.0, 7.0])[:, None, None]
    one.standardize(features)
    other.standardize(factor * features - 4)
    torch.testing.assert_close(other(factor * features - 4), one(features), rtol=1e-3, atol=1e-4)
    spread = one(features).std()
    assert 0.2 < spread < 2


def test_a_smooth_step_has_no_kink_at_the_cells() -> None:
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(200, 1, 1, 12, generator=generator)
    bends = {}
    for name, large in (("bilinear", grown(maps, 2, 24)), ("smooth", smooth_double(maps))):
        second = large[:, 0, 0].diff(n=2).square().mean(0)[3:-3]
        bends[name] = [second[0::2].mean().item(), second[1::2].mean().item()]
    # Bilinear bends at every other place only; the spline at all of them alike.
    assert max(bends["smooth"]) < 1.2 * min(bends["smooth"])
    assert max(bends["smooth"]) < 0.5 * max(bends["bilinear"])


# Stages


def hub_swin() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(
        image_size=64, embed_dim=12, num_heads=[1, 2, 2, 3], window_size=2
    )
    return transformers.SwinForImageClassification(config)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], list[str], list[int]]] = {
    "resnet": (
        lambda: models.resnet18(num_classes=5),
        ["layer2", "layer3", "layer4"], [8, 4, 2],
    ),
    "convnext": (
        lambda: timm.create_model("convnext_atto", num_classes=5),
        ["stages.1", "stages.2", "stages"], [8, 4, 2],
    ),
    "swin": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=2,
                                  embed_dim=12, num_heads=(1, 2, 2, 3), num_classes=5),
        ["layers.1", "layers.2", "layers.3.blocks.1.norm1"], [8, 4, 2],
    ),
    "transformers swin": (
        hub_swin,
        ["swin.encoder.layers.1.blocks.1", "swin.encoder.layers.2.blocks.5",
         "swin.encoder.layers.3.blocks.1.layernorm_before"], [8, 4, 2],
    ),
    "vit": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, embed_dim=24, num_heads=2,
                                  num_classes=5),
        ["blocks.3", "blocks.7", "blocks.11.norm1"], [4, 4, 4],
    ),
    "vgg": (
        lambda: models.vgg11(num_classes=5),
        ["features.14", "features.19", "features"], [8, 4, 2],
    ),
    "a small net": (cnn, ["2", "4"], [32, 16]),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_are_found_by_themselves(family: str) -> None:
    build, names, sides = FAMILIES[family]
    torch.manual_seed(0)
    model = build().eval()
    before = Traces(model) if family == "resnet" else None
    classifier, images = Classifier(model), rand(1, 3, 64, 64)
    assert [*classifier.stage_layers(images)] == names
    stages, logits = classifier.stages(images, names)
    assert [stage.shape[2] for stage in stages] == sides
    with torch.no_grad():
        torch.testing.assert_close(logits, classifier(images))
    if before is not None:
        before.check()


def test_a_layer_that_was_given_is_the_last_stage() -> None:
    classifier = Classifier(models.resnet18(num_classes=5).eval(), layer="layer3")
    assert [*classifier.stage_layers(rand(1, 3, 64, 64))] == ["layer1", "layer2", "layer3"]
    assert [*classifier.stage_layers(rand(1, 3, 64, 64), 2)] == ["layer2", "layer3"]
    with_reshape = Classifier(models.resnet18(num_classes=5).eval(), "layer3", reshape=lambda x: x)
    assert [*with_reshape.stage_layers(rand(1, 3, 64, 64))] == ["layer3"]


class Overwrites(nn.Module):
    """Its second layer works in place on the output of its first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(inplace=True)
        self.three, self.head = nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.three(self.two(self.one(images))).mean((2, 3)))


def test_earlier_features_are_right_where_a_later_layer_writes_over_them() -> None:
    model, images = Overwrites().eval(), rand(2, 3, 16, 16)
    seen = look(Classifier(model), images, "three", earlier=["one"])
    with torch.no_grad():
        torch.testing.assert_close(seen.earlier["one"], model.one(images))
        assert (seen.earlier["one"] < 0).any()
        torch.testing.assert_close(seen.stages(["one", "three"])[1], seen.features)


class Stem(Overwrites):
    """It runs its first layer in inference mode."""

    def forward(self, images: Tensor) -> Tensor:
        with torch.inference_mode():
            found = self.one(images)
        return self.head(self.three(self.two(found.clone())).mean((2, 3)))


def test_features_of_layers_in_inference_mode_are_read() -> None:
    model, images = Stem().eval(), rand(2, 3, 16, 16)
    torch.manual_seed(4)
    lax = Lax([4, 6], layer=["one", "three"])
    found = explain(Classifier(model), images, method=lax)
    with torch.no_grad():
        one = model.one(images)
        stages = [one, model.three(one.relu())]
        wanted = F.interpolate(lax(stages)[:, None], size=(16, 16), mode="bilinear")[:, 0]
    torch.testing.assert_close(found, wanted)


# What explain draws


@pytest.fixture
def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier(models.resnet18(num_classes=5).eval(), mean=(0.5,) * 3, std=(0.2,) * 3)


def adapter_of(classifier: Classifier, images: Tensor, **options: int) -> Lax:
    names = classifier.stage_layers(images)
    stages, _ = classifier.stages(images, names)
    torch.manual_seed(2)
    lax = Lax([stage.shape[1] for stage in stages], **options)
    lax.standardize(stages)
    with torch.no_grad():
        lax.net.head.weight.mul_(20)  # so that maps are far from one half
    lax.belong_to(classifier, *names)
    return lax.eval()


def test_heatmaps_are_for_the_class_that_is_asked_for(classifier: Classifier) -> None:
    images = rand(3, 3, 64, 64)
    lax = adapter_of(classifier, images, classes=5)
    with torch.no_grad():
        said = classifier(images).argmax(1)
        stages, _ = classifier.stages(images, lax.layers)
    for targets in (None, torch.tensor([0, 4, 2]), torch.tensor([1, 1, 1])):
        found = explain(classifier, images, targets, method=lax)
        with torch.no_grad():
            cells = lax(stages, said if targets is None else targets)
        wanted = F.interpolate(cells[:, None], size=(64, 64), mode="bilinear")[:, 0]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    one, other = (explain(classifier, images, torch.full((3,), k), method=lax) for k in (0, 1))
    assert (one - other).abs().max() > 1e-3


def test_it_shares_the_forward_pass_of_gradcam(classifier: Classifier) -> None:
    images, calls = rand(2, 3, 64, 64), []
    lax = adapter_of(classifier, images)
    handle = classifier.model.register_forward_hook(lambda *_: calls.append(1))
    found = explain_all(classifier, images, methods={"gradcam": "gradcam", "mine": lax})
    handle.remove()
    assert len(calls) == 1
    torch.testing.assert_close(found["mine"], explain(classifier, images, method=lax))
    torch.testing.assert_close(found["gradcam"], explain(classifier, images))


def test_nothing_stays_on_the_model(classifier: Classifier) -> None:
    images = rand(2, 3, 64, 64)
    lax, before = adapter_of(classifier, images), Traces(classifier.model)
    explain(classifier, images, method=lax)
    before.check()


def test_an_adapter_of_a_class_needs_one() -> None:
    lax = Lax([4, 4], classes=3)
    stages = [rand(1, 4, 4, 4), rand(1, 4, 2, 2)]
    with pytest.raises(UserError, match="draws for a class"):
        lax(stages)
    with pytest.raises(UserError, match=r"K = 4, 4, got \[1, 4, 4, 4\]: check"):
        lax(stages[:1], torch.tensor([0]))


def test_it_is_the_same_after_saving_and_loading(classifier: Classifier, tmp_path) -> None:
    images = rand(2, 3, 64, 64)
    lax = adapter_of(classifier, images, classes=5, steps=1)
    lax.save_pretrained(tmp_path / "lax")
    again = Lax.from_pretrained(tmp_path / "lax")
    assert again.layers == ("layer2", "layer3", "layer4")
    assert again.config == lax.config
    targets = torch.tensor([1, 2])
    wanted = explain(classifier, images, targets, method=lax)
    assert torch.equal(explain(classifier, images, targets, method=again), wanted)
