"""The feature layer is found, and its output becomes a grid."""

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision import models

from small_models import small_vit, transformers_vit
from sufficit import Classifier, UserError
from sufficit.explainers.explanation import draw_all
from sufficit.explainers.forward_pass import look

# What people choose by hand for these architectures.
LAYERS: dict[str, tuple[Callable[[], nn.Module], int, str, tuple[int, ...]]] = {
    "resnet18": (models.resnet18, 64, "layer4", (512, 2, 2)),
    "mobilenet_v2": (models.mobilenet_v2, 64, "features", (1280, 2, 2)),
    "vgg11": (models.vgg11, 64, "features", (512, 2, 2)),
    "densenet121": (models.densenet121, 64, "features", (1024, 2, 2)),
    "efficientnet_b0": (models.efficientnet_b0, 64, "features", (1280, 2, 2)),
    "convnext_tiny": (models.convnext_tiny, 64, "features", (768, 2, 2)),
    "regnet_y_400mf": (models.regnet_y_400mf, 64, "trunk_output", (440, 2, 2)),
    "swin_t": (models.swin_t, 64, "features.7.1.norm1", (768, 2, 2)),
    "vit": (small_vit, 32, "encoder.layers.encoder_layer_1.ln_1", (12, 4, 4)),
    "timm resnet": (lambda: timm.create_model("resnet10t"), 64, "layer4", (512, 2, 2)),
    "timm vit": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2),
        64,
        "blocks.1.norm1",
        (192, 4, 4),
    ),
    "transformers vit": (transformers_vit, 32, "layernorm_before", (12, 4, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_feature_layer_is_found_by_itself(name: str) -> None:
    build, side, layer, shape = LAYERS[name]
    classifier = Classifier(build())
    images = torch.rand(2, 3, side, side)
    with torch.no_grad():
        features, logits = classifier.features(images)
        assert classifier.layer is not None
        assert classifier.layer == layer or classifier.layer.endswith("." + layer)
        assert features.shape == (2, *shape)
        assert torch.allclose(logits, classifier(images), atol=1e-5)


def test_tokens_become_a_grid_in_the_order_of_the_image() -> None:
    """A patch that differs from all others lights up its own cell."""
    torch.manual_seed(0)
    classifier = Classifier(small_vit(), layer="encoder.dropout")
    images = torch.zeros(1, 3, 32, 32)
    images[:, :, 8:16, 24:32] = 1
    with torch.no_grad():
        features, _ = classifier.features(images)
        blank, _ = classifier.features(torch.zeros_like(images))
    changed = (features - blank).abs().sum(1)[0]
    assert changed.nonzero().tolist() == [[1, 3]]


class Maps(nn.Module):
    """Hands its layer's output through to logits; the layer says what shape it has."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images).flatten(1)[:, :2] + images.mean((1, 2, 3))[:, None]


class ChannelsLast(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images[:, :, ::4, ::4].repeat(1, 8, 1, 1).permute(0, 2, 3, 1)


def test_channels_last_maps_are_permuted() -> None:
    images = torch.rand(2, 3, 32, 20)
    features, _ = Classifier(Maps(ChannelsLast())).features(images)
    assert torch.equal(features, images[:, :, ::4, ::4].repeat(1, 8, 1, 1))


def test_a_model_without_maps_lists_its_candidates() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    with pytest.raises(UserError, match=r"name one with layer=.*Candidates: 0, 1"):
        Classifier(model).features(torch.rand(1, 3, 8, 8))


def test_a_mistyped_layer_is_named_with_its_nearest() -> None:
    with pytest.raises(UserError, match=r"Unknown layer 'layer5'. Did you mean 'layer\d"):
        Classifier(models.resnet18(), layer="layer5")


def test_an_unusual_output_can_be_reshaped_by_hand() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    classifier = Classifier(model, layer="0", reshape=lambda out: out.view(-1, 3, 8, 8))
    images = torch.rand(1, 3, 8, 8)
    assert torch.equal(classifier.features(images)[0], images)


class Attends(nn.Module):
    """A layer that gives tokens [N,T,K] and a second thing."""

    def forward(self, images: Tensor) -> tuple[Tensor, str]:
        return images.flatten(2).mT, "weights"


class OfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attends, self.head = Attends(), nn.Linear(3, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.attends(images)[0].mean(1))


def test_a_reshape_gets_the_whole_output_whoever_reads_it() -> None:
    def reshape(output: tuple[Tensor, str]) -> Tensor:
        tokens, word = output
        assert word == "weights"
        return tokens.mT.unflatten(2, (8, 8))

    classifier = Classifier(OfAttention(), "attends", reshape=reshape)
    images = torch.rand(2, 3, 8, 8)
    assert torch.equal(classifier.features(images)[0], images)
    seen = look(classifier, images, "attends", earlier=("attends",))
    assert torch.equal(seen.earlier["attends"], images)
    targets, weights = torch.tensor([1, 3]), classifier.model.head.weight.detach()
    wanted = (images * weights[targets][:, :, None, None]).sum(1) / 64
    found = draw_all(classifier, images, targets, ["gradcam"])["gradcam"].maps
    assert torch.allclose(found, wanted, atol=1e-6)


def test_what_writes_over_the_features_does_not_change_them() -> None:
    torch.manual_seed(0)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), *head)
    images = torch.rand(1, 3, 8, 8)
    features, _ = Classifier(model, layer="0").features(images)
    assert torch.equal(features, model[0](images))
    assert features.min() < 0


def test_the_layer_found_by_itself_follows_the_size_of_the_images() -> None:
    classifier = Classifier(models.resnet18())
    assert classifier.features(torch.rand(1, 3, 32, 32))[0].shape[1:] == (256, 2, 2)
    assert classifier.features(torch.rand(1, 3, 64, 64))[0].shape[1:] == (512, 2, 2)
    chosen = Classifier(models.resnet18(), layer="layer2")
    assert chosen.features(torch.rand(1, 3, 64, 64))[0].shape[1:] == (128, 8, 8)


def test_a_size_without_a_layer_is_refused_again_and_again() -> None:
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    classifier = Classifier(nn.Sequential(nn.Conv2d(3, 4, 8, stride=8), pool))
    assert classifier.features(torch.rand(1, 3, 16, 16))[0].shape[2:] == (2, 2)
    for _ in range(2):
        with pytest.raises(UserError, match="no layer with a spatial output"):
            classifier.features(torch.rand(1, 3, 8, 8))
