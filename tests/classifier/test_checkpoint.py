"""A classifier on disk: saved and loaded without loss, and never trusted."""

import errno
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import get_model

from object_server import ObjectServer, denied
from sufficit import Classifier, Recipe, UserError, View
from sufficit.classifier.digit_net import SmallNet
from sufficit.errors import GoneError


@pytest.mark.parametrize(
    "options",
    [{"crop": 64}, {"crop": (64,)}, {"crop": (0, 0)}, {"crop": (64.5, 64)}, {"resize": -1}],
)
def test_a_view_is_made_of_pixels(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="a View's crop"):
        View(**options)


def test_a_saved_classifier_is_loaded_without_loss(tmp_path: Path) -> None:
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


def test_a_folder_without_write_permission_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with pytest.raises(UserError, match="can't be a folder of results: no right to write there"):
        Classifier.load("sufficit:digits").save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_options_that_load_rejects_are_not_saved(tmp_path: Path) -> None:
    recipe = Recipe("torchvision:resnet18", {"num_classes": 4, "norm_layer": "x"})
    odd = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), layer="0", recipe=recipe)
    with pytest.raises(UserError, match=r"cannot save the option 'norm_layer'.*Classifier\.load"):
        odd.save(tmp_path / "odd")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_recipe_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="recipe="):
        Classifier(nn.Flatten()).save(tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_the_users_weights_fill_a_named_architecture(tmp_path: Path, suffix: str) -> None:
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


def test_counts_of_batches_may_be_missing_from_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = get_model("mobilenet_v2", num_classes=3).eval()
    state = model.state_dict().items()
    kept = {name: value for name, value in state if not name.endswith("num_batches_tracked")}
    assert len(kept) == len(state) - 52  # batch norms
    save_file(kept, tmp_path / "weights.safetensors")
    given = {"weights": tmp_path / "weights.safetensors", "num_classes": 3}
    loaded = Classifier.load("torchvision:mobilenet_v2", **given)
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded.bare.eval()(images), model(images))
    kept.pop("features.0.1.running_mean")
    save_file(kept, tmp_path / "weights.safetensors")
    with pytest.raises(UserError, match=r"1 missing \['features\.0\.1\.running_mean'\]"):
        Classifier.load("torchvision:mobilenet_v2", **given)


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
        with pytest.raises(UserError, match="could not be read as weights") as caught:
            Classifier.load("sufficit:digits", weights=tmp_path / name, num_classes=5)
    assert str(caught.value).endswith(
        "v.pt could not be read as weights (it holds more than tensors, or is corrupt): give"
        " .safetensors, or a state dict: torch.save(model.state_dict(), FILE)"
    )
    assert not (tmp_path / "sprung").exists()


@pytest.mark.processes
def test_a_classifier_on_object_storage_is_loaded_without_loss(
    bucket: str, object_server: ObjectServer, tmp_path: Path
) -> None:
    recipe = Recipe("sufficit:digits", {"num_classes": 3, "width": 4})
    classifier = Classifier(SmallNet(num_classes=3, width=4), layer="features", recipe=recipe)
    saved = classifier.save(tmp_path / "net")
    object_server.upload(tmp_path / "net", f"{bucket}/saved")
    images = torch.rand(2, 3, 20, 30)
    for source in (saved, f"{bucket}/saved"):
        assert torch.equal(Classifier.load(source)(images), classifier(images))
    weights = f"{bucket}/saved/classifier.safetensors"
    other = Classifier.load("sufficit:digits", weights=weights, num_classes=3, width=4)
    assert torch.equal(other.model(images), classifier.model(images))
    torch.save(classifier.model.state_dict(), tmp_path / "w.pt")
    object_server.upload(tmp_path, f"{bucket}/pt")
    other = Classifier.load("sufficit:digits", weights=f"{bucket}/pt/w.pt", num_classes=3, width=4)
    assert torch.equal(other.model(images), classifier.model(images))


@pytest.mark.processes
def test_a_classifier_on_object_storage_is_not_trusted(
    bucket: str, object_server: ObjectServer, tmp_path: Path
) -> None:
    recipe = Recipe("sufficit:digits", {"num_classes": 3, "width": 4})
    Classifier(SmallNet(num_classes=3, width=4), layer="features", recipe=recipe).save(tmp_path)
    description = tmp_path / "classifier.json"
    whole = description.read_text()
    for wrong, reason in (
        (whole.replace("sufficit:digits", "python:evil.py:make"), "code to run"),
        (whole.replace('"width": 4', '"width": 4000'), "a larger model than the file can fill"),
        ("{", "could not be read"),
    ):
        description.write_text(wrong)
        object_server.upload(tmp_path, f"{bucket}/saved")
        with pytest.raises(UserError, match=f"{bucket}/saved/classifier.*{reason}"):
            Classifier.load(f"{bucket}/saved")
    with pytest.raises(UserError, match=f"{bucket}/none is no folder with classifier.json"):
        Classifier.load(f"{bucket}/none")
    object_server.faults.append(denied())
    with pytest.raises(GoneError, match=f"{bucket}/saved can't be reached"):
        Classifier.load(f"{bucket}/saved")
