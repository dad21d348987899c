"""Any model as one object, and nothing left behind on it."""

import errno
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import models
from torchvision.models import VisionTransformer

from sufficit import Classifier, Recipe, UserError, View, evaluate
from sufficit.classifier.digit_net import SmallNet
from sufficit.data.images import read_image


def small_vit(size: int = 32) -> nn.Module:
    return VisionTransformer(
        image_size=size, patch_size=8, num_layers=2, num_heads=2, hidden_dim=12, mlp_dim=24
    )


def transformers_vit(classes: int = 5) -> nn.Module:
    config = transformers.ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=classes,
    )
    return transformers.ViTForImageClassification(config)


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


def test_channels_last_maps_are_turned_round() -> None:
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


def test_mean_and_std_are_applied_channel_by_channel() -> None:
    seen: list[Tensor] = []

    class Ear(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images)
            return images[:, :2, 0, 0]

    images = torch.rand(2, 3, 4, 4)
    Classifier(Ear(), mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))(images)
    expected = [(images[:, k] - m) / s for k, m, s in ((0, 0.1, 0.5), (1, 0.2, 1.0), (2, 0.3, 2.0))]
    assert torch.allclose(seen[0], torch.stack(expected, 1))


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ((0.5,), None, "together"),
        ((0.5,), (0.5, 0.5), "one length"),
        ((0.5,), (0.0,), "above 0"),
    ],
)
def test_mean_and_std_are_checked(mean: Any, std: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Classifier(nn.Flatten(), mean=mean, std=std)


def test_classes_have_a_name_each_or_none() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    images = torch.rand(2, 3, 2, 2)
    assert Classifier(model, classes=["a", "b", "c"])(images).shape == (2, 3)
    with pytest.raises(UserError, match="gives 3 classes and 2 have names"):
        Classifier(model, classes=["a", "b"])(images)
    with pytest.raises(UserError, match="got the one word 'abc'"):
        Classifier(model, classes="abc")


@pytest.mark.parametrize(
    "options",
    [{"crop": 64}, {"crop": (64,)}, {"crop": (0, 0)}, {"crop": (64.5, 64)}, {"resize": -1}],
)
def test_a_view_is_made_of_pixels(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="a View's crop"):
        View(**options)


def test_images_of_other_channels_are_refused() -> None:
    classifier = Classifier(SmallNet(), mean=(0.5,) * 3, std=(0.5,) * 3)
    with pytest.raises(UserError, match="images have 1 channels, mean and std have 3"):
        classifier(torch.rand(1, 1, 32, 32))


@pytest.mark.parametrize("kind", ["object", "dict", "tuple"])
def test_logits_are_found_in_what_models_return(kind: str) -> None:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Model(nn.Module):
        def forward(self, images: Tensor) -> Any:
            logits = images[:, :2, 0, 0]
            return {"object": Output(logits), "dict": {"logits": logits}, "tuple": (logits, 1)}[
                kind
            ]

    images = torch.rand(2, 3, 4, 4)
    assert torch.equal(Classifier(Model())(images), images[:, :2, 0, 0])


def state_of(model: nn.Module) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "training": [module.training for module in model.modules()],
        "hooks": [len(getattr(module, kind)) for module in model.modules() for kind in hooks],
        "weights": [t.clone() for t in [*model.parameters(), *model.buffers()]],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grad": [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()],
    }


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


class Moody(SmallNet):
    """Raises when told to."""

    raising = False

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        if self.raising:
            raise RuntimeError("in the middle")
        return logits


@pytest.mark.parametrize("raising", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        lambda c, x: c(x),
        lambda c, x: c.features(x),
        lambda c, x: evaluate(c, x, x[:, 0], percent_step=0.5, value_step=0.5),
    ],
    ids=["call", "features", "evaluate"],
)
def test_the_model_is_afterwards_as_it_was_before(use: Callable[..., Any], raising: bool) -> None:
    model = Moody()
    model.train()
    model.features[2].eval()
    model.head.weight.requires_grad_(False)
    model(torch.rand(4, 3, 16, 16)).sum().backward()
    before = state_of(model)
    model.raising = raising
    try:
        use(Classifier(model), torch.rand(2, 3, 16, 16))
    except RuntimeError:
        assert raising
    assert same(before, state_of(model))
    assert any(grad is not None for grad in before["grad"])


def test_a_saved_classifier_comes_back_with_all_it_knew(tmp_path: Path) -> None:
    classifier = Classifier(
        SmallNet(num_classes=3, width=4),
        layer="features",
        mean=(0.1, 0.2, 0.3),
        std=(1.0, 2.0, 3.0),
        classes=["a", "b", "c"],
        view=View((20, 30), 25),
        recipe=Recipe("sufficit:digits", {"num_classes": 3, "width": 4}),
    )
    loaded = Classifier.load(classifier.save(tmp_path / "saved"))
    images = torch.rand(2, 3, 20, 30)
    assert torch.equal(loaded(images), classifier(images))
    for name in ("layer", "mean", "std", "classes", "view", "recipe"):
        assert getattr(loaded, name) == getattr(classifier, name)


@pytest.mark.parametrize("which", ["write_bytes", "write_text"])
def test_a_full_disk_leaves_what_was_saved_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    classifier = Classifier.load("sufficit:digits")
    classifier.save(tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    for weights in classifier.model.parameters():
        weights.data.zero_()
    classifier.classes = tuple("abcdefghij")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, which, full)
    for place in ("saved", "new"):
        with pytest.raises(UserError, match="could not be written: No space left on device"):
            classifier.save(tmp_path / place)
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before
    assert not list((tmp_path / "new").iterdir())


def test_a_folder_that_may_not_be_written_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with pytest.raises(UserError, match="can't be a folder of results: no right to write there"):
        Classifier.load("sufficit:digits").save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_what_would_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    recipe = Recipe("torchvision:resnet18", {"num_classes": 4, "norm_layer": "x"})
    odd = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), layer="0", recipe=recipe)
    with pytest.raises(UserError, match=r"the option 'norm_layer' is not saved.*Classifier\.load"):
        odd.save(tmp_path / "odd")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_name_says_how_to_be_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="recipe="):
        Classifier(nn.Flatten()).save(tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """An oblong picture with something in it."""
    noise = torch.rand(5, 7, 3, generator=torch.Generator().manual_seed(0))
    small = Image.fromarray((noise * 255).byte().numpy())
    small.resize((331, 247), Image.Resampling.BICUBIC).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def seen_by(classifier: Classifier, photo: Path) -> Tensor:
    return classifier.normalize(read_image(photo, classifier.view)[None])[0]


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0", "swin_t"])
def test_torchvision_models_see_what_torchvision_shows_them(name: str, photo: Path) -> None:
    classifier = Classifier.load(f"torchvision:{name}", weights=None)
    transforms = models.get_model_weights(name).DEFAULT.transforms()
    expected = transforms(Image.open(photo).convert("RGB"))
    assert torch.allclose(seen_by(classifier, photo), expected, atol=1e-5)


def test_torchvision_models_know_their_classes() -> None:
    classifier = Classifier.load("torchvision:resnet18", weights=None)
    assert classifier.classes is not None
    assert classifier.classes[1] == "goldfish"
    own = Classifier.load("torchvision:resnet18", weights=None, num_classes=7)
    assert own.classes is None
    assert own(torch.rand(1, 3, 32, 32)).shape == (1, 7)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "convnext_atto"])
def test_timm_models_see_what_timm_shows_them(name: str, photo: Path) -> None:
    classifier = Classifier.load(f"timm:{name}", weights=None)
    config = timm.data.resolve_model_data_config(classifier.model)
    expected = timm.data.create_transform(**config)(Image.open(photo).convert("RGB"))
    assert torch.allclose(seen_by(classifier, photo), expected, atol=1e-5)


def processors() -> dict[str, Any]:
    return {
        "stretched": transformers.ViTImageProcessor(size={"height": 32, "width": 40}),
        "cropped": transformers.CLIPImageProcessor(
            size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}
        ),
        "by share": transformers.ConvNextImageProcessor(size={"shortest_edge": 32}),
        "by share, large": transformers.ConvNextImageProcessor(size={"shortest_edge": 384}),
    }


@pytest.mark.parametrize("kind", list(processors()))
def test_transformers_models_see_what_their_processor_shows_them(
    kind: str, photo: Path, tmp_path: Path
) -> None:
    processor = processors()[kind]
    transformers_vit().save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    classifier = Classifier.load(f"transformers:{tmp_path}")
    picture = Image.open(photo).convert("RGB")
    expected = processor(picture, return_tensors="pt")["pixel_values"][0]
    found = seen_by(classifier, photo)
    assert found.shape == expected.shape
    # They resize tensors or pictures, which round pixels differently.
    assert (found - expected).abs().mean() < 0.02


def test_transformers_models_are_read_from_a_folder(tmp_path: Path) -> None:
    model = transformers_vit()
    model.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    classifier = Classifier.load(f"transformers:{tmp_path}")
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = model.eval()((images - 0.5) / 0.5).logits
        assert torch.allclose(classifier(images), expected, atol=1e-6)
    own = Classifier.load(f"transformers:{tmp_path}", weights=None, num_classes=3)
    assert own(images).shape == (2, 3)


def test_transformers_classes_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Configurations on disk have their numbers sorted as text: 0, 1, 10, 11, 2."""
    config = transformers_vit(12).config
    config.id2label = {i: f"class {i}" for i in sorted(range(12), key=str)}
    config.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    classifier = Classifier.load(f"transformers:{tmp_path}", weights=None)
    assert classifier.classes == tuple(f"class {i}" for i in range(12))


@pytest.mark.parametrize("source", ["torchvision:resnet18", "timm:resnet10t", "sufficit:digits"])
def test_random_weights_are_not_given_unasked(source: str) -> None:
    with pytest.raises(UserError, match=r"no published weights for 7 classes.*weights=FILE"):
        Classifier.load(source, num_classes=7)


def test_a_saved_classifier_takes_no_options(tmp_path: Path) -> None:
    Classifier.load("sufficit:digits").save(tmp_path)
    for options in ({"weights": None}, {"num_classes": 3}):
        with pytest.raises(UserError, match="takes no options and no weights"):
            Classifier.load(tmp_path, **options)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_of_ones_own_are_put_into_a_named_architecture(tmp_path: Path, suffix: str) -> None:
    model = SmallNet(num_classes=4)
    path = tmp_path / f"w{suffix}"
    if suffix == ".pt":
        state = {f"module.{key}": value for key, value in model.state_dict().items()}
        torch.save({"state_dict": state}, path)
    else:
        save_file(model.state_dict(), path)
    loaded = Classifier.load("sufficit:digits", weights=path, num_classes=4)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(loaded(images), Classifier(model)(images))


def test_weights_that_do_not_fit_say_how(tmp_path: Path) -> None:
    save_file(SmallNet(num_classes=4).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"2 of another shape .*head.*number of classes"):
        Classifier.load("sufficit:digits", weights=tmp_path / "w.safetensors", num_classes=5)
    with pytest.raises(UserError, match="no weights file"):
        Classifier.load("sufficit:digits", weights=tmp_path / "absent.pt", num_classes=5)


def test_pickles_are_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return Path.write_text, (tmp_path / "sprung", "x")

    (tmp_path / "w.pt").write_bytes(pickle.dumps(Trap()))
    torch.save({"x": Trap()}, tmp_path / "v.pt")
    for name in ("w.pt", "v.pt"):
        with pytest.raises(UserError, match="could not be read as weights"):
            Classifier.load("sufficit:digits", weights=tmp_path / name, num_classes=5)
    assert not (tmp_path / "sprung").exists()


def test_unknown_models_are_named_with_their_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Unknown torchvision model 'resnet19'. Did you mean"):
        Classifier.load("torchvision:resnet19")
    with pytest.raises(UserError, match=r"Unknown timm model 'vit_tiny'"):
        Classifier.load("timm:vit_tiny")
    with pytest.raises(UserError, match=r"Unknown model 'torchvison:resnet18'"):
        Classifier.load("torchvison:resnet18")
    with pytest.raises(UserError, match=r"has no classifier\.json"):
        Classifier.load(tmp_path)
    with pytest.raises(UserError, match="does not take these options"):
        Classifier.load("torchvision:resnet18", weights=None, depth=3)


def test_a_damaged_description_is_a_clear_error(tmp_path: Path) -> None:
    Classifier.load("sufficit:digits").save(tmp_path)
    path = tmp_path / "classifier.json"
    saved = json.loads(path.read_text())
    del saved["mean"]
    path.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"classifier\.json is damaged .*mean"):
        Classifier.load(tmp_path)
    path.write_text("{")
    with pytest.raises(UserError, match="damaged"):
        Classifier.load(tmp_path)


OWN = """
from torch import nn
from sufficit import Classifier

def model(width=2):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, width))

def classifier():
    return Classifier(model(), mean=(0.1,) * 3, std=(2.0,) * 3, classes=["a", "b"])

def nothing():
    return 3
"""


def test_a_reshape_of_ones_own_is_kept_but_not_saved(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        OWN
        + """
def reshaped():
    return Classifier(model(), layer="0", reshape=lambda out: out.view(-1, 3, 2, 2))
"""
    )
    loaded = Classifier.load(f"python:{tmp_path}/own.py:reshaped")
    images = torch.rand(1, 3, 2, 2)
    assert torch.equal(loaded.features(images)[0], images)
    loaded.recipe = Recipe("sufficit:digits")
    with pytest.raises(UserError, match="reshape is a function, which is not saved"):
        loaded.save(tmp_path / "saved")


def test_a_function_of_ones_own_makes_a_classifier(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    images = torch.rand(2, 3, 2, 2)
    assert Classifier.load(f"python:{path}:model", width=5)(images).shape == (2, 5)
    loaded = Classifier.load(f"python:{path}:classifier")
    assert (loaded.mean, loaded.classes) == ((0.1,) * 3, ("a", "b"))
    for name, message in [
        (f"{path}:absent", "has no function 'absent'"),
        (f"{path}:nothing", "must return an nn.Module or a Classifier, got int"),
        (f"{tmp_path}/absent.py:model", "no Python file"),
        ("absent_module:model", "absent_module raised ModuleNotFoundError"),
    ]:
        with pytest.raises(UserError, match=message):
            Classifier.load(f"python:{name}")


def test_a_file_of_ones_own_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_own.py").write_text("WIDTH = 4")
    (tmp_path / "own_with_neighbour.py").write_text("""
from __future__ import annotations
from dataclasses import dataclass
from torch import nn
from neighbour_of_own import WIDTH

@dataclass
class Settings:
    width: int = WIDTH

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, Settings().width))
""")
    loaded = Classifier.load(f"python:{tmp_path}/own_with_neighbour.py:model")
    assert loaded(torch.rand(1, 3, 2, 2)).shape == (1, 4)


def test_a_saved_classifier_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = Classifier.load(f"python:{tmp_path}/own.py:model")
    with pytest.raises(UserError, match="no name to save"):
        own.save(tmp_path / "saved")
    Classifier.load("sufficit:digits").save(tmp_path)
    path = tmp_path / "classifier.json"
    saved = json.loads(path.read_text())
    for recipe in (
        {"source": f"python:{tmp_path}/own.py:model", "options": {}},
        {"source": f"transformers:{tmp_path}", "options": {"trust_remote_code": True}},
        {"source": str(tmp_path), "options": {}},
    ):
        path.write_text(json.dumps(saved | {"recipe": recipe}))
        with pytest.raises(UserError, match="names code to run, or no known architecture"):
            Classifier.load(tmp_path)


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


def test_half_precision_images_are_normalised_in_full() -> None:
    classifier = Classifier(SmallNet(), mean=(0.485,) * 3, std=(0.229,) * 3)
    images = torch.rand(1, 3, 8, 8).bfloat16()
    assert torch.equal(classifier.normalize(images), classifier.normalize(images.float()))


def test_the_shipped_net_reads_held_out_digits() -> None:
    from sufficit.data.digits import synthetic_digits

    digits = synthetic_digits(200, seed=11)
    with torch.no_grad():
        right = Classifier.load("sufficit:digits")(digits.images).argmax(1) == digits.labels
    assert right.float().mean() > 0.95
