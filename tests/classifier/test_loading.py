"""Models by name: torchvision, timm, transformers, this package, Python files, folders."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from PIL import Image
from torch import Tensor
from torchvision import models

from small_models import (
    transformers_vit,
)
from sufficit import Classifier, Recipe, UserError
from sufficit.data.images import read_image


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """An oblong image with some content."""
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


def test_a_set_of_weights_of_torchvision_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    state = models.mobilenet_v2().state_dict()

    def download(url: str, **_: Any) -> dict[str, torch.Tensor]:
        asked.append(url)
        return state

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", download)
    sets = models.MobileNet_V2_Weights
    resizes = []
    for word, wanted in {
        "mobilenet_v2": sets.IMAGENET1K_V2,
        "mobilenet_v2@IMAGENET1K_V2": sets.IMAGENET1K_V2,
        "mobilenet_v2@IMAGENET1K_V1": sets.IMAGENET1K_V1,
    }.items():
        classifier = Classifier.load(f"torchvision:{word}")
        assert asked.pop() == wanted.url
        assert classifier.recipe == Recipe(f"torchvision:mobilenet_v2@{wanted.name}")
        assert classifier.view is not None
        resizes.append(classifier.view.resize)
    assert resizes == [232, 232, 256], "each set has its own preprocessing"


def test_a_saved_classifier_keeps_the_name_of_its_weights(tmp_path: Path) -> None:
    source = "torchvision:mobilenet_v2@IMAGENET1K_V1"
    classifier = Classifier.load(source, weights=None)
    assert classifier.recipe == Recipe(source)
    loaded = Classifier.load(classifier.save(tmp_path))
    assert (loaded.recipe, loaded.view) == (classifier.recipe, classifier.view)


@pytest.mark.parametrize("weights", ["default", None])
def test_a_set_of_weights_that_does_not_exist_is_an_error_that_lists_those_that_do(
    weights: str | None,
) -> None:
    words = (
        "Unknown set of weights of torchvision:mobilenet_v2 'IMAGENET1K_V3'. Did you mean"
        " 'IMAGENET1K_V2'? Known: IMAGENET1K_V1, IMAGENET1K_V2"
    )
    with pytest.raises(UserError, match=re.escape(words)):
        Classifier.load("torchvision:mobilenet_v2@IMAGENET1K_V3", weights=weights)
    with pytest.raises(UserError, match="Did you mean 'torchvision:resnet18@IMAGENET1K_V1'"):
        Classifier.load("resnet18@IMAGENET1K_V1")


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
    image = Image.open(photo).convert("RGB")
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    found = seen_by(classifier, photo)
    assert found.shape == expected.shape
    # They resize tensors or PIL images, which round differently.
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


def test_options_of_the_hub_reach_config_weights_and_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers_vit(3).save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    seen: dict[str, dict[str, Any]] = {}
    for part in ("AutoConfig", "AutoModelForImageClassification", "AutoImageProcessor"):
        auto = getattr(transformers, part)

        def record(*words: Any, _of: Any = (part, auto.from_pretrained), **given: Any) -> Any:
            seen.setdefault(_of[0], dict(given))
            return _of[1](*words, **given)

        monkeypatch.setattr(auto, "from_pretrained", staticmethod(record))
    options = {"revision": "main", "local_files_only": True, "ignore_mismatched_sizes": True}
    Classifier.load(f"transformers:{tmp_path}", **options)
    assert all(one["revision"] == "main" and one["local_files_only"] for one in seen.values())
    assert [one["trust_remote_code"] for one in seen.values()] == [False] * 3
    assert seen["AutoModelForImageClassification"]["ignore_mismatched_sizes"]


@pytest.mark.parametrize("weights", ["default", None])
def test_no_part_of_a_transformers_repository_is_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str | None
) -> None:
    """Neither that of a model whose kind is known, nor its processor, nor a kernel of the hub."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on standard input"))
    sprung = tmp_path / "sprung"
    (tmp_path / "evil.py").write_text(f"from pathlib import Path\nPath({str(sprung)!r}).touch()\n")
    transformers_vit(3).save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    auto = {f"Auto{part}": "evil.Evil" for part in ("Config", "ModelForImageClassification")}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"auto_map": auto}))
    processor = tmp_path / "preprocessor_config.json"
    known = json.loads(processor.read_text())
    mapped = {"auto_map": {"AutoImageProcessor": "evil.Evil"}}
    processor.write_text(json.dumps(known | mapped))
    loaded = Classifier.load(f"transformers:{tmp_path}", weights=weights)
    assert loaded(torch.rand(1, 3, 32, 32)).shape == (1, 3)
    processor.write_text(json.dumps(mapped | {"image_processor_type": "EvilProcessor"}))
    with pytest.raises(UserError, match="cannot get"):
        Classifier.load(f"transformers:{tmp_path}", weights=weights)
    processor.write_text(json.dumps(known))
    for kernel in ("evil/kernel", "flash_attention_2", "paged|evil/kernel"):
        (tmp_path / "config.json").write_text(json.dumps(whole | {"attn_implementation": kernel}))
        with pytest.raises(UserError, match="is not run: set attn_implementation"):
            Classifier.load(f"transformers:{tmp_path}", weights=weights)
    assert not sprung.exists()


def test_code_in_a_transformers_repository_is_never_run(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    (tmp_path / "evil.py").write_text(f"from pathlib import Path\nPath({str(sprung)!r}).touch()\n")
    code = {"AutoConfig": "evil.Config", "AutoModelForImageClassification": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": code}))
    for options in ({}, {"weights": None}):
        with pytest.raises(UserError, match=r"cannot get .*contains custom code"):
            Classifier.load(f"transformers:{tmp_path}", **options)
    with pytest.raises(UserError, match=r"is not run: build the model in a function of your own"):
        Classifier.load(f"transformers:{tmp_path}", trust_remote_code=True)
    assert not sprung.exists()


@pytest.mark.parametrize("source", ["torchvision:resnet18", "timm:resnet10t", "sufficit:digits"])
def test_random_weights_must_be_asked_for(source: str) -> None:
    with pytest.raises(UserError, match=r"no published weights for 7 classes.*weights=FILE"):
        Classifier.load(source, num_classes=7)


def test_options_go_to_a_function_that_takes_them(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "def takes(num_classes=2): return nn.Linear(1, num_classes)\n"
        "def takes_all(**options): return nn.Linear(1, options['num_classes'])\n"
        "def takes_none(classes=2): return nn.Linear(1, classes)\n"
    )
    for name in ("takes", "takes_all"):
        found = Classifier.load(f"python:{tmp_path / 'own.py'}:{name}", num_classes=3)
        assert found.model.out_features == 3
    with pytest.raises(UserError, match=r"takes_none, which takes \(classes=2\): leave it out, or"):
        Classifier.load(f"python:{tmp_path / 'own.py'}:takes_none", num_classes=3)


def test_a_saved_classifier_takes_no_options(tmp_path: Path) -> None:
    Classifier.load("sufficit:digits").save(tmp_path)
    for options in ({"weights": None}, {"num_classes": 3}):
        with pytest.raises(UserError, match="takes no options and no weights: drop them"):
            Classifier.load(tmp_path, **options)


def test_unknown_models_are_named_with_their_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"python:FILE\.py:FUNCTION, the folder of a saved"):
        Classifier.load("nowhere")
    with pytest.raises(UserError, match=r"must be an nn\.Module, got str: Classifier\.load"):
        Classifier("torchvision:resnet18")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"Unknown torchvision model 'resnet19'. Did you mean"):
        Classifier.load("torchvision:resnet19")
    with pytest.raises(UserError, match=r"Unknown timm model 'vit_tiny'"):
        Classifier.load("timm:vit_tiny")
    with pytest.raises(UserError, match=r"Unknown model 'torchvison:resnet18'"):
        Classifier.load("torchvison:resnet18")
    for path in ("mine.py:net", "models/mine.py:net"):
        with pytest.raises(UserError, match=rf"'{path}'. Did you mean 'python:{path}'\?"):
            Classifier.load(path)
    with pytest.raises(UserError, match=r"must have classifier\.json, .* has none: give a folder"):
        Classifier.load(tmp_path)
    with pytest.raises(UserError, match="does not take these options"):
        Classifier.load("torchvision:resnet18", weights=None, depth=3)


def test_a_corrupt_description_is_a_clear_error(tmp_path: Path) -> None:
    Classifier.load("sufficit:digits").save(tmp_path)
    path = tmp_path / "classifier.json"
    saved = json.loads(path.read_text())
    del saved["mean"]
    path.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"classifier\.json is corrupt .*mean"):
        Classifier.load(tmp_path)
    path.write_text("{")
    with pytest.raises(UserError, match=r"classifier\.json could not be read"):
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


def test_the_users_reshape_is_used_but_not_saved(tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match="cannot save reshape, a function"):
        loaded.save(tmp_path / "saved")


def test_a_users_function_makes_a_classifier(tmp_path: Path) -> None:
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


def test_a_users_file_may_import_its_neighbours(tmp_path: Path) -> None:
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


def test_the_shipped_net_reads_held_out_digits() -> None:
    from sufficit.data.digits import synthetic_digits

    digits = synthetic_digits(200, seed=11)
    with torch.no_grad():
        right = Classifier.load("sufficit:digits")(digits.images).argmax(1) == digits.labels
    assert right.float().mean() > 0.95
