"""The fill `drop`: hidden tokens are left out of a ViT's forward pass."""

import functools
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

from reference import COLUMNS, reference_columns
from small_models import SmallMemory, Traces, cnn, rand, random_images
from small_probes import ask, probe_for
from sufficit import Classifier, UserError, evaluate, leak
from sufficit.perturbation.bands import ranks, show, top
from sufficit.perturbation.predict import predict
from sufficit.perturbation.tokens import distinct_patches, kept_patches, patches_of, token_model

SIDE, PATCH, DIM = 32, 8, 32
COARSE = {"value_step": 0.1, "percent_step": 0.1}


def shaken(model: nn.Module) -> nn.Module:
    """Random weights everywhere: libraries start heads, biases and tokens at or near 0."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data.add_(noise, alpha=0.3 if weight.ndim != 2 else 0.15)
    return model.eval()


def torchvision_vit(**options) -> nn.Module:
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": DIM, "mlp_dim": 64, "num_classes": 5}
    return VisionTransformer(image_size=SIDE, patch_size=PATCH, **sizes, **options)


def timm_vit(kind: str = "VisionTransformer", **options) -> nn.Module:
    import timm.models.deit
    import timm.models.vision_transformer

    module = timm.models.deit if kind != "VisionTransformer" else timm.models.vision_transformer
    sizes = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": DIM, "depth": 2, "num_heads": 2}
    return getattr(module, kind)(num_classes=5, **sizes, **options)


def transformers_vit(kind: str = "ViT") -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=5,
    )
    return getattr(transformers, f"{kind}ForImageClassification")(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchvision": torchvision_vit,
    "torchvision, pre_logits": lambda: torchvision_vit(representation_size=16),
    "timm": timm_vit,
    "timm, average": lambda: timm_vit(global_pool="avg"),
    "timm, average, no class token": lambda: timm_vit(
        global_pool="avg", class_token=False, fc_norm=False
    ),
    "timm, registers": lambda: timm_vit(reg_tokens=3, no_embed_class=True, pre_norm=True),
    "timm, attention pooling": lambda: timm_vit(global_pool="map", class_token=False),
    "timm, dynamic size": lambda: timm_vit(dynamic_img_size=True, init_values=0.1),
    "timm, DeiT distilled": lambda: timm_vit("VisionTransformerDistilled"),
    "transformers": transformers_vit,
    "transformers, DeiT": lambda: transformers_vit("DeiT"),
}
every_model = pytest.mark.parametrize("name", MODELS)
three_models = pytest.mark.parametrize("name", ["torchvision", "timm, registers", "transformers"])


@functools.cache
def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return shaken(MODELS[name]())


def vit(name: str = "torchvision") -> Classifier:
    return Classifier(made(name), mean=(0.4, 0.5, 0.6), std=(0.3, 0.2, 0.25))


def data(n: int = 3, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """Images, and maps of blobs that cut through patches."""
    coarse = rand(n, 1, 5, 5, seed=3)
    maps = nn.functional.interpolate(coarse, (side, side), mode="bilinear")[:, 0]
    return random_images(n, side), maps


def patch_mask(mask: Tensor) -> list[int]:
    """The numbers of the patches that a mask of pixels keeps, one after the other: [H,W]."""
    h, w = (side // PATCH for side in mask.shape)
    counts = [
        int(mask[i * PATCH : (i + 1) * PATCH, j * PATCH : (j + 1) * PATCH].sum())
        for i in range(h)
        for j in range(w)
    ]
    return [number for number, count in enumerate(counts) if count >= PATCH * PATCH / 2]


def slow_logits(classifier: Classifier, image: Tensor, kept: list[int]) -> Tensor:
    """The logits of one image of whose patches some are kept: [3,H,W] -> [5].

    Blocks, norm and head of torchvision's VisionTransformer, one token list at a time.
    """
    model = classifier.bare
    with torch.no_grad():
        pixels = classifier.normalize(image[None])[0]
        found = [model.class_token[0, 0] + model.encoder.pos_embedding[0, 0]]
        across = image.shape[2] // PATCH
        for number in kept:
            i, j = number // across * PATCH, number % across * PATCH
            patch = pixels[:, i : i + PATCH, j : j + PATCH]
            token = model.conv_proj.weight.flatten(1) @ patch.flatten() + model.conv_proj.bias
            found.append(token + model.encoder.pos_embedding[0, 1 + number])
        tokens = torch.stack(found)[None]
        for block in model.encoder.layers:
            tokens = block(tokens)
        return model.heads(model.encoder.ln(tokens)[:, 0])[0]


# The forward pass


@every_model
def test_with_all_tokens_the_logits_are_those_of_the_model(name):
    classifier, (images, _) = vit(name), data()
    parts, inputs = token_model(classifier), classifier.normalize(images)
    with torch.no_grad():
        found = parts.finish(parts.embed(inputs))
        wanted = classifier(images)
    assert float(wanted.std()) > 0.1  # logits that are all alike would agree with anything
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_size_that_timm_interpolates_positions_for_has_the_logits_of_the_model():
    classifier, (images, _) = vit("timm, dynamic size"), data(side=48)
    parts, inputs = token_model(classifier, (48, 48)), classifier.normalize(images)
    with torch.no_grad():
        found = parts.finish(parts.embed(inputs))
        torch.testing.assert_close(found, classifier(images), rtol=1e-5, atol=1e-5)


def attention_hidden(monkeypatch, hidden: Tensor) -> None:
    """No attention of any library sees the hidden keys: bool [prefix+L]."""
    real, rows = nn.functional.scaled_dot_product_attention, hidden

    def attention(query, key, value, attn_mask=None, *rest, **options):
        assert attn_mask is None
        assert key.shape[-2] == len(rows)
        bias = torch.zeros(len(rows)).masked_fill(rows, -torch.inf)
        return real(query, key, value, bias.expand(query.shape[-2], -1), *rest, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)


@pytest.mark.parametrize(
    "name", ["torchvision", "timm", "timm, registers", "timm, DeiT distilled", "transformers"]
)
def test_leaving_tokens_out_equals_attention_that_cannot_see_them(monkeypatch, name):
    classifier, (images, maps) = vit(name), data(1)
    band = show(0.5)
    kept = patch_mask(maps[0] > 0.5)
    assert 2 < len(kept) < 14
    found = predict(classifier, images, maps, torch.tensor([2]), [band], fill="drop")
    parts = token_model(classifier)
    with torch.no_grad():
        tokens = parts.embed(classifier.normalize(images)).shape[1]
    hidden = torch.ones(tokens, dtype=torch.bool)
    hidden[: tokens - 16] = False
    hidden[tokens - 16 + torch.tensor(kept)] = False
    torch.backends.mha.set_fastpath_enabled(False)  # it would not call the function replaced here
    try:
        attention_hidden(monkeypatch, hidden)
        with torch.no_grad():
            seen = classifier(images).softmax(1)[:, 2]
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(found.confidences[:, 0], seen, rtol=1e-5, atol=1e-5)


@three_models
def test_an_image_without_tokens_is_the_class_token_alone(name):
    classifier, (images, _) = vit(name), data(2)
    maps = torch.zeros(2, SIDE, SIDE)
    found = predict(classifier, images, maps, torch.tensor([1, 1]), [show(0.5)], fill="drop")
    parts = token_model(classifier)
    with torch.no_grad():
        alone = parts.embed(classifier.normalize(images))[:, :-16]
        wanted = parts.finish(alone).softmax(1)[:, 1]
    torch.testing.assert_close(found.confidences[:, 0], wanted)
    assert found.confidences[0] == found.confidences[1]


@pytest.mark.parametrize("name", ["timm, average", "timm, attention pooling"])
def test_a_pool_over_no_tokens_is_zero(name):
    classifier, (images, _) = vit(name), data(2)
    maps = torch.zeros(2, SIDE, SIDE)
    found = predict(classifier, images, maps, torch.tensor([1, 1]), [show(0.5)], fill="drop")
    model = classifier.bare
    with torch.no_grad():
        wanted = model.head(model.fc_norm(torch.zeros(2, DIM))).softmax(1)[:, 1]
    torch.testing.assert_close(found.confidences[:, 0], wanted)


# Masks


def test_a_patch_is_kept_if_at_least_half_of_its_pixels_are():
    mask = torch.zeros(1, 16, 16, dtype=torch.bool)
    mask[0, :4, :8] = True  # half
    mask[0, :4, 8:15] = True  # less
    mask[0, 8:, :8] = True  # all
    mask[0, 8:12, 8:] = mask[0, 12, 8] = True  # one more than half
    assert patches_of(mask, (8, 8)).tolist() == [[True, False, True, True]]


def test_patches_of_runs_are_those_of_their_pixels():
    _, maps = data(3)
    places = ranks(maps)
    spans = torch.tensor([[[0, 0], [0, 1024], [0, 500], [500, 1024], [300, 700], [10, 11]]])
    found = kept_patches(places, spans.expand(3, -1, -1), (8, 8))
    for i in range(3):
        for j, (start, stop) in enumerate(spans[0].tolist()):
            kept = patch_mask((places[i] >= start) & (places[i] < stop))
            assert found[i, j].nonzero()[:, 0].tolist() == kept


def test_patches_may_be_oblong():
    mask = torch.zeros(1, 4, 6, dtype=torch.bool)
    mask[0, :2, 3:] = True
    found = ranks(mask.float())
    assert patches_of(mask, (2, 3)).tolist() == [[False, True, False, False]]
    assert kept_patches(found, torch.tensor([[[0, 6]]]), (2, 3)).tolist() == [
        [[False, True, False, False]]
    ]


@pytest.mark.parametrize("patches", [1, 31, 32, 70])
def test_distinct_patches_are_all_masks_once(patches):
    kept = rand(4, 30, patches, seed=patches) > 0.5
    kept[:, 10:20] = kept[:, :10]
    kept[2] = kept[1]  # equal masks of two images are two
    owners, rows, place = distinct_patches(kept)
    assert torch.equal(rows[place], kept)
    assert torch.equal(owners[place], torch.arange(4)[:, None].expand(-1, 30))
    wanted = {(i, *row) for i, some in enumerate(kept.tolist()) for row in some}
    assert (
        len(owners)
        == len(wanted)
        == len({(i, *r) for i, r in zip(owners.tolist(), rows.tolist(), strict=True)})
    )


def test_masks_of_the_same_patches_are_asked_once():
    classifier, (images, _) = vit(), data(1)
    maps = torch.linspace(1, 0, SIDE * SIDE).view(1, SIDE, SIDE)  # line by line
    bands = [top(share / 64) for share in range(64)]
    found = predict(classifier, images, maps, torch.tensor([0]), bands, fill="drop")
    # Steps of half a line: two patches after 3.5 lines of a row of patches, two after 4 lines.
    assert found.calls.tolist() == [2 * 4]


# Columns


def slow_columns(image: Tensor, heatmap: Tensor, target: int, **options) -> dict[str, float]:
    """The eleven columns, by the reference: a masked image is known by a channel of its own."""
    classifier = vit()
    marked = torch.cat([image, torch.ones(1, *image.shape[1:])])

    def logits_of(masked: Tensor) -> Tensor:
        return slow_logits(classifier, image, patch_mask(masked[3] > 0))

    return reference_columns(logits_of, marked, heatmap, target, **options)


@pytest.mark.parametrize("score", ["accuracy", "confidence"])
def test_all_columns_equal_the_slow_way(score):
    images, maps = data(3)
    targets = vit()(images).argmax(1)
    options = {"score": score, "alpha_min": 0.4, **COARSE}
    scores = evaluate(vit(), images, maps, targets, fill="drop", **options)
    assert len(COLUMNS) == 11
    for i in range(3):
        wanted = slow_columns(images[i], maps[i], int(targets[i]), **options)
        for name in COLUMNS:
            assert float(scores[name][i]) == pytest.approx(wanted[name], abs=1e-5), name
    assert scores.msi.unique().numel() > 1


@pytest.mark.parametrize("name", ["timm, average", "transformers"])
def test_batch_and_order_of_images_do_not_matter(name):
    classifier, (images, maps) = vit(name), data(4)
    options = {"fill": "drop", "score": "confidence", **COARSE}
    scores = evaluate(classifier, images, maps, **options)
    again = evaluate(classifier, images.flip(0), maps.flip(0), batch_size=3, **options)
    assert again.calls.tolist() == scores.calls.flip(0).tolist()
    for column in COLUMNS:
        torch.testing.assert_close(again[column].flip(0), scores[column], rtol=0, atol=1e-6)


def test_a_held_out_fill_may_be_drop():
    (images, maps), targets = data(3), torch.tensor([0, 1, 2])
    options = {"score": "confidence", **COARSE}
    scores = evaluate(vit(), images, maps, targets, held_out_fill="drop", **options)
    black = evaluate(vit(), images, maps, targets, **options)
    dropped = evaluate(vit(), images, maps, targets, fill="drop", **options)
    torch.testing.assert_close(scores.msi, black.msi)
    torch.testing.assert_close(scores["msi_held_out"], dropped.msi)
    assert (black.msi - dropped.msi).abs().max() > 1e-3


def test_several_methods_in_one_pass_and_sampled_calls_agree():
    images, maps = data(3)
    both = torch.cat([maps, 1 - maps])
    probe = probe_for(vit(), fill="drop", **COARSE)
    exact = ask(probe, images, both)
    some = ask(probe_for(vit(), fill="drop", calls=12, **COARSE), images, both)
    alone = ask(probe, images, 1 - maps)
    torch.testing.assert_close(exact.confidences[3:], alone.confidences)
    asked = exact.confidences.gather(1, some.drawn.long())
    torch.testing.assert_close(some.confidences, asked)


def test_leakage_leaves_tokens_out_too():
    classifier, (images, maps) = vit(), data(6)
    targets = torch.tensor([0, 1, 2, 0, 1, 2])
    found = leak(classifier, images, maps, targets, donors=2, fill="drop", noises=2)
    again = leak(classifier, images, maps, targets, donors=2, fill="drop", noises=2, batch_size=1)
    assert torch.equal(found.donors, again.donors)
    grey = torch.full_like(images[0], 0.5)
    for i in range(6):
        named = int(slow_logits(classifier, grey, patch_mask(maps[i] > 0.5)).argmax())
        assert float(found.grey[i]) == float(named == targets[i])


# What must not change, and what is refused


@three_models
def test_the_model_is_left_as_it_was(name):
    model = deepcopy(made(name)).train()
    model.get_submodule(next(n for n, _ in model.named_children())).eval()
    traces, (images, maps) = Traces(model), data(2)
    evaluate(Classifier(model), images, maps, fill="drop", leak_donors=0, **COARSE)
    traces.check()


def test_out_of_memory_halves_the_batch():
    classifier, (images, maps) = vit(), data(2)
    wanted = evaluate(classifier, images, maps, fill="drop", **COARSE)
    model = deepcopy(made("torchvision"))
    model.encoder.layers = SmallMemory(model.encoder.layers, 2)
    short = Classifier(model, mean=classifier.mean, std=classifier.std)
    with pytest.warns(RuntimeWarning, match="memory"):
        scores = evaluate(short, images, maps, fill="drop", **COARSE)
    torch.testing.assert_close(scores.msi, wanted.msi)


def test_a_target_that_is_no_class_is_refused():
    images, maps = data(1)
    with pytest.raises(UserError, match=r"targets must lie in 0..4"):
        predict(vit(), images, maps, torch.tensor([5]), [show(0.5)], fill="drop")


def stem() -> nn.Module:
    return torchvision_vit(conv_stem_configs=[ConvStemConfig(DIM, 3, 8)])


def hybrid() -> nn.Module:
    """A ViT on the features of a convolution, which mixes neighbouring patches."""
    from timm.layers import HybridEmbed

    backbone = nn.Conv2d(3, 6, 3, padding=1)
    return timm_vit(embed_layer=functools.partial(HybridEmbed, backbone=backbone))


class Doubled(VisionTransformer):
    """A model whose forward pass is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (cnn, "torchvision or timm, or a ViT or DeiT of transformers.*got Sequential: use another"),
        (stem, "patches do not overlap.*got Sequential: use another fill"),
        (hybrid, "patches do not overlap.*got HybridEmbed: use another fill"),
        (
            lambda: Doubled(SIDE, PATCH, 2, 2, DIM, 64, num_classes=5),
            "forward pass of Doubled.*differ from the model's own: use another fill",
        ),
    ],
)
@pytest.mark.parametrize("fills", [{"fill": "drop"}, {"held_out_fill": "drop"}])
def test_other_models_are_refused(model, words, fills):
    images, maps = data(2)
    with pytest.raises(UserError, match=words):
        evaluate(Classifier(shaken(model())), images, maps, torch.tensor([0, 1]), **fills, **COARSE)


def test_images_of_half_patches_are_refused():
    images, maps = data(1, side=36)
    with pytest.raises(
        UserError, match=r"whole patches of \[8, 8\] pixels, got \[36, 36\]: resize"
    ):
        evaluate(vit("timm, dynamic size"), images, maps, fill="drop")


def test_a_model_that_returns_nan_has_nan_in_its_columns():
    model = deepcopy(made("torchvision"))
    with torch.no_grad():
        model.heads.head.bias.fill_(torch.nan)
    with pytest.warns(RuntimeWarning, match="the model gave NaN"):
        scores = evaluate(Classifier(model), *data(1), torch.tensor([0]), fill="drop", **COARSE)
    assert scores.msi.isnan().all()
