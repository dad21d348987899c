"""The paper's architectures: feature sizes, weights from files, folded batch norms."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sufficit import Classifier, Recipe
from sufficit.classifier.architectures import MODELS, build, fill_in, fold
from sufficit.errors import UserError


def seeded(name: str, num_classes: int, side: int) -> nn.Module:
    torch.manual_seed(0)
    return build(name, num_classes, side)


@pytest.mark.parametrize(
    ("name", "side", "features"),
    [
        ("resnet18", 64, (512, 8, 8)),
        ("resnet18", 32, (512, 4, 4)),
        ("resnet18", 224, (512, 7, 7)),
        ("resnet50", 224, (2048, 7, 7)),
        ("resnet50-v1", 224, (2048, 7, 7)),
        ("deit-tiny", 224, (192, 14, 14)),
        ("small-net", 64, (96, 8, 8)),
        ("tiny-vit", 32, (48, 8, 8)),
    ],
)
def test_the_last_map_has_the_papers_size(
    name: str, side: int, features: tuple[int, int, int]
) -> None:
    classifier = Classifier(seeded(name, 10, side), MODELS[name].layer)
    with torch.no_grad():
        found, logits = classifier.features(torch.rand(1, 3, side, side))
    assert found.shape == (1, *features)
    assert logits.shape == (1, 10)


def test_a_vit_sees_one_size() -> None:
    with pytest.raises(UserError, match="vit-b-16 takes 224 px, got 32 px"):
        build("vit-b-16", 10, 32)
    with pytest.raises(UserError, match=r"Unknown model 'resnet19'. Did you mean 'resnet18'"):
        build("resnet19", 10, 32)


def test_stages_of_v1_shrink_in_their_first_convolution() -> None:
    model = seeded("resnet50-v1", 2, 224)
    plain = seeded("resnet50", 2, 224)
    for stage in ("layer2", "layer3", "layer4"):
        block, usual = getattr(model, stage)[0], getattr(plain, stage)[0]
        assert (block.conv1.stride, block.conv2.stride) == ((2, 2), (1, 1))
        assert (usual.conv1.stride, usual.conv2.stride) == ((1, 1), (2, 2))


def trained(model: nn.Module) -> nn.Module:
    """Batch norms with statistics of their own, as training leaves them."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
            module.weight.data.uniform_(0.5, 1.5, generator=generator)
            module.bias.data.normal_(0, 0.1, generator=generator)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "side"), [("resnet18", 32), ("resnet50-v1", 64), ("small-net", 32)]
)
def test_folding_batch_norms_keeps_the_function(name: str, side: int) -> None:
    model = trained(seeded(name, 5, side))
    images = torch.rand(2, 3, side, side)
    with torch.no_grad():
        before = model(images)
        after = fold(model)(images)
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def test_a_folded_classifier_is_saved_and_loaded(tmp_path: Path) -> None:
    options = {"num_classes": 5, "image_size": 32, "folded": True}
    model = fold(trained(seeded("resnet18", 5, 32)))
    classifier = Classifier(model, "layer4", recipe=Recipe("sufficit:resnet18", options))
    classifier.save(tmp_path / "saved")
    again = Classifier.load(tmp_path / "saved")
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(classifier(images), again(images))
    with pytest.raises(UserError, match="ships without weights"):
        Classifier.load("sufficit:resnet18", num_classes=5, image_size=32)
    with pytest.raises(UserError, match="the folder RUN/classifier that it saves as the model"):
        Classifier.load("sufficit:resnet18", weights=None, num_classes=5)


def test_weights_of_a_file_fill_everything_but_a_head_of_other_classes(tmp_path: Path) -> None:
    source = trained(seeded("resnet18", 7, 224))
    half = {k: v.half() if v.ndim > 1 else v for k, v in source.state_dict().items()}
    save_file(half, tmp_path / "w.safetensors")
    model = build("resnet18", 3, 224)
    assert fill_in(model, "resnet18", tmp_path / "w.safetensors", 224) == ("fc",)
    assert model.fc.weight.shape == (3, 512)
    assert torch.equal(model.layer1[0].conv1.weight, half["layer1.0.conv1.weight"].float())
    assert model.layer1[0].conv1.weight.dtype == torch.float32
    same = build("resnet18", 7, 224)
    assert fill_in(same, "resnet18", tmp_path / "w.safetensors", 224) == ()
    assert torch.equal(same.fc.weight, half["fc.weight"].float())
    small = build("resnet18", 7, 32)
    assert fill_in(small, "resnet18", tmp_path / "w.safetensors", 32) == ("conv1",)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    state = seeded("resnet18", 7, 224).state_dict()
    save_file({k: v for k, v in state.items() if "layer3" not in k}, tmp_path / "less.safetensors")
    save_file({**state, "more": torch.ones(1)}, tmp_path / "more.safetensors")
    save_file({**state, "bn1.bias": torch.ones(3)}, tmp_path / "wrong.safetensors")
    (tmp_path / "text.safetensors").write_text("no weights")
    model = build("resnet18", 3, 224)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for name, words in (
        ("less", r"25 missing .*, 0 unknown \[\], 0 of another shape"),
        ("more", r"0 missing \[\], 1 unknown \['more'\]"),
        ("wrong", r"1 of another shape \['bn1.bias \[3\], not \[64\]'\]"),
        ("text", "could not be read as weights"),
        ("none-there", "no weights file at"),
    ):
        with pytest.raises(UserError, match=words):
            fill_in(model, "resnet18", tmp_path / f"{name}.safetensors", 224)
    with pytest.raises(UserError, match=r"does not fit the model: \d+ missing"):
        fill_in(build("resnet50", 3, 224), "resnet50", tmp_path / "more.safetensors", 224)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "left as it was"


def test_a_failed_download_of_weights_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)
    with pytest.raises(
        UserError, match=r"cannot download the weights of resnet18 \(no route.*none for"
    ):
        fill_in(build("resnet18", 3, 224), "resnet18", "default", 224)
    with pytest.raises(UserError, match="deit-tiny has no published weights: give --weights FILE"):
        fill_in(build("deit-tiny", 3, 224), "deit-tiny", "default", 224)
    assert fill_in(build("small-net", 10, 64), "small-net", "default", 64) == ()
    assert "fc" in fill_in(build("resnet18", 3, 224), "resnet18", "none", 224)
