"""Evidence of the classifier's own head: of which kind it is, and what it says in each cell."""

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

from small_models import (
    Traces,
    cnn,
    linear,
    mixed_modes,
    rand,
    small_model,
    small_vit,
    transformers_vit,
)
from sufficit import Classifier, explain_all
from sufficit.explainers.evidence import LastAttention, evidence_for, find_evidence, standardized
from sufficit.explainers.explanation import draw_all
from sufficit.explainers.forward_pass import look
from sufficit.training import OrderRecipe
from sufficit.training.lax_training import untrained_order


def timm_vit(**options: object) -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=5, **options
    )


class ReluHead(nn.Module):
    """A function between the features and their mean, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 7, 3, 2, 1)
        self.head = nn.Linear(7, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).relu().mean((2, 3)))


class Deaf(nn.Module):
    """Lets no gradient reach the features."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 7, 3, 2, 1), nn.Linear(7, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).detach().amax((2, 3)))


KINDS: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "a small net": (cnn, "pooled", "4", "8"),
    "resnet": (lambda: models.resnet18(num_classes=5), "pooled", "layer4", "fc"),
    "a relu before the mean": (ReluHead, "pooled", "features", "head"),
    "mean of tokens": (
        lambda: timm_vit(global_pool="avg", fc_norm=False), "pooled", "norm", "head",
    ),
    "torchvision vit": (small_vit, "token", "encoder.ln", "heads.head"),
    "timm vit": (timm_vit, "token", "norm", "head"),
    "transformers vit": (transformers_vit, "token", "vit.layernorm", "classifier"),
    "more than a mean": (small_model, "gradient", "4", ""),
    "no gradient": (Deaf, "none", "features", ""),
}  # fmt: skip


def built(name: str) -> Classifier:
    torch.manual_seed(0)
    return Classifier(KINDS[name][0]().eval())


@pytest.mark.parametrize("name", KINDS)
def test_how_the_head_reads_the_features_is_found(name: str) -> None:
    _, kind, layer, head = KINDS[name]
    classifier = built(name)
    traces = Traces(classifier.model)
    side = 64 if name == "resnet" else 32
    found = find_evidence(classifier, rand(3, 3, side, side))
    traces.check()
    assert (found.kind, found.layer, found.head) == (kind, layer, head)
    assert found.activation == ("relu" if name.startswith("a relu") else "none")


def maps_of(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
    evidence = find_evidence(classifier, images)
    seen = look(
        classifier,
        images,
        evidence.layer,
        differentiate=evidence.differentiates,
        inputs=evidence.inputs,
    )
    return evidence.read(seen, [evidence.layer], targets)[1]


@pytest.mark.parametrize("name", ["a small net", "resnet"])
def test_evidence_of_a_linear_head_is_gradcam_before_relu(name: str) -> None:
    """Grad-CAM's weights are the gradients' means, here those of the head over the cells."""
    classifier, images, targets = built(name), rand(3, 3, 64, 64), torch.tensor([0, 3, 1])
    cam = draw_all(classifier, images, targets, {"gradcam": "gradcam"}, progress=False)["gradcam"]
    found = maps_of(classifier, images, targets)[:, :1]
    wanted = standardized(cam.maps[:, None] * cam.maps[0].numel())
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_the_three_channels_by_hand() -> None:
    cells = torch.tensor([[[[1.0, 3.0]], [[0.0, 5.0]]]])  # class 0: 1, 3; class 1: 0, 5
    own, lead, share = evidence_for(cells, torch.eye(2), torch.tensor([0]))[0, :, 0]
    half = 2**-0.5
    torch.testing.assert_close(own, torch.tensor([-half, half]), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lead, torch.tensor([half, -half]), rtol=1e-3, atol=1e-3)
    wanted = torch.tensor([[1.0, 0.0], [3.0, 5.0]]).log_softmax(1)[:, 0] / 10
    torch.testing.assert_close(share, wanted)


@pytest.mark.parametrize("name", ["torchvision vit", "timm vit", "transformers vit"])
def test_what_tokens_add_sums_to_what_the_last_attention_adds(name: str) -> None:
    """The sum over all tokens, with the projection's bias, is the attention's own output."""
    classifier, images = built(name), rand(2, 3, 32, 32)
    evidence = find_evidence(classifier, images)
    seen = look(classifier, images, evidence.layer, inputs=evidence.inputs)
    module = classifier.bare.get_submodule(evidence.attention)
    given, options = seen.inputs[evidence.attention]
    attention = LastAttention.of(lambda: module(*given, **options))
    with torch.no_grad():
        output = module(*given, **options)
    output = output[0] if isinstance(output, tuple) else output
    bias = next(
        part.bias
        for part in reversed([*module.modules()])
        if isinstance(part, nn.Linear) and part.weight is attention.projection
    )
    added = attention.added().sum(1) + bias
    torch.testing.assert_close(added, output[:, 0], rtol=1e-4, atol=1e-5)


def test_evidence_of_a_token_goes_through_the_norm_and_the_head() -> None:
    """Where the mlp of the last block is silent, evidence and the rest add up to the logits."""
    classifier, images = built("torchvision vit"), rand(2, 3, 32, 32)
    vit = classifier.bare
    last = vit.encoder.layers[-1]
    with torch.no_grad():
        for parameter in last.mlp.parameters():
            parameter.zero_()
        nn.init.normal_(vit.heads.head.weight)
        nn.init.normal_(last.self_attention.out_proj.bias)
    evidence = find_evidence(classifier, images)
    seen = look(classifier, images, "encoder.ln", inputs=evidence.inputs)
    cells = evidence._added(seen).flatten(2).sum(2)  # without the class token's own part
    tokens, norm = seen.inputs["encoder.ln"][0][0], vit.encoder.ln
    given, options = seen.inputs[evidence.attention]
    with torch.no_grad():
        weights = last.self_attention(*given, need_weights=True)[1]
    assert weights.shape[1] == 17
    parts = LastAttention.of(lambda: last.self_attention(*given, **options)).added()
    whole = tokens[:, 0]  # the residual, all parts and the bias of the projection
    others = whole - parts[:, 1:].sum(1)
    spread = (whole.var(1, correction=0, keepdim=True) + norm.eps).sqrt()
    rest = (others - others.mean(1, keepdim=True)) / spread * norm.weight + norm.bias
    logits = vit.heads.head(cells + rest)
    torch.testing.assert_close(logits, seen.logits, rtol=1e-3, atol=1e-3)


def test_gradient_times_activation_by_hand() -> None:
    """Logits are sums of weights times channels, so the gradient is the weight."""
    weights = rand(4, 3, 8, 8, seed=4) - 0.5
    classifier, images, targets = linear(weights), rand(2, 3, 8, 8), torch.tensor([2, 0])
    assert find_evidence(classifier, images).kind == "gradient"
    found = maps_of(classifier, images, targets)
    wanted = standardized((weights[targets] * images).sum(1, keepdim=True))
    torch.testing.assert_close(found[:, :1], wanted, rtol=1e-4, atol=1e-4)
    assert not found[:, 1:].any()


def test_flat_evidence_is_zero_and_finite() -> None:
    assert not standardized(torch.ones(1, 2, 3, 3)).any()
    assert not standardized(torch.ones(1, 1, 1, 1)).any()


def test_an_adapters_order_is_drawn_beside_gradcam_in_one_pass() -> None:
    """The adapter of a head that needs a gradient shares the pass of the CAMs."""
    for name in ("more than a mean", "a small net", "timm vit"):
        classifier, images = built(name), rand(3, 3, 32, 32)
        mixed = name == "a small net"
        if mixed:
            mixed_modes(classifier.model)
        traces = Traces(classifier.model)
        lax = untrained_order(classifier, images, OrderRecipe(width=8), None, 0)
        both = explain_all(classifier, images, None, {"lax": lax, "gradcam": "gradcam"})
        alone = explain_all(classifier, images, None, {"lax": lax})
        traces.check()
        torch.testing.assert_close(both["lax"], alone["lax"])
        assert ((both["lax"] >= 0.5).double().mean((1, 2)) - lax.size).abs().max() < 1e-3


def test_untrained_it_orders_as_gradcam_does_before_relu() -> None:
    classifier, images, targets = built("a small net"), rand(2, 3, 32, 32), torch.tensor([1, 2])
    lax = untrained_order(classifier, images, OrderRecipe(width=8), None, 0)
    drawn = draw_all(classifier, images, targets, {"l": lax, "g": "gradcam"}, progress=False)
    cam = standardized(drawn["g"].maps[:, None] * 64)  # of 8 x 8 cells
    wanted = F.interpolate(cam, (lax.cells, lax.cells), mode="bicubic")[:, 0]
    torch.testing.assert_close(drawn["l"].maps, wanted, rtol=1e-3, atol=1e-3)
