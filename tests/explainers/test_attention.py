"""Attention rollout against plain re-implementations, for each library's transformers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from small_models import (
    random_images,
)
from sufficit import Classifier, UserError, explain
from sufficit.explainers import explain_all
from sufficit.explainers.attention import WrittenAttention, cells_of

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")


def images_of(n: int = 2, side: int = 32) -> Tensor:
    return random_images(n, side, seed=0)


def shaken(model: nn.Module) -> nn.Module:
    """Weights large enough for attention that is far from even."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def plain_rollout(attentions: list[Tensor], prefix: int = 1, mean: bool = False) -> Tensor:
    """Image by image, block by block, from attentions [N,heads,T,T] of a square image."""
    maps = []
    for n in range(len(attentions[0])):
        tokens = attentions[0].shape[-1]
        product = torch.eye(tokens, dtype=torch.double)
        for attention in attentions:
            block = torch.zeros(tokens, tokens, dtype=torch.double)
            for head in attention[n]:
                block += head.double() / len(attention[n])
            block += torch.eye(tokens)
            for row in range(tokens):
                block[row] = block[row] / block[row].sum()
            product = block @ product
        rows = product[prefix:].mean(0) if mean else product[0]
        side = round((tokens - prefix) ** 0.5)
        maps.append(rows[prefix:].reshape(side, side))
    return torch.stack(maps).float()


def drawn(maps: Tensor, side: int) -> Tensor:
    """Stretched to 0..1, brought to size, stretched again."""
    for _ in range(2):
        low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
        maps = (maps - low) / (high - low)
        maps = nn.functional.interpolate(maps[:, None], (side, side), mode="bilinear")[:, 0]
    return maps


def torchvision_vit() -> nn.Module:
    torch.manual_seed(0)
    model = models.VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=3,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=64,
        num_classes=5,
    )
    return shaken(model)


def torchvision_attentions(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Each block's queries and keys from its own weights, softmax written out."""
    found, tokens = [], model._process_input(images)
    tokens = torch.cat([model.class_token.expand(len(images), -1, -1), tokens], dim=1)
    tokens = tokens + model.encoder.pos_embedding
    for block in model.encoder.layers:
        layer, inputs = block.self_attention, block.ln_1(tokens)
        mixed = inputs @ layer.in_proj_weight.T + layer.in_proj_bias
        query, key, _ = (part.unflatten(2, (4, 8)).transpose(1, 2) for part in mixed.chunk(3, 2))
        powers = (query @ key.transpose(2, 3) / 8**0.5).exp()
        found.append((powers / powers.sum(3, keepdim=True)).detach())
        tokens = block(tokens)
    return found


def timm_vit(**options: object) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 3, "num_heads": 4, "embed_dim": 32}
    return shaken(timm.models.VisionTransformer(**sizes, num_classes=5, **options))


def timm_attentions(model: nn.Module, images: Tensor) -> list[Tensor]:
    found: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Tensor], _: object) -> None:
        n, t, _ = inputs[0].shape
        query, key, _ = module.qkv(inputs[0]).reshape(n, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
        found.append((query @ key.transpose(2, 3) * module.scale).softmax(3).detach())

    handles = [block.attn.register_forward_hook(note) for block in model.blocks]
    model(images)
    for handle in handles:
        handle.remove()
    return found


def transformers_vit(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=32,
        patch_size=8,
        num_hidden_layers=3,
        num_attention_heads=4,
        hidden_size=32,
        intermediate_size=64,
        num_labels=5,
    )
    config._attn_implementation = kind
    return shaken(transformers.ViTForImageClassification(config))


def transformers_attentions(images: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return list(transformers_vit("eager")(images, output_attentions=True).attentions)


def test_torchvision() -> None:
    model, images = torchvision_vit(), images_of()
    wanted = drawn(plain_rollout(torchvision_attentions(model, images)), 32)
    found = explain(Classifier(model), images, method="rollout")
    assert torch.allclose(found, wanted, atol=1e-4)
    assert found.std() > 0.1


@pytest.mark.parametrize("fused", [True, False])
def test_timm(fused: bool) -> None:
    model, images = timm_vit(), images_of()
    for block in model.blocks:
        block.attn.fused_attn = fused
    wanted = drawn(plain_rollout(timm_attentions(model, images)), 32)
    assert torch.allclose(explain(Classifier(model), images, method="rollout"), wanted, atol=1e-4)


@pytest.mark.parametrize("kind", ["eager", "sdpa", "flex_attention"])
def test_transformers_with_every_kind_of_attention(kind: str) -> None:
    model, images = transformers_vit(kind), images_of()
    assert model.config._attn_implementation == kind
    wanted = drawn(plain_rollout(transformers_attentions(images)), 32)
    classifier = Classifier(model, layer="vit.layers.2.layernorm_before")
    assert torch.allclose(explain(classifier, images, method="rollout"), wanted, atol=1e-4)
    assert model.config._attn_implementation == kind
    assert all(
        m.config._attn_implementation == kind for m in model.modules() if hasattr(m, "config")
    )


def test_the_attention_set_in_transformers_is_put_back_when_the_model_raises() -> None:
    model = transformers_vit("flex_attention")

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    model.classifier.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        explain(
            Classifier(model, layer="vit.layers.2.layernorm_before"), images_of(), method="rollout"
        )
    assert model.config._attn_implementation == "flex_attention"
    assert torch.overrides._len_torch_function_stack() == 0


@pytest.mark.parametrize(
    ("options", "prefix", "mean"),
    [
        ({"class_token": False, "global_pool": "avg"}, 0, True),
        ({"class_token": True, "global_pool": "avg"}, 1, True),
        ({"reg_tokens": 2}, 3, False),
        ({"class_token": False, "reg_tokens": 2, "global_pool": "avg"}, 2, True),
    ],
)
def test_models_that_average_their_tokens_average_the_rows(
    options: dict[str, object], prefix: int, mean: bool
) -> None:
    model, images = timm_vit(**options), images_of()
    wanted = drawn(plain_rollout(timm_attentions(model, images), prefix, mean), 32)
    assert torch.allclose(explain(Classifier(model), images, method="rollout"), wanted, atol=1e-4)


def test_pooling_by_attention_weighs_the_rows() -> None:
    model = timm_vit(class_token=False, global_pool="map")
    found = explain(Classifier(model), images_of(), method="rollout")
    assert found.amax() == 1


@pytest.mark.parametrize("prefix", [0, 1])
def test_the_row_of_the_prediction_is_pooled_averaged_or_that_of_the_class(prefix: int) -> None:
    model, images = nn.Sequential(nn.Flatten()), torch.zeros(1, 3, 8, 8)
    tokens = torch.rand(1, 4 + prefix, 4 + prefix, generator=torch.Generator().manual_seed(0))
    shares = torch.rand(1, 1, 4 + prefix)

    def cells(pool: Tensor | None) -> Tensor:
        return cells_of(Classifier(model, layer="0"), images, tokens, pool).flatten()

    assert torch.allclose(cells(shares), (shares[0, 0, :, None] * tokens[0]).sum(0)[prefix:])
    averaged = tokens[0, prefix:, prefix:].mean(0)
    assert torch.equal(cells(None), tokens[0, 0, 1:] if prefix else averaged)
    model.global_pool = "avg"
    assert torch.allclose(cells(None), averaged)


def test_weights_of_attention_with_mask_and_scale() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 6, 8)
    mask = torch.randn(6, 6)
    wanted = (query @ key.mT * 0.3 + mask).softmax(-1)
    found = WrittenAttention().attention(query, key, value, mask, scale=0.3)[1]
    assert torch.allclose(found, wanted, atol=1e-6)
    causal = WrittenAttention().attention(query, key, value, is_causal=True)[1]
    assert torch.equal(causal.triu(1), torch.zeros_like(causal))
    assert torch.allclose(causal.sum(-1), torch.ones(2, 4, 6))


def test_it_takes_one_forward_pass_and_leaves_that_of_the_cams_alone() -> None:
    model, images, forwards = timm_vit(), images_of(), []
    model.register_forward_hook(lambda *_: forwards.append(1))
    classifier = Classifier(model, layer="blocks.2.norm1")
    both = explain_all(classifier, images, methods=["layercam", "rollout"])
    assert len(forwards) == 2
    for name, maps in both.items():
        assert torch.allclose(maps, explain(classifier, images, method=name), atol=1e-5)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_wrapped_and_in_bf16(wrap: Callable[[nn.Module], nn.Module]) -> None:
    images = images_of()
    wanted = explain(Classifier(torchvision_vit()), images, method="rollout")
    model = wrap(torchvision_vit())
    found = explain(Classifier(model), images, method="rollout")
    assert torch.allclose(found.cpu(), wanted, atol=1e-5)
    half = explain(Classifier(torchvision_vit().bfloat16()), images, method="rollout")
    assert half.dtype == torch.float32
    assert (half - wanted).abs().mean() < 0.05


def test_under_inference_mode() -> None:
    classifier, images = Classifier(timm_vit()), images_of()
    wanted = explain(classifier, images, method="rollout")
    with torch.inference_mode():
        assert torch.equal(explain(classifier, images * 1, method="rollout"), wanted)


def test_what_the_caller_asked_of_multi_head_attention_is_answered() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 16, 8, stride=8)
            self.norm = nn.LayerNorm(16)
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
            self.shapes: list[object] = []

        def forward(self, images: Tensor) -> Tensor:
            x = self.norm(self.patches(images).flatten(2).mT)
            for need, average in ((True, True), (True, False), (False, True)):
                x, weights = self.attention(
                    x, x, x, need_weights=need, average_attn_weights=average
                )
                self.shapes.append(None if weights is None else tuple(weights.shape))
            return x.mean(1)

    model = Looks().eval()
    explain(Classifier(model, layer="norm"), images_of(), method="rollout")
    assert model.shapes == [(2, 16, 16), (2, 4, 16, 16), None]


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: models.resnet18(num_classes=5).eval(), "needs a transformer"),
        (
            lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=64, num_classes=5),
            "windows or stages",
        ),
        (lambda: timm.create_model("pvt_v2_b0", num_classes=5), "windows or stages"),
        (
            lambda: timm.create_model("xcit_nano_12_p16_224", num_classes=5),
            "needs|attention is over",
        ),
    ],
)
def test_other_models_are_refused_with_a_reason(build: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(UserError, match=says):
        explain(Classifier(build()), images_of(1, 64), method="rollout")
    assert torch.overrides._len_torch_function_stack() == 0
