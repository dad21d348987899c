"""An exported file, read by onnxruntime alone, says what PyTorch says."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision import models

from small_models import Traces, cnn, rand, small_model, small_vit
from sufficit import Classifier, Lax, UserError, explain
from sufficit.explainers import onnx_file
from sufficit.explainers.explanation import cut_at, draw_all
from sufficit.explainers.size_head import described
from sufficit.training import OrderRecipe
from sufficit.training.lax_training import untrained_order

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def adapter_of(classifier: Classifier, side: int) -> Lax:
    lax = untrained_order(classifier, rand(3, 3, side, side), OrderRecipe(width=8), None, 0)
    nn.init.normal_(lax.net.out.weight)
    lax.size = 0.3
    return lax.eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "side"),
    [
        (cnn, 32),
        (small_vit, 32),
        (lambda: models.mobilenet_v2(num_classes=10), 64),
    ],
    ids=["cnn", "vit", "mobilenet"],
)
def test_a_file_gives_logits_heatmap_and_order_for_any_number_of_images(
    build, side: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    classifier = Classifier(build().eval(), mean=MEAN, std=STD)
    lax = adapter_of(classifier, side)
    traces = Traces(classifier.model, lax)
    path = lax.export(classifier, tmp_path / "new" / "model.onnx", (side, side))
    traces.check()
    assert [one.name for one in path.parent.iterdir()] == ["model.onnx"]  # one file
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for n in (1, 5):
        images = rand(n, 3, side, side, seed=n)
        logits, heatmap, order = map(
            torch.from_numpy,
            session.run(["logits", "heatmap", "order"], {"images": images.numpy()}),
        )
        with torch.no_grad():
            wanted = classifier(images)
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-4)
        maps = explain(classifier, images, method=lax)
        assert ((heatmap >= 0.5) == (maps >= 0.5)).double().mean() > 0.999
        torch.testing.assert_close(heatmap.double(), maps, rtol=0, atol=2e-3)
        shares = torch.full((n,), 0.3)
        assert ((cut_at(order, shares) >= 0.5) == (heatmap >= 0.5)).double().mean() > 0.999


def test_a_predicted_size_is_in_the_file(tmp_path: Path) -> None:
    classifier = Classifier(cnn())
    lax = adapter_of(classifier, 32)
    images = rand(6, 3, 32, 32, seed=2)
    drawn = draw_all(classifier, images, None, {"lax": lax}, progress=False)["lax"].maps
    numbers = described(drawn)
    lax.predict_sizes((0.1, 0.3, 0.7))
    assert lax.size_head is not None
    # Some images get one size, some another.
    lax.size_head.fit(numbers, torch.eye(3)[torch.arange(6) % 3], 1e-4)
    maps = explain(classifier, images, method=lax)
    shares = (maps >= 0.5).double().mean((1, 2))
    assert len(shares.unique()) == 3
    lax.export(classifier, tmp_path / "a.onnx", (32, 32))
    session = onnxruntime.InferenceSession(
        str(tmp_path / "a.onnx"), providers=["CPUExecutionProvider"]
    )
    heatmap = torch.from_numpy(session.run(["heatmap"], {"images": images.numpy()})[0])
    assert ((heatmap >= 0.5) == (maps >= 0.5)).double().mean() > 0.999


def test_a_cut_in_onnx_is_that_of_a_map() -> None:
    order = rand(3, 9, 7)
    several = torch.tensor([0.1, 0.145, 0.9])
    cut = onnx_file.cut(order, several).double()
    torch.testing.assert_close(cut, cut_at(order, several), rtol=0, atol=1e-6)
    for size in (0.02, 0.3, 0.95):
        wanted = cut_at(order, torch.full((3,), size))
        found = onnx_file.cut(order, torch.full((3,), size)).double()
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    torch.manual_seed(0)
    flat = Classifier(small_model(classes=4).eval())
    with pytest.raises(UserError, match="reads a gradient of the model, which ONNX has not"):
        adapter_of(flat, 32).export(flat, tmp_path / "a.onnx", (32, 32))
    classifier = Classifier(cnn())
    lax = adapter_of(classifier, 32)
    with pytest.raises(UserError, match="the size of the images is not known"):
        lax.export(classifier, tmp_path / "a.onnx")
    with pytest.raises(UserError, match=r"must end in \.onnx, got a\.pt"):
        lax.export(classifier, tmp_path / "a.pt", (32, 32))
    with pytest.raises(UserError, match="trained on another classifier.*train-lax --model MODEL"):
        lax.export(Classifier(cnn(seed=1)), tmp_path / "a.onnx", (32, 32))


class Undecided(nn.Module):
    """What it computes depends on the values of the images."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 6, 3, 2, 1), nn.Linear(6, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.features(images)
        if found.mean() > 0:
            found = found * 2
        return self.head(found.mean((2, 3)))


def test_a_model_that_cannot_be_traced_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    classifier = Classifier(Undecided().eval())
    lax = adapter_of(classifier, 32)
    with pytest.raises(UserError, match="cannot be exported to ONNX.*decisions that depend"):
        lax.export(classifier, tmp_path / "a.onnx", (32, 32))
    assert not (tmp_path / "a.onnx").exists()


@pytest.mark.parametrize("name", ["logits", "order", "heatmap"])
def test_a_file_that_says_something_else_is_refused(name: str, monkeypatch, tmp_path) -> None:
    class Session:
        def __init__(self, *_: object, **__: object) -> None:
            self.first = True

        def run(self, names: list[str], given: dict[str, object]) -> list[object]:
            n = len(given["images"])  # type: ignore[arg-type]
            found = dict(zip(onnx_file.NAMES, wanted, strict=True))
            found = {key: value[:n] if self.first else value[2:] for key, value in found.items()}
            self.first = False
            return [(found[key] + (1.0 if key == name else 0.0)).numpy() for key in names]

    wanted = (rand(3, 4), rand(3, 8, 8) * 0.4, rand(3, 8, 8))
    monkeypatch.setattr("onnxruntime.InferenceSession", Session)
    with pytest.raises(UserError, match="exported"):
        onnx_file.check_file(tmp_path, rand(3, 3, 8, 8), wanted, adapter_of(Classifier(cnn()), 32))


@pytest.mark.slow
def test_the_command_writes_a_file(sufficit, tmp_path: Path) -> None:
    classifier = Classifier.load("sufficit:digits")
    adapter_of(classifier, 64).save_pretrained(tmp_path / "lax")
    run = sufficit(
        "export", tmp_path / "lax", "--model", "sufficit:digits", "--out", tmp_path / "d.onnx"
    )
    assert run.code == 0, run.err
    assert "checked in onnxruntime" in run.words
    session = onnxruntime.InferenceSession(
        str(tmp_path / "d.onnx"), providers=["CPUExecutionProvider"]
    )
    assert [one.name for one in session.get_outputs()] == ["logits", "heatmap", "order"]
