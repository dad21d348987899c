"""Attributions of captum and zennit as methods, against the libraries called by hand."""

import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from small_models import (
    SmallMemory,
    Traces,
    cnn,
    mixed_modes,
    rand,
    random_images,
    settled,
    small_vit,
    transformers_vit,
)
from small_runs import FLAGS
from sufficit import Classifier, UserError, compare, explain, normalize, resize
from sufficit.explainers import explainer_named
from sufficit.explainers.words import sources_from
from sufficit.sources import Method

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # their own imports are not ours to mend
    import captum
    from captum import attr
    from zennit import composites
    from zennit.attribution import Gradient
    from zennit.canonizers import SequentialMergeBatchNorm

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
TARGETS = torch.tensor([0, 2, 3])
EMPTY = "ignore:heatmaps with no positive part"  # random weights give some


class Prepared(nn.Module):
    """A model with its normalisation inside, as captum wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        mean, std = (torch.tensor(v)[:, None, None] for v in (MEAN, STD))
        return self.model((images - mean) / std)


def vit() -> nn.Module:
    torch.manual_seed(0)
    model = small_vit(32)
    for weights in model.parameters():
        weights.data = torch.randn(weights.shape) * 0.2
    return model.eval()


def classifier_of(model: nn.Module) -> Classifier:
    return Classifier(model, mean=MEAN, std=STD)


@pytest.fixture
def by_hand() -> Iterator[None]:
    """What the libraries warn of when they are called by hand."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def noise(n: int, seed: int = 0) -> Tensor:
    return torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def squares(grid: int, side: int = 32) -> Tensor:
    """The number of the cell of each pixel, one pixel after the other."""
    rows = [
        [(y * grid // side) * grid + x * grid // side for x in range(side)] for y in range(side)
    ]
    return torch.tensor(rows)[None, None].expand(1, 3, side, side).clone()


def one_by_one(made: object, images: Tensor, seed: int = 0, **given: object) -> Tensor:
    """The attributions of each image alone, from the same lots."""
    found = []
    for image, target in zip(images, TARGETS, strict=True):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # captum draws from the global state
        found.append(made.attribute(image[None], target=target[None], **given))
    return torch.cat(found)


BY_HAND: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "Saliency": lambda f, x: attr.Saliency(f).attribute(x, target=TARGETS),
    "Saliency:abs=false:sign=positive": lambda f, x: attr.Saliency(f).attribute(
        x, target=TARGETS, abs=False
    ),
    "InputXGradient": lambda f, x: attr.InputXGradient(f).attribute(x, target=TARGETS),
    "IntegratedGradients:n_steps=8": lambda f, x: attr.IntegratedGradients(f).attribute(
        x, target=TARGETS, n_steps=8
    ),
    "IntegratedGradients:n_steps=4:method=riemann_left:multiply_by_inputs=false": lambda f, x: (
        attr.IntegratedGradients(f, multiply_by_inputs=False).attribute(
            x, target=TARGETS, n_steps=4, method="riemann_left"
        )
    ),
    "GradientShap:n_samples=4": lambda f, x: one_by_one(
        attr.GradientShap(f), x, baselines=noise(10), n_samples=4
    ),
    "FeatureAblation:grid=4:sign=absolute": lambda f, x: attr.FeatureAblation(f).attribute(
        x, target=TARGETS, feature_mask=squares(4)
    ),
    "Occlusion:grid=8:sign=absolute": lambda f, x: attr.Occlusion(f).attribute(
        x, (3, 8, 8), strides=(3, 4, 4), target=TARGETS
    ),
    "ShapleyValueSampling:n_samples=2:grid=3:sign=absolute": lambda f, x: one_by_one(
        attr.ShapleyValueSampling(f), x, feature_mask=squares(3), n_samples=2
    ),
    "KernelShap:n_samples=30:grid=3:sign=absolute": lambda f, x: one_by_one(
        attr.KernelShap(f), x, feature_mask=squares(3), n_samples=30
    ),
    "Lime:n_samples=30:grid=3": lambda f, x: one_by_one(
        attr.Lime(f), x, feature_mask=squares(3), n_samples=30
    ),
}
OF_RELU: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "DeepLift": lambda f, x: attr.DeepLift(f).attribute(x, target=TARGETS),
    "DeepLiftShap": lambda f, x: attr.DeepLiftShap(f).attribute(x, noise(10), target=TARGETS),
    "GuidedBackprop": lambda f, x: attr.GuidedBackprop(f).attribute(x, target=TARGETS),
    "Deconvolution": lambda f, x: attr.Deconvolution(f).attribute(x, target=TARGETS),
    "GuidedGradCam": lambda f, x: attr.GuidedGradCam(f, f.model[4]).attribute(x, target=TARGETS),
}
OF_LAYERS: dict[str, Callable[[nn.Module, nn.Module, Tensor], Tensor]] = {
    "LayerGradientXActivation": lambda f, layer, x: attr.LayerGradientXActivation(
        f, layer
    ).attribute(x, target=TARGETS),
    "LayerIntegratedGradients:n_steps=6": lambda f, layer, x: attr.LayerIntegratedGradients(
        f, layer
    ).attribute(x, target=TARGETS, n_steps=6),
    "LayerConductance:n_steps=6": lambda f, layer, x: attr.LayerConductance(f, layer).attribute(
        x, target=TARGETS, n_steps=6
    ),
    "InternalInfluence:n_steps=6:sign=absolute": lambda f, layer, x: attr.InternalInfluence(
        f, layer
    ).attribute(x, target=TARGETS, n_steps=6),
    "LayerDeepLift": lambda f, layer, x: attr.LayerDeepLift(f, layer).attribute(x, target=TARGETS),
    "LayerActivation:sign=absolute": lambda f, layer, x: attr.LayerActivation(f, layer).attribute(
        x
    ),
    "LayerGradientShap:n_samples=3": lambda f, layer, x: one_by_one(
        attr.LayerGradientShap(f, layer), x, baselines=noise(10), n_samples=3
    ),
}


def heatmaps_of(maps: Tensor, word: str) -> Tensor:
    """Finished heatmaps of signed maps, as every method's: [N,h,w] -> [N,32,32]."""
    absolute = "absolute" in word or word == "Saliency"
    return normalize(resize(normalize(maps.abs() if absolute else maps.clamp(min=0)), (32, 32)))


@pytest.mark.filterwarnings(EMPTY)
@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("build", [cnn, vit])
@pytest.mark.parametrize("word", BY_HAND)
def test_a_map_is_captums(word: str, build: Callable[[], nn.Module]) -> None:
    model, images = build(), random_images(3, 32)
    found = explain(classifier_of(model), images, TARGETS, f"captum:{word}")
    maps = BY_HAND[word](Prepared(copy.deepcopy(model)), images).detach().float().sum(1)
    assert torch.allclose(found, heatmaps_of(maps, word), atol=1e-4)
    if "Lime" not in word:  # its lasso may leave nothing
        assert (found.amax((1, 2)) > 0.99).all()


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("word", OF_RELU)
def test_a_map_of_changed_gradients_is_captums(word: str) -> None:
    model, images = cnn(), random_images(3, 32)
    found = explain(classifier_of(model), images, TARGETS, f"captum:{word}")
    maps = OF_RELU[word](Prepared(copy.deepcopy(model)), images).detach().sum(1)
    assert torch.allclose(found, heatmaps_of(maps, word), atol=1e-4)
    # Whoever changes no gradient draws another map.
    plain = {"DeepLift": "InputXGradient", "DeepLiftShap": "InputXGradient"}.get(word, "Saliency")
    other = f"captum:{plain}" + (":abs=false:sign=positive" if plain == "Saliency" else "")
    assert not torch.allclose(
        found, explain(classifier_of(model), images, TARGETS, other), atol=0.05
    )


@pytest.mark.filterwarnings(EMPTY)
@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("build", [cnn, vit])
@pytest.mark.parametrize("word", OF_LAYERS)
def test_a_map_of_a_layer_is_captums_at_the_feature_layer(
    word: str, build: Callable[[], nn.Module]
) -> None:
    model, images = build(), random_images(3, 32)
    classifier = classifier_of(model)
    found = explain(classifier, images, TARGETS, f"captum:{word}")
    theirs = copy.deepcopy(model)
    layer = theirs.get_submodule(classifier.layer)
    maps = OF_LAYERS[word](Prepared(theirs), layer, images)
    maps = maps[0] if isinstance(maps, tuple) else maps
    # The ViT has a class token and 4 x 4 others.
    maps = maps.sum(1) if maps.ndim == 4 else maps[:, 1:].sum(2).unflatten(1, (4, 4))
    assert torch.allclose(found, heatmaps_of(maps.detach(), word), atol=1e-4)


def test_a_layer_can_be_chosen_and_each_of_its_cells_hidden() -> None:
    """LayerFeatureAblation hides a cell with all its channels: here, in a loop of our own."""
    model, images = cnn(), random_images(3, 32)
    found = explain(classifier_of(model), images, TARGETS, "captum:LayerFeatureAblation", layer="2")
    with torch.no_grad():
        inputs = classifier_of(model).normalize(images)
        features = model[:3](inputs)
        whole = model[3:](features.clone())[range(3), TARGETS]
        drops = torch.zeros(3, 16, 16)
        for y in range(16):
            for x in range(16):
                hidden = features.clone()
                hidden[:, :, y, x] = 0
                drops[:, y, x] = whole - model[3:](hidden)[range(3), TARGETS]
    assert torch.allclose(found, heatmaps_of(drops, ""), atol=1e-4)


class Flat(nn.Module):
    """A network of layers that captum's LRP knows, with one ReLU for both uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Conv2d(3, 5, 3, stride=2), nn.Conv2d(5, 5, 3, stride=2)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(245, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.relu(self.two(self.relu(self.one(inputs)))).flatten(1))


@pytest.mark.usefixtures("by_hand")
def test_relevance_of_captum_is_that_of_the_normalised_input() -> None:
    model, images = Flat().eval(), random_images(3, 32)
    traces = Traces(model)
    found = explain(classifier_of(model), images, TARGETS, "captum:LRP")
    traces.check()
    inputs = classifier_of(model).normalize(images)
    maps = attr.LRP(copy.deepcopy(model)).attribute(inputs, target=TARGETS).detach().sum(1)
    assert torch.allclose(found, heatmaps_of(maps, ""), atol=1e-4)
    inside = attr.LRP(Prepared(copy.deepcopy(model))).attribute(images, target=TARGETS)
    assert not torch.allclose(found, heatmaps_of(inside.detach().sum(1), ""), atol=0.01)


def zennit_by_hand(model: nn.Module, images: Tensor, name: str, *, logits: bool, **more) -> Tensor:
    inputs = classifier_of(model).normalize(images)
    composite = getattr(composites, name)(canonizers=[SequentialMergeBatchNorm()], **more)
    classes = model(inputs).shape[1] if isinstance(model(inputs), Tensor) else 5
    start = F.one_hot(TARGETS, classes)
    with Gradient(model, composite) as attributor:
        return attributor(inputs, (lambda out: start * out) if logits else start.float())[1].sum(1)


@pytest.mark.parametrize(
    ("word", "logits"),
    [
        ("EpsilonPlusFlat", True),
        ("EpsilonGammaBox:gamma=0.5", True),
        ("EpsilonAlpha2Beta1:sign=absolute", True),
        ("GuidedBackprop", False),
        ("ExcitationBackprop", False),
        ("BetaSmooth:beta_smooth=2", False),
    ],
)
@pytest.mark.filterwarnings(EMPTY)
def test_a_map_is_zennits(word: str, logits: bool) -> None:
    model, images = cnn(), random_images(3, 32)
    model[1].running_mean.copy_(rand(6))  # so that merging it matters
    model[1].running_var.copy_(rand(6, seed=3) + 0.5)
    found = explain(classifier_of(model), images, TARGETS, f"zennit:{word}")
    name, more = word.partition(":")[0], {}
    if name == "EpsilonGammaBox":
        box = (
            classifier_of(model).normalize(v.expand(3, 3, 32, 32)) for v in torch.tensor([0.0, 1.0])
        )
        more = dict(zip(("low", "high"), box, strict=True), gamma=0.5)
    more |= {"beta_smooth": 2.0} if name == "BetaSmooth" else {}
    theirs = copy.deepcopy(model)
    theirs[4].inplace = False  # else BetaSmooth reads what the ReLU has overwritten
    maps = zennit_by_hand(theirs, images, name, logits=logits, **more)
    assert torch.allclose(found, heatmaps_of(maps, word), atol=1e-3)


class LogitsOnly(nn.Module):
    """What a model of transformers gives, without its wrapping."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs).logits


def test_a_map_of_a_transformer_is_zennits() -> None:
    torch.manual_seed(0)
    model, images = transformers_vit().eval(), random_images(3, 32)
    found = explain(classifier_of(model), images, TARGETS, "zennit:EpsilonPlus")
    maps = zennit_by_hand(LogitsOnly(copy.deepcopy(model)), images, "EpsilonPlus", logits=True)
    assert torch.allclose(found, heatmaps_of(maps, ""), atol=1e-3)


class OwnReLUs(nn.Module):
    """A block of ResNet18 with one ReLU for each use, and a sum that is not in place."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.first, self.last = block, nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        block = self.block
        out = block.bn2(block.conv2(self.first(block.bn1(block.conv1(x)))))
        return self.last(out + (x if block.downsample is None else block.downsample(x)))


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("pool", [nn.MaxPool2d, nn.AvgPool2d])
def test_deeplift_of_a_resnet_is_that_of_one_whose_relus_are_used_once(
    pool: Callable[[int, int, int], nn.Module],
) -> None:
    model, images = settled("resnet18", 64), random_images(3, 64)
    model.maxpool = pool(3, 2, 1)
    theirs = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="used more than once"):
        attr.DeepLift(Prepared(theirs)).attribute(images, target=TARGETS)
    theirs = copy.deepcopy(model)
    theirs.relu = nn.ReLU()
    for layer in (theirs.layer1, theirs.layer2, theirs.layer3, theirs.layer4):
        layer[0], layer[1] = OwnReLUs(layer[0]), OwnReLUs(layer[1])
    maps = attr.DeepLift(Prepared(theirs)).attribute(images, target=TARGETS).detach()
    if pool is nn.AvgPool2d:  # captum's rule for max pooling does not conserve the sum
        with torch.no_grad():
            gained = Prepared(model)(images) - Prepared(model)(torch.zeros_like(images))
        assert torch.allclose(maps.sum((1, 2, 3)), gained[range(3), TARGETS], rtol=1e-3, atol=1e-3)
    traces = Traces(model)
    found = explain(classifier_of(model), images, TARGETS, "captum:DeepLift")
    traces.check()
    assert torch.allclose(found, normalize(maps.sum(1).clamp(min=0)), atol=1e-3)
    guided = explain(classifier_of(model), images, TARGETS, "captum:GuidedBackprop")
    maps = attr.GuidedBackprop(Prepared(theirs)).attribute(images, target=TARGETS).sum(1)
    assert torch.allclose(guided, normalize(maps.clamp(min=0)), atol=1e-3)


SAME = {
    "input-x-gradient": "captum:InputXGradient",
    "integrated-gradients:steps=9": "captum:IntegratedGradients:n_steps=9:method=riemann_middle",
    "lrp": "zennit:EpsilonGammaBox",
    "gradcam": "captum:LayerGradCam",
}


@pytest.mark.filterwarnings(EMPTY)
def test_one_comparison_checks_our_writing_against_theirs() -> None:
    classifier, images = classifier_of(cnn()), random_images(3, 32)
    methods = {name: name for pair in SAME.items() for name in pair}
    given = {"checks": "none", "value_step": 0.25, "percent_step": 0.25}
    result = compare(classifier, images, methods, targets=TARGETS, progress=False, **given)
    for ours, theirs in SAME.items():
        found = [explain(classifier, images, TARGETS, word) for word in (ours, theirs)]
        assert torch.allclose(*found, atol=1e-3)
        penalties = [result.rows.column(name, "mask_penalty") for name in (ours, theirs)]
        assert np.allclose(*penalties, atol=2e-3)


WORDS = (
    *("captum:Saliency", "captum:DeepLift", "captum:GuidedBackprop", "captum:LayerGradCam"),
    *("captum:GradientShap", "captum:IntegratedGradients:n_steps=3", "captum:Lime:n_samples=9"),
    *("captum:FeatureAblation:grid=2", "captum:LayerConductance:n_steps=3", "captum:DeepLiftShap"),
    *("zennit:EpsilonPlusFlat", "zennit:EpsilonGammaBox", "zennit:ExcitationBackprop"),
)


@pytest.mark.filterwarnings(EMPTY)
@pytest.mark.parametrize("word", WORDS)
def test_nothing_is_left_and_neither_batch_nor_precision_matters(word: str) -> None:
    images = random_images(3, 32)
    before = images.clone()
    for unlike in (mixed_modes, lambda model: model.requires_grad_(False)):
        model = cnn()
        unlike(model)
        traces, states = Traces(model), (torch.get_rng_state(), np.random.get_state()[1].copy())  # noqa: NPY002
        whole = explain(Classifier(model), images, TARGETS, word)
        each = explain(Classifier(model), images, TARGETS, word, batch_size=1)
        assert torch.allclose(each, whole, atol=1e-4)
        with pytest.raises(UserError, match=r"targets must lie in 0\.\.3"):
            explain(Classifier(model), images, TARGETS + 7, word)
        traces.check()
        assert torch.equal(torch.get_rng_state(), states[0])
        assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    assert torch.equal(images, before)
    half = explain(Classifier(cnn().bfloat16()), images, TARGETS, word)
    assert half.dtype == torch.float32
    if word == "captum:FeatureAblation:grid=2":  # the steps of bf16 are larger than the effects
        model = Classifier(cnn().bfloat16())
        given = {"target": TARGETS, "feature_mask": squares(2)}
        whole = heatmaps_of(attr.FeatureAblation(model).attribute(images, **given).sum(1), word)
    assert (half - whole).abs().mean() < 0.1


@pytest.mark.parametrize(
    "word", ["captum:DeepLift", "captum:IntegratedGradients", "zennit:EpsilonPlus"]
)
def test_batches_are_halved_when_memory_runs_out(word: str) -> None:
    images, targets = random_images(8, 32), torch.arange(8) % 4
    wanted = explain(Classifier(cnn()), images, targets, word)
    tight = SmallMemory(cnn(), room=2)  # DeepLift asks for an image and its baseline at once
    traces = Traces(tight)
    with pytest.warns(RuntimeWarning, match="out of memory: retrying with batch size"):
        found = explain(Classifier(tight), images, targets, word)
    assert torch.allclose(found, wanted, atol=1e-4)
    traces.check()


class Watched(nn.Module):
    """Keeps, at each call of any of its copies, the weights of the original."""

    seen: list[Tensor] = []  # noqa: RUF012  # shared by the copies

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*cnn())

    def forward(self, images: Tensor) -> Tensor:
        Watched.seen.append(WATCHED[0].model[0].weight.detach().clone())
        return self.model(images)


WATCHED: list[Watched] = []


def test_weights_do_not_even_change_for_a_while() -> None:
    """zennit merges a batch norm into them while it works."""
    WATCHED[:] = [Watched().eval()]
    before = WATCHED[0].model[0].weight.detach().clone()
    WATCHED[0].model[1].running_var.fill_(9.0)
    explain(Classifier(WATCHED[0]), random_images(2, 32), method="zennit:GuidedBackprop")
    assert len(Watched.seen) > 3
    assert all(torch.equal(one, before) for one in Watched.seen)


def test_lots_depend_on_the_seed() -> None:
    classifier, images = Classifier(cnn()), random_images(2, 32)
    for word in ("captum:GradientShap", "captum:DeepLiftShap"):
        one, same, other = (explain(classifier, images, method=word, seed=s) for s in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.allclose(one, other, atol=0.01)


class NormFirst(nn.Module):
    """Its norm is listed after the convolution and works before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 4)
        self.norm.running_mean.fill_(0.5)
        self.norm.running_var.fill_(0.1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(self.norm(images))).mean((2, 3)))


@pytest.mark.parametrize(
    ("word", "build", "message"),
    [
        ("captum:LayerGradCam", vit, r"captum:LayerGradCam does not work with this model .*tokens"),
        ("captum:LRP", vit, r"captum:LRP does not work .*LayerNorm.* has no rule .*use another"),
        ("zennit:EpsilonPlus", vit, r"zennit:EpsilonPlus does not work with this model"),
        ("captum:GuidedBackprop", vit, r"changes gradients at modules such as nn\.ReLU, and there"),
        ("captum:DeepLift", vit, r"changes gradients at modules such as nn\.ReLU, and there is no"),
        ("zennit:GuidedBackprop", vit, r"changes gradients at modules such as nn\.ReLU, and there"),
        ("captum:IntegratedGradients:method=left", cnn, r"does not work .*these options \(.*left"),
        ("zennit:EpsilonPlus", NormFirst, r"does not work .*\(zennit merges batch norms into"),
    ],
)
def test_what_the_library_cannot_do_is_one_error(
    word: str, build: Callable[[], nn.Module], message: str
) -> None:
    model = build().eval()
    traces = Traces(model)
    with pytest.raises(UserError, match=message):
        explain(Classifier(model), random_images(2, 32), method=word)
    traces.check()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "captum:DeepLyft",
            r"Unknown attribution of captum 'DeepLyft'\. Did you mean 'DeepLift'\?",
        ),
        ("captum:deeplift", "Did you mean 'DeepLift'"),
        ("captum:", "Unknown attribution of captum ''"),
        ("zennit:EpsilonPlusFlatt", r"Did you mean 'EpsilonPlusFlat'\? Known: EpsilonGammaBox,"),
        (
            "captum:NeuronGradient",
            r"captum:NeuronGradient needs neuron_selector.*use one of .*GradientShap",
        ),
        ("captum:NoiseTunnel", r"needs attribution_method, more than an image.*, DeepLift, "),
        ("captum:LLMAttribution", r"needs inp, attr_method, tokenizer"),
        ("captum:FeaturePermutation", "needs the other images of a batch"),
        ("captum:ShapleyValues", "needs a forward pass for each order"),
        ("captum:DeepLift:n_steps=3", r"Unknown option of captum:DeepLift 'n_steps'"),
        ("captum:IntegratedGradients:n_steps=0", "n_steps of captum:IntegratedGradients must be 1"),
        ("captum:Saliency:abs=maybe", r"Unknown abs of captum:Saliency 'maybe'.*true, false"),
        ("zennit:EpsilonPlus:epsilon=x", "epsilon of zennit:EpsilonPlus must be a number, got 'x'"),
    ],
)
def test_a_wrong_word_is_refused(word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        explain(Classifier(cnn()), random_images(1, 32), method=word)
    with pytest.raises(UserError, match=message):
        sources_from(f"gradcam,mine={word}")


def test_a_word_has_a_name_options_and_facts() -> None:
    words = "captum:DeepLift, mine=captum:IntegratedGradients:32, zennit:EpsilonPlus:epsilon=0.1"
    assert sources_from(words) == {
        "captum-DeepLift": "captum:DeepLift",
        "mine": "captum:IntegratedGradients:32",
        "zennit-EpsilonPlus-epsilon=0.1": "zennit:EpsilonPlus:epsilon=0.1",
    }
    chosen = explainer_named("captum:IntegratedGradients:32:sign=absolute")
    assert chosen.settings["n_steps"] == 32
    assert chosen.facts() == {
        "options": chosen.settings,
        "sign": "absolute",
        "class_agnostic": False,
        "passes": 96,
        "reference": f"captum {captum.__version__}",
    }
    assert explainer_named("captum:Saliency").sign == "absolute"
    assert explainer_named("captum:LayerActivation").class_agnostic
    assert not explainer_named("zennit:EpsilonPlus").class_agnostic
    # Another version draws other maps: a run does not resume with it.
    assert Method("x", "captum:DeepLift").digest().endswith(f"/captum {captum.__version__}")
    pair = ("captum:Saliency", {"abs": "false"})
    images = random_images(1, 32)
    found, wanted = (
        explain(Classifier(cnn()), images, method=m) for m in (pair, "captum:Saliency:abs=false")
    )
    assert torch.equal(found, wanted)


class Counting(nn.Module):
    """Counts the images of all its copies."""

    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.model = cnn()

    def forward(self, images: Tensor) -> Tensor:
        Counting.seen += len(images)
        return self.model(images)


@pytest.mark.filterwarnings(EMPTY)
@pytest.mark.parametrize(
    "word",
    [
        *("DeepLift", "Saliency", "GradientShap", "DeepLiftShap", "LayerConductance:n_steps=4"),
        *("IntegratedGradients:n_steps=4", "FeatureAblation:grid=3", "Occlusion:grid=4"),
        *("ShapleyValueSampling:n_samples=2:grid=3", "Lime:n_samples=9", "GuidedGradCam"),
    ],
)
def test_a_method_costs_what_it_says(word: str) -> None:
    Counting.seen = 0
    classifier = Classifier(Counting().eval(), layer="model.4")
    explain(classifier, random_images(4, 32), torch.arange(4), f"captum:{word}")
    passes = (Counting.seen - 2) / 4  # two look at the model
    hidden = word.startswith(("Feature", "Occlusion", "Shapley", "Lime"))
    assert explainer_named(f"captum:{word}").passes == passes * (1 if hidden else 3)


@pytest.mark.parametrize(
    ("package", "word", "extra"),
    [("captum", "captum:DeepLift", "captum"), ("zennit", "zennit:EpsilonPlus", "lrp")],
)
def test_without_the_library_the_extra_is_named(
    package: str, word: str, extra: str, monkeypatch: pytest.MonkeyPatch, sufficit
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    wrong = f"{word} needs the extra {extra}: pip install '.[{extra}]'"
    with pytest.raises(UserError) as error:
        explain(Classifier(cnn()), random_images(1, 32), method=word)
    assert str(error.value) == wrong
    run = sufficit("methods", word)
    assert run.code == 2
    assert wrong in run.err
    assert sufficit("methods").code == 0


@pytest.mark.slow
@pytest.mark.filterwarnings(EMPTY)
@pytest.mark.usefixtures("undrawn")
def test_commands_take_them(sufficit, photos: Path, tmp_path: Path) -> None:
    model = f"python:{photos.parent / 'model.py'}:make"
    words = "captum:DeepLift,noisy=captum:GradientShap:n_samples=3,zennit:EpsilonPlusFlat"
    out = tmp_path / "out"
    given = ["--model", model, "--data", photos, "--methods", words, *FLAGS]
    run = sufficit("compare", *given, "--out", out)
    assert run.code == 0, run.err
    facts = json.loads((out / "run.json").read_text())
    sources = facts["sources"]
    assert sources["captum-DeepLift"]["sign"] == "positive"
    assert sources["captum-DeepLift"]["reference"] == f"captum {captum.__version__}"
    assert sources["noisy"]["options"]["n_samples"] == 3
    assert sources["zennit-EpsilonPlusFlat"]["reference"].startswith("zennit 0.")
    assert facts["versions"]["captum"] == captum.__version__
    assert "captum-DeepLift" in run.out
    drawn = sufficit(
        "explain", photos, "--model", model, "--methods", "captum:DeepLift", "--no-fit",
        "--out", tmp_path / "o",
    )  # fmt: skip
    assert drawn.code == 0, drawn.err
    with np.load(tmp_path / "o" / "captum-DeepLift.npz") as maps:
        assert max(maps[name].max() for name in maps) == pytest.approx(1)
